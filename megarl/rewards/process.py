"""The child process of the reward pool: ``python -m megarl.rewards.process FILE FUNCTION TIMEOUT_S``.

It reads one call from stdin, answers on what was stdout, and so on until stdin ends. The user's own output goes to stderr,
so that no print can break the protocol. Only the standard library is imported: a respawn costs some tens of milliseconds.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, SupportsFloat

from megarl.errors import ConfigError
from megarl.rewards.loader import load_reward_function
from megarl.rewards.wire import read_blocking, write_blocking

MESSAGE_CHARACTERS = 2000
ORPHAN_CHECK_S = 1.0
CPU_GRACE_S = 10


def main(path: str, name: str, timeout_s: float) -> None:
    """Serve calls until the parent closes the pipe."""
    calls, answers = _private_pipes()
    _die_with_parent()
    me = os.getpid()
    try:
        function = load_reward_function(path, name)
    except ConfigError as error:
        write_blocking(answers, {"refused": str(error)})
        return
    except (Exception, SystemExit):  # the file's own code: whatever it raises is told to the user
        write_blocking(answers, {"broken": _traceback()})
        return
    write_blocking(answers, {"ready": True})
    while (call := read_blocking(calls)) is not None:
        _limit_cpu(timeout_s)
        outcome = score_one(function, call["arguments"])
        if os.getpid() != me:
            os._exit(0)  # a fork made by the user's code came back from the call; its parent answers
        write_blocking(answers, {"id": call["id"], **outcome})


def score_one(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Call the user's function: {"status", "score", "extra"} or {"status", "message"}."""
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_await(result))
        return read_result(result)  # inside the try: repr() and float() of a user's object are the user's code too
    except (Exception, SystemExit):  # an error is a status, never a score
        return {"status": "error", "message": _traceback()}


def read_result(result: Any) -> dict[str, Any]:
    """Turn what a function returned into an outcome.

    A number or bool; a dict with ``score``, whose other numbers are kept as extras; a list or tuple, of which the first item counts.
    Strings are not parsed. NaN and infinity are ``invalid``.
    """
    if isinstance(result, list | tuple) and result:
        result = result[0]
    extra: dict[str, float] = {}
    value = result
    if isinstance(result, dict):
        if "score" not in result:
            return _invalid(f"a dict without 'score': keys {sorted(map(str, result))}")
        value = result["score"]
        numbers = {str(key): _number(item) for key, item in result.items() if key != "score"}
        extra = {key: number for key, number in numbers.items() if number is not None}
    score = _number(value)
    if score is None:
        return _invalid(f"{type(value).__name__}: {repr(value)[:200]}")
    if not math.isfinite(score):
        return _invalid(f"score {score}")
    return {"status": "ok", "score": score, "extra": extra}


def _number(value: Any) -> float | None:
    """``value`` as float, or None. Takes the scalars of numpy and torch without knowing them."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array or tensor of several numbers
        return None


def _invalid(got: str) -> dict[str, Any]:
    return {"status": "invalid", "message": f"returned {got}; expected a finite number, or a dict with one as 'score'"}


async def _await(result: Any) -> Any:
    return await result


def _traceback() -> str:
    """The end of the traceback: its last line names the error."""
    return traceback.format_exc()[-MESSAGE_CHARACTERS:]


def _private_pipes() -> tuple[int, int]:
    """Move the protocol away from fds 0 and 1: the user's ``input()`` meets end-of-file, ``print`` goes to stderr."""
    calls, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return calls, answers


def _die_with_parent() -> None:
    """A thread that ends this process when the pool's process is gone, even in the middle of a call that sleeps.

    A call that spins without releasing the interpreter is ended by :func:`_limit_cpu`.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _limit_cpu(timeout_s: float) -> None:
    """The kernel kills this process when one call burns far more CPU than its wall clock allows."""
    used = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    allowed = math.ceil(used + timeout_s * (os.cpu_count() or 1)) + CPU_GRACE_S
    resource.setrlimit(resource.RLIMIT_CPU, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
