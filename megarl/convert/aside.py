"""A directory in the making: written aside, resumable, and renamed when it is whole.

``OUT.partial`` holds a journal: one line that says what is being made of what, then one a finished group. A group counts once its line is
durable, which is after its data. An interrupted conversion goes on behind the last one. The journal goes last, after the renaming: one that
a stop leaves in a whole ``OUT`` says nothing, and nothing reads it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from megarl.errors import CheckpointError, ConfigError, MegarlError, explain

SUFFIX = ".partial"
JOURNAL = "journal.jsonl"
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
            _refuse_foreign(self.path)
            self.path.mkdir(exist_ok=True)
            self._journal = open(self.path / JOURNAL, "a+b", buffering=0)  # noqa: SIM115 - closed by __exit__
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
        with self.guarded(self.path / JOURNAL):
            self._note({"group": group, "noted": noted})

    def keep_only(self, names: Collection[str]) -> None:
        """Remove all but ``names`` and the journal: what an earlier attempt wrote of a source that had other files then."""
        with self.guarded(self.path):
            for path in self.path.iterdir():
                if path.name not in names and path.name != JOURNAL:
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    else:
                        path.unlink()

    def check(self, verify: Callable[[], object]) -> None:
        """Have what is whole looked at before it gets its name. After an error of ``verify`` the next attempt begins anew."""
        try:
            verify()
        except MegarlError as error:
            with self.guarded(self.path / JOURNAL):
                self._journal.truncate(0)
                os.fsync(self._journal.fileno())
            self.groups = {}
            note = f"nothing was put at {self.out}; what was written is in {self.path}: don't use it. The same command begins again"
            raise type(error)(f"{error}\n  left:     {note}") from error

    def publish(self) -> None:
        """Make everything durable and give the directory its name. Raises CheckpointError where that is taken."""
        with self.guarded(self.path):
            for path in [*self.path.rglob("*"), self.path]:
                to_disk(path)
            if os.path.lexists(self.out):
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
            (self.out / JOURNAL).unlink()

    @contextmanager
    def guarded(self, file: Path) -> Iterator[None]:
        """Raise CheckpointError, which names the file, for what the disk refuses inside."""
        try:
            yield
        except BrokenPipeError:
            raise  # of the progress: nobody reads it any more
        except OSError as error:
            full, place = _FULL.get(error.errno or 0), existing(file)
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
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / JOURNAL))
        os.fsync(self._journal.fileno())

    def _empty(self) -> None:
        self.keep_only(())
        self._journal.truncate(0)

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._journal is not None:
            self._journal.close()


def check_output(out: Path) -> None:
    """Raise CheckpointError where something stands at ``out``, or where none can be made under that name."""
    if os.path.lexists(out):
        raise CheckpointError(
            explain("the directory to write exists already; nothing was changed", where=str(out), do="name a new one, or move this one")
        )
    if out.name == "..":
        raise CheckpointError(explain("the output has no name of its own", where=str(out), do="name a new one"))
    if out.name.endswith(SUFFIX):
        raise CheckpointError(explain("a name for conversions that didn't end", where=str(out), expected=f"one without {SUFFIX}"))
    aside = Aside(out).path
    try:
        os.lstat(aside)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(
            explain("the output can't be written", where=str(aside), got=error.strerror or error, do="name another output")
        ) from error
    _refuse_foreign(aside)


def refuse_inside(out: Path, source: Path) -> None:
    """Raise ConfigError for an ``out`` in a directory that it is made of, which would copy itself, or the other way round."""
    here, there = Path(os.path.realpath(source)), Path(os.path.realpath(out))
    aside = there.with_name(there.name + SUFFIX)
    if there.is_relative_to(here) or here.is_relative_to(aside):
        raise ConfigError(
            explain(
                "the output would be written inside a directory that it is made of, or over it",
                where=str(out),
                got=f"the source {source}",
                expected=f"two directories, neither in the other, and a source that isn't {aside.name}",
                do="name an output elsewhere",
            )
        )


def _refuse_foreign(aside: Path) -> None:
    """Raise CheckpointError where what stands at the name to write aside is none of ours."""
    if not os.path.lexists(aside):
        return
    if not aside.is_dir() or (any(aside.iterdir()) and not (aside / JOURNAL).is_file()):
        raise CheckpointError(
            explain(
                "something else stands where the conversion would be written aside",
                where=str(aside),
                got=None if aside.is_dir() else "no directory",
                expected="no such directory, or one that an interrupted conversion left",
                do="move it, or name another output",
            )
        )


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that there is."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if os.path.exists(p))


def check_room(place: Path, needed: int) -> None:
    """Raise CheckpointError unless ``needed`` bytes and some more are free where ``place`` is."""
    free = shutil.disk_usage(existing(place)).free
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
    return directory.name.endswith(SUFFIX) and (directory / JOURNAL).is_file()


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
