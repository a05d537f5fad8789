"""What all worker processes share: their log file, and what they can tell of themselves."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from megarl.device import device_memory
from megarl.errors import ConfigError, explain


def open_log(log_dir: str, name: str) -> None:
    """Send this process's output, that of its C++ parts included, to ``log_dir/name.log``."""
    path = Path(log_dir) / f"{name.replace(' ', '-')}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def import_plugins(modules: Sequence[str]) -> None:
    """Import the recipe's modules, which register estimators and losses; the directory of the command is searched too."""
    if modules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(explain("a plugin can't be imported", where="plugins", got=f"{module}: {error}", do="install it")) from error


def process_facts() -> dict[str, float | int]:
    """Process id, resident memory (bytes; its peak and now), seconds since the process began; on a GPU also its memory (bytes)."""
    import resource

    return {
        "pid": os.getpid(),
        "rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "rss": psutil.Process().memory_info().rss,
        "age_s": time.time() - psutil.Process().create_time(),
    } | device_memory()


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Yield a record whose ``seconds`` are set when the block ends."""
    record = {"seconds": 0.0}
    began = time.monotonic()
    yield record
    record["seconds"] = time.monotonic() - began
