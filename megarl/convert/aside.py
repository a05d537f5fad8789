"""A directory in the making: written aside, resumable, and renamed when it is whole.

``OUT.partial`` holds a journal: one line that says what is being made of what, then one a finished group. A group counts once its line is
durable, which is after its data. An interrupted conversion goes on behind the last one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from megarl.errors import CheckpointError, explain

SUFFIX = ".partial"
_JOURNAL = "journal.jsonl"
_SPARE = 64 << 20  # bytes beyond what is written, for tables of contents and tokenizers
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up", errno.EFBIG: "a file may not become so large"}


class Aside:
    """The directory beside ``out`` in which it is made; a context manager, which lets go of it and never removes anything."""

    def __init__(self, out: Path):
        # A name of its own, so that a link or "." in the given one doesn't put it elsewhere.
        self.out = out.absolute()
        self.path = self.out.with_name(self.out.name + SUFFIX)
        self.groups: dict[int, Any] = {}  # finished group -> what was noted of it
        self._journal: Any = None

    def begin(self, purpose: Mapping[str, Any], needed: int, intact: Callable[[int, Any], bool]) -> None:
        """Make the directory, or take up one that was left there with the same ``purpose``.

        ``purpose``: all that the content depends on, as JSON. A directory of another purpose is begun anew. ``needed``: bytes of the
        result. ``intact``: whether what was noted of a group is still on disk. Raises CheckpointError where another process works there,
        something else is there, or the disk is too small.
        """
        plain = json.loads(json.dumps(purpose))
        with self.guarded(self.path):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            check_room(self.out.parent, needed - (_used(self.path) if self.path.is_dir() else 0))
            fresh = not self.path.is_dir()
            self.path.mkdir(exist_ok=True)
            if not fresh and any(self.path.iterdir()) and not (self.path / _JOURNAL).is_file():
                raise CheckpointError(
                    explain(
                        "something else stands where the conversion would be written aside",
                        where=str(self.path),
                        expected="no such directory, or one that an interrupted conversion left",
                        do="move it, or name another output",
                    )
                )
            self._journal = open(self.path / _JOURNAL, "a+b", buffering=0)  # noqa: SIM115 - closed by __exit__
            self._lock()
            noted = self._read()
            resumed = bool(noted) and noted[0] == plain
            if resumed:
                found = {line["group"]: line["noted"] for line in noted[1:]}
                self.groups = {group: what for group, what in found.items() if intact(group, what)}
            else:
                if noted:
                    print(f"{self.path}: begun with another source or other settings; starting again", file=sys.stderr)
                self._empty()
                self._note(plain)

    def finished(self, group: int, noted: Any = None) -> None:
        """Note, durably, that a group's data are on disk."""
        self.groups[group] = noted
        with self.guarded(self.path / _JOURNAL):
            self._note({"group": group, "noted": noted})

    def publish(self) -> None:
        """Make everything durable and give the directory its name. Raises CheckpointError where that is taken."""
        with self.guarded(self.path):
            for path in [*self.path.rglob("*"), self.path]:
                to_disk(path)
            if self.out.exists():
                raise CheckpointError(
                    explain(
                        "something appeared at the output's name meanwhile",
                        where=str(self.out),
                        got=f"the result is whole in {self.path}",
                        do="move one of them",
                    )
                )
            os.rename(self.path, self.out)
            to_disk(self.out.parent)
            (self.out / _JOURNAL).unlink()

    @contextmanager
    def guarded(self, file: Path) -> Iterator[None]:
        """Raise CheckpointError, which names the file, for what the disk refuses inside."""
        try:
            yield
        except OSError as error:
            full = _FULL.get(error.errno or 0)
            place = next(p for p in (file, *file.parents) if p.exists())
            raise CheckpointError(
                explain(
                    full or "the output can't be written",
                    where=str(error.filename or file),
                    got=f"{error.strerror or error}; {shutil.disk_usage(place).free:,} bytes free there",
                    do=f"make room and run the same command: it goes on from what is in {self.path}"
                    if full
                    else "mend what is said above, and run the same command",
                )
            ) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                explain("another process is converting into this directory", where=str(self.path), do="wait for it, or name another output")
            ) from error

    def _read(self) -> list[Any]:
        """The lines of the journal; one that broke off is none."""
        self._journal.seek(0)
        lines, whole = [], 0
        for text in self._journal.read().splitlines(keepends=True):
            try:
                line = json.loads(text) if text.endswith(b"\n") else None
            except ValueError:
                line = None
            if line is None:
                break
            lines.append(line)
            whole += len(text)
        self._journal.truncate(whole)
        return lines

    def _note(self, line: Any) -> None:
        text = json.dumps(line).encode() + b"\n"
        if self._journal.write(text) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / _JOURNAL))
        os.fsync(self._journal.fileno())

    def _empty(self) -> None:
        for path in self.path.iterdir():
            if path.name == _JOURNAL:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        self._journal.truncate(0)

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._journal is not None:
            self._journal.close()


def check_room(place: Path, needed: int) -> None:
    """Raise CheckpointError unless ``needed`` bytes and some more are free where ``place`` is."""
    free = shutil.disk_usage(next(p for p in (place, *place.parents) if p.exists())).free
    if free < needed + _SPARE:
        raise CheckpointError(
            explain(
                "too little room for the result",
                where=str(place),
                got=f"{free:,} bytes free",
                expected=f"{needed + _SPARE:,}",
                do="make room, or write to another disk",
            )
        )


def unfinished(directory: Path) -> bool:
    """Whether a directory is one in the making."""
    return directory.name.endswith(SUFFIX) and (directory / _JOURNAL).is_file()


def to_disk(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _used(directory: Path) -> int:
    """Bytes on disk of what is in a directory."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
