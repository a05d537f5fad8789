#!/usr/bin/env python3
"""Hugging Face directory -> Megatron distributed checkpoint: ``hf_to_megatron.py --hf DIR --out DIR``; ``--help`` lists the rest."""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-megatron", *sys.argv[1:]]))
