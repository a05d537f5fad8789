"""Every error that megarl raises on purpose, and the exit code that it ends with.

A message says what happened, where, what was got, what was expected, and what to do.
Use :func:`explain` to build it, so that all of them read alike.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_USER = 2
EXIT_DATA = 3
EXIT_DIVERGED = 4
EXIT_INTERNAL = 70
EXIT_REQUEUE = 75


class MegarlError(Exception):
    """Base of all deliberate errors; ``exit_code`` is what the command line ends with."""

    exit_code = EXIT_INTERNAL


class ConfigError(MegarlError):
    """A recipe or an override that can't be run as written."""

    exit_code = EXIT_USER


class PlacementError(ConfigError):
    """The cluster has too few slots for the worker groups of the recipe."""


class ModelError(ConfigError):
    """A model directory that is missing, incomplete or of an unknown family."""


class DataError(MegarlError):
    """A data file, row or reward that can't be used."""

    exit_code = EXIT_DATA


class DivergedError(MegarlError):
    """A loss or gradient is no longer finite, or rewards fail too often."""

    exit_code = EXIT_DIVERGED


class WorkerError(MegarlError):
    """A worker process died, hung past its deadline, or raised."""


class CheckpointError(MegarlError):
    """A checkpoint could not be written, or is not whole."""


class SyncError(MegarlError):
    """Weights could not be handed to the generation engine, or arrived changed."""


def explain(what: str, *, where: str = "", got: object = None, expected: object = None, do: str = "") -> str:
    """Build a message: what [where]; got; expected; what to do. Empty parts are left out."""
    lines = [f"{what} (in {where})" if where else what]
    if got is not None:
        lines.append(f"  got:      {got}")
    if expected is not None:
        lines.append(f"  expected: {expected}")
    if do:
        lines.append(f"  do:       {do}")
    return "\n".join(lines)
