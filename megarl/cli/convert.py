"""``megarl convert``: to-megatron, to-hf, inspect. The scripts of tools/convert are these too."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path

from megarl.errors import EXIT_DATA, EXIT_DONE

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the actions to ``megarl convert``."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    there = actions.add_parser("to-megatron", help="Hugging Face directory -> Megatron distributed checkpoint, which any layout loads")
    there.add_argument("--hf", required=True, metavar="DIR", type=Path, help="config.json, safetensors, tokenizer")
    there.add_argument("--shard-size", default="1GB", metavar="SIZE", type=size_in_bytes, help="of a file; 1GB if not given")
    there.set_defaults(run=_to_megatron)
    back = actions.add_parser("to-hf", help="Megatron distributed checkpoint -> Hugging Face directory")
    back.add_argument("--megatron", required=True, metavar="DIR", type=Path, help="a converted one, or RUN/checkpoints/step_N/actor")
    back.add_argument("--tokenizer", metavar="DIR", type=Path, help="a model directory with the tokenizer of a run's checkpoint")
    back.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of all tensors; each keeps its own if not given")
    back.add_argument("--shard-size", default="5GB", metavar="SIZE", type=size_in_bytes, help="of a file; 5GB if not given")
    back.set_defaults(run=_to_hf)
    for action in (there, back):
        action.add_argument("--out", required=True, metavar="DIR", type=Path, help="a new directory")
        action.add_argument("--verify", action="store_true", help="read the result again and compare it bit for bit")
        action.add_argument("--dry-run", action="store_true", help="print what goes where, and write nothing")
    looked = actions.add_parser("inspect", help="family, parameters, dtypes, sizes of a directory of either format, and what is missing")
    looked.add_argument("directory", metavar="DIR", type=Path)
    looked.add_argument("--json", action="store_true", help="print JSON")
    looked.set_defaults(run=_inspect)


def size_in_bytes(text: str) -> int:
    """5GB, 500MB, 2GiB, or plain bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip(), flags=re.IGNORECASE)
    number = int(float(found[1]) * _UNITS[(found[2] or "").lower()]) if found else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: say 5GB, 500MB, 2GiB or bytes")
    return number


def _to_megatron(args: argparse.Namespace) -> int:
    if args.dry_run:
        from megarl.convert.dry_run import dry_run_to_megatron

        return _print(dry_run_to_megatron(args.hf, args.out))
    from megarl.convert.to_megatron import to_megatron

    model = to_megatron(args.hf, args.out, file_bytes=args.shard_size)
    for name, reason in model.dropped.items():
        print(f"left out: {name}: {reason}")
    if args.verify:
        from megarl.convert.verify import verify

        print(f"verified: {verify(args.hf, args.out):,} elements are equal bit for bit")
    print(args.out)
    return EXIT_DONE


def _to_hf(args: argparse.Namespace) -> int:
    options = {"tokenizer": args.tokenizer, "dtype": args.dtype, "shard_bytes": args.shard_size}
    if args.dry_run:
        from megarl.convert.dry_run import dry_run_to_hf

        return _print(dry_run_to_hf(args.megatron, args.out, **options))
    from megarl.convert.to_hf import to_hf

    to_hf(args.megatron, args.out, **options)
    if args.verify:
        from megarl.convert.verify import verify

        print(f"verified: {verify(args.out, args.megatron):,} elements are equal bit for bit")
    print(args.out)
    return EXIT_DONE


def _inspect(args: argparse.Namespace) -> int:
    """Ends with the code of a data error where something is missing."""
    from megarl.convert.inspect import inspect

    found = inspect(args.directory)
    print(json.dumps(found.to_json(), indent=1) if args.json else "\n".join(found.lines()))
    return EXIT_DATA if found.missing else EXIT_DONE


def _print(lines: Iterable[str]) -> int:
    for line in lines:
        print(line)
    return EXIT_DONE
