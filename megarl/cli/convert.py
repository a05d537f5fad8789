"""``megarl convert``: to-megatron, to-hf, inspect. The scripts of tools/convert are these too."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from megarl.errors import EXIT_DATA, EXIT_DONE, EXIT_USER, CheckpointError, ConfigError, explain

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the actions to ``megarl convert``."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    there = actions.add_parser("to-megatron", help="Hugging Face directory -> Megatron distributed checkpoint, which any layout loads")
    there.add_argument("--hf", required=True, metavar="DIR", type=Path, help="config.json, safetensors, tokenizer")
    there.add_argument("--shard-size", default="1GB", metavar="SIZE", type=size_in_bytes, help="of a file; 1GB if not given")
    there.set_defaults(run=_ending(_to_megatron))
    back = actions.add_parser("to-hf", help="Megatron distributed checkpoint -> Hugging Face directory")
    back.add_argument("--megatron", required=True, metavar="DIR", type=Path, help="a converted one, or RUN/checkpoints/step_N/actor")
    back.add_argument("--tokenizer", metavar="DIR", type=Path, help="a model directory with the tokenizer of a run's checkpoint")
    back.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of all tensors; each keeps its own if not given")
    back.add_argument("--shard-size", default="5GB", metavar="SIZE", type=size_in_bytes, help="of a file; 5GB if not given")
    back.set_defaults(run=_ending(_to_hf))
    for action in (there, back):
        action.add_argument("--out", required=True, metavar="DIR", type=Path, help="a new directory")
        action.add_argument("--verify", action="store_true", help="read the result again and compare it before it is put at OUT")
        action.add_argument("--dry-run", action="store_true", help="print what goes where, and write nothing")
    looked = actions.add_parser("inspect", help="family, parameters, dtypes, sizes of a directory of either format, and what is missing")
    looked.add_argument("directory", metavar="DIR", type=Path)
    looked.add_argument("--json", action="store_true", help="print JSON")
    looked.set_defaults(run=_ending(_inspect))


def size_in_bytes(text: str) -> int:
    """5GB, 500MB, 2GiB, or plain bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip(), flags=re.IGNORECASE)
    number = float(found[1]) * _UNITS[(found[2] or "").lower()] if found else 0
    if not 1 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: say 5GB, 500MB, 2GiB or bytes")
    return int(number)


def _ending(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """``run``, which ends with the code of a user's error where checkpoint, place or disk can't be used: here they are what was named."""

    def ended(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except CheckpointError as error:
            from megarl.convert.verify import DiffersError

            if isinstance(error, DiffersError):
                raise
            raise ConfigError(str(error)) from error
        except BrokenPipeError:  # of the progress; what was made so far stays
            return EXIT_USER
        except OSError as error:
            where, got = str(error.filename or ""), error.strerror or error
            raise ConfigError(explain("a file can't be used", where=where, got=got, do="mend its name or permissions")) from error

    return ended


def _to_megatron(args: argparse.Namespace) -> int:
    if args.dry_run:
        from megarl.convert.dry_run import dry_run_to_megatron

        return _print(dry_run_to_megatron(args.hf, args.out))
    from megarl.convert.companions import left_out
    from megarl.convert.to_megatron import to_megatron
    from megarl.weights import fp8

    model = to_megatron(args.hf, args.out, file_bytes=args.shard_size, verified=args.verify)
    lines = [f"left out: {name}: {reason}" for name, reason in (left_out(args.hf) | dict(model.dropped)).items()]
    if args.verify:
        blocks = any(entry.code == fp8.STORED for entry in model.scan.entries.values())
        how = "equal the source's, those in blocks of fp8 multiplied by their factors" if blocks else "are equal bit for bit"
        lines.append(f"verified: {model.plan.elements:,} elements {how}")
    return _print([*lines, str(args.out)])


def _to_hf(args: argparse.Namespace) -> int:
    options = {"tokenizer": args.tokenizer, "dtype": args.dtype, "shard_bytes": args.shard_size}
    if args.dry_run:
        from megarl.convert.dry_run import dry_run_to_hf

        return _print(dry_run_to_hf(args.megatron, args.out, **options))
    from megarl.convert.companions import left_out
    from megarl.convert.to_hf import companions_of, to_hf

    model = to_hf(args.megatron, args.out, verified=args.verify, **options)
    lines = [f"left out: {name}: {reason}" for name, reason in left_out(companions_of(args.megatron, args.tokenizer)).items()]
    if args.verify:
        how = f"equal the source's, cast to {args.dtype}" if args.dtype else "are equal bit for bit"
        lines.append(f"verified: {model.plan.elements:,} elements {how}")
    return _print([*lines, str(args.out)])


def _inspect(args: argparse.Namespace) -> int:
    """Ends with the code of a data error where something is missing."""
    from megarl.convert.inspect import inspect

    found = inspect(args.directory)
    _print([json.dumps(found.to_json(), indent=1)] if args.json else found.lines())
    return EXIT_DATA if found.missing else EXIT_DONE


def _print(lines: Iterable[str]) -> int:
    """Print until nobody reads any more, which is no error: ``| head`` has seen enough."""
    try:
        for line in lines:
            print(line.encode(errors="backslashreplace").decode())  # names of files may be no text
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
    return EXIT_DONE
