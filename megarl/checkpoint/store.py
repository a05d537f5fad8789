"""Checkpoints of a run: ``checkpoints/step_N``, written aside and renamed when whole.

step_N/actor, step_N/critic   Megatron distributed checkpoints
step_N/controller.json        what the controller must know to go on; written last
step_N/manifest.json          every file and its size; a directory without it, or that disagrees with it, is not whole
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError, WorkerError, explain


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    step: int
    path: Path

    def state(self) -> dict[str, Any]:
        """What the controller stored."""
        return json.loads((self.path / "controller.json").read_text())


class CheckpointStore:
    """The ``checkpoints`` directory of one run."""

    def __init__(self, directory: Path, keep: int):
        self.directory, self.keep = directory, keep

    @contextmanager
    def writing(self, step: int, roles: tuple[str, ...]) -> Iterator[Path]:
        """:meth:`begin`, for a block that writes the roles and commits; where that fails nothing half-written is left to fill the disk.

        Raises CheckpointError for an OSError, and WorkerError for a worker's failure: with the place, the room left there, and the cause.
        Workers wrap what they meet, and a full disk is then known by the room alone.
        """
        work = self.directory / f"writing_step_{step}"
        try:
            yield self.begin(step, roles)
        except (OSError, WorkerError) as error:
            free = _free_bytes(work)  # before the removal makes room
            shutil.rmtree(work, ignore_errors=True)
            kind = CheckpointError if isinstance(error, OSError) else WorkerError  # a dead or silent worker stays one
            raise kind(
                explain(
                    "a checkpoint could not be written; earlier ones are as they were",
                    where=str(work),
                    got=f"{free:,} bytes free there; {error}",
                    do="make room (run.keep_checkpoints, other runs), or mend what is said above, and start the run again",
                )
            ) from error

    def begin(self, step: int, roles: tuple[str, ...]) -> Path:
        """Make an empty directory aside, with one sub-directory a role; what an earlier attempt left there is removed."""
        work = self.directory / f"writing_step_{step}"
        shutil.rmtree(work, ignore_errors=True)
        for role in roles:
            (work / role).mkdir(parents=True)
        return work

    def commit(self, work: Path, step: int, state: dict[str, Any]) -> Checkpoint:
        """Add the controller's state and the manifest, make all of it durable, give it its name; then drop the oldest.

        The ``keep`` newest whole checkpoints stay, and this one in any case: after a return to an earlier step there may be newer ones.
        """
        (work / "controller.json").write_text(json.dumps(state, indent=1))
        files = {str(p.relative_to(work)): p.stat().st_size for p in sorted(work.rglob("*")) if p.is_file()}
        (work / "manifest.json").write_text(json.dumps(files, indent=1))
        for path in [*(work / name for name in files), work / "manifest.json"]:
            _fsync(path)
        target = self.directory / f"step_{step}"
        shutil.rmtree(target, ignore_errors=True)
        os.rename(work, target)
        _fsync(self.directory)
        self._drop_oldest(committed=step)
        return Checkpoint(step, target)

    def scan(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole checkpoint, and for each newer one why it was passed over, as ``step_N: problem; problem``, newest first.

        ``(None, [])``: nothing was ever committed here. ``(None, [...])``: there are checkpoints and none is whole, which is no reason to
        begin anew.
        """
        skipped = []
        for step in sorted(self._steps(), reverse=True):
            path = self.directory / f"step_{step}"
            problems = self.problems(path)
            if not problems:
                return Checkpoint(step, path), skipped
            skipped.append(f"{path.name}: {_shortened(problems)}")
        return None, skipped

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; older ones are looked at when it is not whole."""
        return self.scan()[0]

    def problems(self, path: Path) -> list[str]:
        """What keeps a directory from being a whole checkpoint; empty when it is one."""
        manifest = path / "manifest.json"
        if not manifest.is_file():
            return ["manifest.json is missing"]
        try:
            files = json.loads(manifest.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            return [f"manifest.json is damaged: {error}"]
        if not isinstance(files, dict) or "controller.json" not in files:
            return ["manifest.json is damaged: it does not list controller.json"]
        found = []
        for name, size in files.items():
            file = path / name
            if not file.is_file():
                found.append(f"{name} is missing")
            elif file.stat().st_size != size:
                found.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
        return found

    def require(self, step: int) -> Checkpoint:
        """Checkpoint ``step``, or CheckpointError that says what is wrong with it."""
        path = self.directory / f"step_{step}"
        if problems := self.problems(path):
            raise CheckpointError(
                explain("not a whole checkpoint", where=str(path), got=_shortened(problems), do="resume from another step")
            )
        return Checkpoint(step, path)

    def _steps(self) -> list[int]:
        names = [p.name.removeprefix("step_") for p in self.directory.glob("step_*") if p.is_dir()]
        return [int(n) for n in names if n.isdigit()]

    def _drop_oldest(self, committed: int) -> None:
        """Damaged ones take no place of a whole one; newer than all whole ones that stay, they are kept for whoever looks into it."""
        steps = self._steps()
        whole = [step for step in steps if not self.problems(self.directory / f"step_{step}")]
        kept = {committed, *sorted(whole, reverse=True)[: self.keep]}
        for step in steps:
            if step not in kept and (step in whole or step < min(kept)):
                shutil.rmtree(self.directory / f"step_{step}")


def _shortened(problems: list[str]) -> str:
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(problems[:5]) + more


def _free_bytes(path: Path) -> int:
    """Of the file system on which ``path`` lies, or would lie."""
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
