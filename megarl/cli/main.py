"""The command line. Each command imports what it needs when it runs, so that help and checks start at once."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence

from megarl import __version__
from megarl.cli.convert import add_convert
from megarl.errors import EXIT_DONE, EXIT_INTERNAL, MegarlError

EXIT_INTERRUPTED = 130  # as a shell reports a process that SIGINT ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (megarl.errors lists them; 130 after an interrupt)."""
    args = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        print("error: this is a fault in megarl, or in code that the recipe brings; the trace above says where", file=sys.stderr)
        return EXIT_INTERNAL


def build_parser() -> argparse.ArgumentParser:
    """The parser; each command leaves its function in ``run``."""
    parser = argparse.ArgumentParser(prog="megarl", description="RLHF of large language models on Ray, Megatron and vLLM.")
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    train = commands.add_parser("train", help="run a recipe, or go on with its run", description="Run a recipe to its last step.")
    _add_recipe(train)
    train.set_defaults(run=_train)

    validate = commands.add_parser("validate", help="check a recipe, its files and first rows; starts nothing")
    _add_recipe(validate)
    validate.set_defaults(run=_validate)

    report = commands.add_parser("report", help="write report.html of a run")
    report.add_argument("run_dir", metavar="RUN", help="the run's directory (run.dir)")
    report.set_defaults(run=_report)

    _add_config(commands.add_parser("config", help="list, explain and show configuration keys"))
    _add_bench(commands.add_parser("bench", help="measure"))
    add_convert(commands.add_parser("convert", help="Hugging Face directories to Megatron checkpoints and back; look into either"))
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file; its relative paths are relative to the current directory")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="as in actor.optim.lr=1e-6; the value is YAML")


def _add_config(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listed = actions.add_parser("list", help="all keys with type, default and meaning")
    listed.set_defaults(run=_config_list)
    explained = actions.add_parser("help", help="one key, or the keys of a group")
    explained.add_argument("key", metavar="KEY")
    explained.set_defaults(run=_config_help)
    shown = actions.add_parser("show", help="a recipe with all that it extends, its overrides and the defaults")
    _add_recipe(shown)
    shown.set_defaults(run=_config_show)
    schema = actions.add_parser("schema", help="JSON Schema of a recipe, for editors")
    schema.set_defaults(run=_config_schema)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    targets = parser.add_subparsers(metavar="WHAT", required=True)
    demo = targets.add_parser("demo", help="run the demo with several seeds; report rewards, step time by phase, start-up, memory")
    demo.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N-1, one run after the other (default 3)")
    demo.add_argument("--out", default="runs/bench-demo", metavar="DIR", help="run directories go below it")
    demo.add_argument("--json", action="store_true", help="print JSON instead of tables")
    demo.add_argument("overrides", metavar="key=value", nargs="*", help="as for train")
    demo.set_defaults(run=_bench_demo)
    rl = targets.add_parser("rl", help="time the steps of a workload of recipes/bench by phase, beside what the hardware allows")
    rl.add_argument("--workload", required=True, metavar="NAME", help="S0, S1, S4, or C0 for a CPU: a recipe of recipes/bench")
    rl.add_argument("--warmup", type=int, default=3, metavar="N", help="steps before those that count (default 3)")
    rl.add_argument("--steps", type=int, default=5, metavar="N", help="steps that count (default 5)")
    rl.add_argument("--out", default="runs/bench-rl", metavar="DIR", help="the run directory and the figures as JSON go below it")
    rl.add_argument("--json", action="store_true", help="print JSON with every step's figures instead of tables")
    rl.add_argument("overrides", metavar="key=value", nargs="*", help="as for train")
    rl.set_defaults(run=_bench_rl)
    convert = targets.add_parser("convert", help="time both conversions beside a plain read and write of the same files")
    convert.add_argument("--gib", type=float, default=2.0, metavar="N", help="size of the model that is made for it, GiB (default 2)")
    convert.add_argument("--rounds", type=int, default=2, metavar="N", help="how often each is measured, in turn (default 2)")
    convert.add_argument("--dir", metavar="DIR", help="on which disk; a temporary directory below it is made and removed")
    convert.add_argument("--json", action="store_true", help="print JSON instead of a table")
    convert.set_defaults(run=_bench_convert)


def _train(args: argparse.Namespace) -> int:
    from megarl.config.checks import check_config
    from megarl.config.load import load_config

    config = load_config(args.recipe, args.overrides)
    for line in check_config(config):
        print(line, flush=True)
    from megarl.controller.run import train  # seconds of imports; a faulty recipe is refused before them

    return train(config)


def _validate(args: argparse.Namespace) -> int:
    from megarl.cli.validate import validate

    for line in validate(args.recipe, args.overrides):
        print(line)
    return EXIT_DONE


def _report(args: argparse.Namespace) -> int:
    from megarl.observe.report import write_report

    print(write_report(args.run_dir))
    return EXIT_DONE


def _config_list(args: argparse.Namespace) -> int:
    from megarl.cli.config import list_keys

    print("\n".join(list_keys()))
    return EXIT_DONE


def _config_help(args: argparse.Namespace) -> int:
    from megarl.cli.config import explain_key

    print("\n".join(explain_key(args.key)))
    return EXIT_DONE


def _config_show(args: argparse.Namespace) -> int:
    from megarl.config.load import load_config, to_yaml

    print(to_yaml(load_config(args.recipe, args.overrides)), end="")
    return EXIT_DONE


def _config_schema(args: argparse.Namespace) -> int:
    import json

    from megarl.config.keys import json_schema

    print(json.dumps(json_schema(), indent=2))
    return EXIT_DONE


def _bench_demo(args: argparse.Namespace) -> int:
    from megarl.controller.bench import bench_demo

    return bench_demo(args.seeds, args.out, args.json, args.overrides)


def _bench_rl(args: argparse.Namespace) -> int:
    from megarl.controller.bench_rl import bench_rl

    return bench_rl(args.workload, args.warmup, args.steps, args.out, args.json, args.overrides)


def _bench_convert(args: argparse.Namespace) -> int:
    from megarl.controller.bench_convert import bench_convert

    return bench_convert(args.gib, args.rounds, args.dir, args.json)


if __name__ == "__main__":
    sys.exit(main())
