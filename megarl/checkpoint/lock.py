"""One process at a time writes into a run directory."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType

from megarl.errors import ConfigError, explain


class RunLock:
    """Holds ``RUN/lock`` between ``__enter__`` and ``__exit__``: a BSD lock (flock(2)) on a file that names the owner's pid and host.

    The kernel drops the lock when the owner dies, however it dies, so that no stale lock has to be cleaned up. The file itself stays:
    were it removed, a process that had just opened it would lock a file that nobody else can see.

    Raises:
        ConfigError: on entering, when another process (or another RunLock of this one) holds it; the message names pid and host.
    """

    def __init__(self, run_dir: Path):
        self.path = run_dir / "lock"
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)  # not inherited by workers (PEP 446)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the latter is what some NFS clients say
            os.close(descriptor)
            raise ConfigError(
                explain(
                    "another process works in this run directory",
                    where=str(self.path.parent),
                    got=f"locked by {self._owner()}",
                    expected="a run directory of this process alone",
                    do="wait for that process or end it, or choose another run.dir",
                )
            ) from None
        self._descriptor = descriptor
        self._write({"pid": os.getpid(), "host": socket.gethostname()})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._descriptor is not None, "__exit__ without __enter__"
        os.ftruncate(self._descriptor, 0)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing isn't enough while a child is between fork and exec
        os.close(self._descriptor)
        self._descriptor = None

    def _write(self, owner: dict[str, int | str]) -> None:
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(owner).encode(), 0)

    def _owner(self) -> str:
        try:
            owner = json.loads(self.path.read_text())
        except json.JSONDecodeError:  # it has locked the file and is about to write
            return "a process that is just starting or ending"
        return f"process {owner['pid']} on {owner['host']}"
