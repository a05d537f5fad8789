#!/usr/bin/env python3
"""Megatron distributed checkpoint -> Hugging Face directory: ``megatron_to_hf.py --megatron DIR --out DIR``; ``--help`` lists the rest."""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
