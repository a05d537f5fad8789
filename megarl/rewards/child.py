"""One reward process as the pool sees it: started, asked, killed, started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megarl
from megarl.errors import ConfigError, DataError, WorkerError, explain
from megarl.rewards.wire import Closed, Garbled, ParentEnd

START_TIMEOUT_S = 120.0  # the user's file may import heavy packages; this is no part of a call's limit
PACKAGE_ROOT = str(Path(megarl.__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Outcome:
    """What became of one call."""

    status: str  # ok | error | timeout | invalid
    score: float = float("nan")
    extra: dict[str, float] = field(default_factory=dict)
    message: str = ""


class RewardProcess:
    """A process that runs the user's function, one call at a time. It is replaced when it hangs or dies.

    Raises:
        ConfigError: the function can't be loaded; the message is the loader's.
        WorkerError: the process dies or hangs while it starts.
    """

    def __init__(self, path: str, name: str, timeout_s: float):
        self._path, self._name, self._timeout_s = path, name, timeout_s
        self._calls = 0
        self._start()

    def call(self, arguments: dict[str, Any]) -> Outcome:
        """Run the function once; a process that dies is asked a second time, since the cause may be another's (memory)."""
        for attempt in ("first", "second"):
            try:
                self._ensure_running()
                return self._ask(arguments)
            except TimeoutError:
                self.kill()
                return Outcome("timeout", message=f"no answer within {self._timeout_s:g} s; the process was killed")
            except Garbled:
                self.kill()
                return Outcome("error", message="the function wrote into the pool's pipe; the process was killed")
            except WorkerError as error:
                return Outcome("error", message=str(error))
            except Closed:
                died = f"the process died ({self._end()}) at the {attempt} attempt"
        return Outcome("error", message=died)

    def kill(self) -> None:
        """End the process and all in its group: what the user's code forked goes with it."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # before wait(): until then the number can't belong to anyone else
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def _ask(self, arguments: dict[str, Any]) -> Outcome:
        deadline = time.monotonic() + self._timeout_s
        self._calls += 1
        self._end_of_pipes.send({"id": self._calls, "arguments": arguments}, deadline)
        answer = self._end_of_pipes.receive(deadline)
        if answer.pop("id", None) != self._calls:
            raise Garbled
        try:
            return Outcome(**answer)
        except TypeError as error:
            raise Garbled from error

    def _ensure_running(self) -> None:
        if self._gone():
            self.kill()
            try:
                self._start()
            except ConfigError as error:  # it loaded before: the file changed under a running trainer
                raise WorkerError(str(error)) from error

    def _start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
        environment.setdefault("OMP_NUM_THREADS", "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarl.rewards.process", self._path, self._name, str(self._timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
            start_new_session=True,  # its own group, so that its forks can be killed with it
        )
        self._end_of_pipes = ParentEnd(self._process.stdin.fileno(), self._process.stdout.fileno(), lambda: not self._gone())
        try:
            answer = self._end_of_pipes.receive(time.monotonic() + START_TIMEOUT_S)
        except (Closed, Garbled, TimeoutError) as error:
            self.kill()
            raise WorkerError(
                explain(
                    "the reward process did not start",
                    where=self._path,
                    got=type(error).__name__,
                    expected=f"ready within {START_TIMEOUT_S:g} s",
                )
            ) from error
        if "ready" not in answer:
            self.kill()
            raise ConfigError(
                answer.get("refused")
                or explain(
                    "the reward file can't be imported",
                    where=self._path,
                    got=answer.get("broken"),
                    do="mend the file; it must import by itself",
                )
            )

    def _gone(self) -> bool:
        """Whether the process ended; without reaping it, so that its group's number stays taken until :meth:`kill`."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _end(self) -> str:
        self.kill()
        code = self._process.returncode
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


def check_arguments(item: dict[str, Any], number: int, known: tuple[str, ...]) -> dict[str, Any]:
    """``item`` as keyword arguments.

    Raises:
        DataError: a key missing or unknown.
    """
    needed = set(known) - {"extra_info"}
    if not needed <= set(item) <= set(known):
        raise DataError(explain(f"item {number} to score", where="RewardPool.score", got=sorted(item), expected=sorted(known)))
    return {"extra_info": None, **item}
