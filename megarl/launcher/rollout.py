"""python -m megarl.launcher.rollout: serve one model for generation, without a trainer.

Everything that can be checked without vLLM is checked first; then the port is taken; then the model is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from megarl.errors import EXIT_DONE, ConfigError, MegarlError, explain
from megarl.rollout.server_requests import SEED, TEMPERATURE, TOP_K, TOP_P
from megarl.rollout.server_settings import DTYPES, ServerSettings, check_settings

TOKEN_VARIABLE = "MEGARL_ROLLOUT_TOKEN"
TOKEN_CHARACTERS_MIN = 16
_END_S = 10  # a child that was asked to end has so long before it is killed

log = logging.getLogger()


class Stop(BaseException):
    """A signal told the program to stop while it was still starting. Nobody but :func:`run` may catch it."""


class Signals:
    """SIGTERM and SIGINT end the program with exit code 0, at whatever point they come."""

    def __init__(self) -> None:
        self.stop = False
        self.starting = True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._heard)

    def _heard(self, *_: object) -> None:
        first, self.stop = not self.stop, True
        if self.starting and first:
            raise Stop


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; returns the exit code."""
    logging.basicConfig(level=logging.INFO)
    args = build_parser().parse_args(argv)
    try:
        return run(args)
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def build_parser() -> argparse.ArgumentParser:
    """The options, under the names that verl's tutorials use."""
    parser = argparse.ArgumentParser(
        prog="python -m megarl.launcher.rollout", description="Serve a model: POST /generate.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--model_name_or_path", required=True, metavar="DIR", help="local Hugging Face directory")
    add("--tokenizer_name_or_path", metavar="DIR", help="directory of the tokenizer (default: the model's)")
    add("--rollout_batch_size", type=_at_least_1, default=4, metavar="N", help="sequences in flight at once (default 4)")
    add("--max_prompt_length", type=_at_least_1, default=512, metavar="TOKENS", help="longer prompts are refused (default 512)")
    add("--max_new_tokens", type=_at_least_1, default=128, metavar="TOKENS", help="longest response (default 128)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    add("--dtype", default="auto", choices=DTYPES, help="auto: float32 on a CPU, else what the model's config.json says")
    add("--host", default="127.0.0.1", help=f"any but this machine's own needs a token, from --token_file or {TOKEN_VARIABLE}")
    add("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    add("--token_file", metavar="FILE", help="file that holds the token which clients must send")
    add("--use_paged_attention", nargs="?", const=True, default=True, type=_truth, metavar="true", help="has no effect: vLLM always pages")
    add("--block_size", type=_at_least_1, default=0, metavar="TOKENS", help="of one page of the key/value cache (default: vLLM's)")
    add("--temperature", type=float, default=1.0, help="0: greedy (default 1)")
    add("--top_p", type=float, default=1.0)
    add("--top_k", type=int, default=-1, help="-1: all tokens")
    add("--seed", type=int, help="of requests that name none; without it each draws its own")
    return parser


def _at_least_1(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _truth(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def settings_from(args: argparse.Namespace) -> ServerSettings:
    """The options as a record. Raises ConfigError for sampling settings out of range."""
    for name, (holds, expected) in {"temperature": TEMPERATURE, "top_p": TOP_P, "top_k": TOP_K, "seed": SEED}.items():
        value = getattr(args, name)
        if value is not None and not holds(value):
            raise ConfigError(explain(f"{name} is out of range", where=f"--{name}", got=value, expected=expected))
    if not 0 <= args.port < 65536:
        raise ConfigError(explain("no such port", where="--port", got=args.port, expected="0 to 65535"))
    return ServerSettings(
        model_dir=args.model_name_or_path,
        tokenizer_dir=args.tokenizer_name_or_path or args.model_name_or_path,
        max_concurrent=args.rollout_batch_size,
        max_prompt_tokens=args.max_prompt_length,
        max_new_tokens=args.max_new_tokens,
        device=args.device,
        dtype=args.dtype,
        block_size=args.block_size,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
    )


def read_token(host: str, token_file: str | None, environment: str) -> str:
    """The token that clients must send; empty where none is needed.

    Raises ConfigError for a host that others can reach and no token, or for a token that can't be read or is too short.
    """
    from megarl.rollout.server import is_loopback

    where, token = TOKEN_VARIABLE, environment
    if token_file:
        where = f"--token_file {token_file}"
        try:
            token = Path(token_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(explain("the token can't be read", where=where, got=error)) from error
    token = token.strip()
    if not token and not token_file and is_loopback(host):
        return ""
    if len(token) < TOKEN_CHARACTERS_MIN:
        what = "others could reach this server, and it has no token" if not token else "the token is too short"
        do = f"put a long random one into a file and name it in --token_file, or into {TOKEN_VARIABLE}"
        expected = f"{TOKEN_CHARACTERS_MIN} characters or more"
        raise ConfigError(explain(what, where=f"--host {host}, {where}", got=f"{len(token)} characters", expected=expected, do=do))
    return token


def run(args: argparse.Namespace) -> int:
    """Check, load, serve, and leave no process behind."""
    signals = Signals()
    try:
        settings = settings_from(args)
        token = read_token(args.host, args.token_file, os.environ.get(TOKEN_VARIABLE, ""))
        asyncio.run(_serve(args, settings, token, signals))
    except Stop:
        pass
    finally:
        signals.starting = False
        end_children()
    log.info("Rollout server stopped")
    return EXIT_DONE


async def _serve(args: argparse.Namespace, settings: ServerSettings, token: str, signals: Signals) -> None:
    from megarl.rollout.server import Access, bind, serve
    from megarl.rollout.server_engine import ServerEngine, load_tokenizer, start_engine

    model = check_settings(settings)
    with bind(args.host, args.port) as bound, tempfile.TemporaryDirectory(prefix="megarl-rollout-") as sockets:
        tokenizer = load_tokenizer(settings.tokenizer_dir, model)
        paged = "" if args.use_paged_attention else " (--use_paged_attention false has no effect)"
        log.info(
            "Key/value cache: %d MiB in blocks of %d tokens; vLLM always pages it%s", model.kv_cache_bytes >> 20, settings.block, paged
        )
        log.info("Loading %s as %s on %s; vLLM takes 10 to 60 s", settings.model_dir, model.dtype, settings.device)
        began = time.monotonic()
        engine = ServerEngine(start_engine(settings, model, sockets), tokenizer, settings, model)
        signals.starting = False
        log.info("Model loaded in %.0f s", time.monotonic() - began)
        if not engine.defaults.stop_token_ids:
            log.warning("neither generation_config.json nor the tokenizer names an end-of-sequence token: all responses run to their limit")
        try:
            await engine.bind_to_parent()
            await serve(engine, Access(token), bound, lambda: signals.stop)
        finally:
            engine.close()


def end_children() -> None:
    """End all processes that this one started: vLLM's own way out has been tried, or start-up was broken off."""
    gc.collect()  # vLLM's engine is in reference cycles, and its finalizer fails once the interpreter is half gone
    engines = [psutil.Process(process.pid) for process in multiprocessing.active_children()]
    left = engines + [child for engine in engines for child in engine.children(recursive=True)]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(left, timeout=_END_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
