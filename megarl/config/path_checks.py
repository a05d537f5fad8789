"""Can the run directory be made and written? Known from the file system, before anything is put there."""

from __future__ import annotations

import os
from pathlib import Path

from megarl.errors import ConfigError, explain


def check_writable(run_dir: str | Path) -> None:
    """Raise ConfigError for a run directory that can't be made, or can't be written. Changes nothing."""
    root = Path(run_dir).absolute()
    try:
        nearest = next(path for path in (root, *root.parents) if os.path.lexists(path))
        got = _fault(nearest)
    except OSError as error:
        got = str(error)
    if got:
        raise ConfigError(
            explain(
                "the run directory can't be written",
                where=f"run.dir: {root}",
                got=got,
                expected="a directory, or a place where one can be made",
                do="name another run.dir, or mend the permissions",
            )
        )


def _fault(nearest: Path) -> str:
    """What is wrong with the part of the path that exists; empty when it can be written."""
    if not nearest.is_dir():
        return f"{nearest} is {'a file' if nearest.is_file() else 'no directory'}"
    effective = os.access in os.supports_effective_ids
    if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=effective):
        return f"{nearest} is not writable for this user"
    return ""
