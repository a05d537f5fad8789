"""Recording what one process does in a window: a Chrome trace, and its memory. Used inside workers, and inside vLLM's ranks.

    NAME.json.gz            Chrome trace: Perfetto and TensorBoard open it; phases are ranges that carry their names
    NAME.memory.pickle      on a GPU, where memory is asked for: PyTorch's allocations and frees, for pytorch.org/memory_viz
    NAME.memory.json        on a CPU, where memory is asked for: resident memory of the process before and after each phase

A recording that fails is a sentence in the result and never an error: what is watched goes on.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
import torch

from megarl.device import on_gpu, start_memory_history, stop_memory_history, synchronize

# What profilers and disks were seen to raise.
FAILURES = (OSError, RuntimeError, ValueError, AssertionError, EOFError)

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Window:
    """What a process records, and where to."""

    directory: str
    name: str  # of the process, in file names
    with_stack: bool = False
    memory: bool = False


@dataclass
class Recorded:
    """What came of a window."""

    files: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Profiler:
    """The recorder of one process. Windows begin and end on the thread that does the work; PyTorch watches no other."""

    def __init__(self) -> None:
        self._window: Window | None = None
        self._failures: list[str] = []
        self._trace: torch.profiler.profile | None = None
        self._memory: list[dict[str, Any]] = []

    @property
    def active(self) -> bool:
        """True inside a window."""
        return self._window is not None

    def start(self, window: Window) -> None:
        """Begin a window; one that was left open is dropped. Failures are in what :meth:`stop` returns."""
        if self.active:
            self._drop()
        self._window, self._failures, self._memory = window, [], []
        with self._excused("the profiler could not be started"):
            Path(window.directory).mkdir(parents=True, exist_ok=True)
            activities = [torch.profiler.ProfilerActivity.CPU]
            if on_gpu():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            if window.memory:
                start_memory_history()
            trace = torch.profiler.profile(activities=activities, with_stack=window.with_stack)
            trace.start()
            self._trace = trace

    def stop(self) -> Recorded:
        """End the window and write its files, each under its name only when whole."""
        if self._window is None:
            return Recorded()
        window, trace = self._window, self._trace
        target = Path(window.directory) / window.name
        files = []
        if trace is not None:
            with self._excused("the trace could not be written"):
                synchronize()
                trace.stop()
                files.append(_write(Path(f"{target}.json.gz"), lambda path: _export(trace, path)))
        if window.memory:
            with self._excused("the record of memory could not be written"):
                if on_gpu():
                    files.append(_write(Path(f"{target}.memory.pickle"), stop_memory_history))
                else:
                    text = json.dumps({"unit": "bytes of resident memory (RSS) of the process", "phases": self._memory}, indent=1)
                    files.append(_write(Path(f"{target}.memory.json"), lambda path: path.write_text(text)))
        self._window = self._trace = None
        return Recorded(files, self._failures)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A named range of the trace; nothing outside a window."""
        if self._window is None:
            yield
            return
        began, before = time.time(), _resident()
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            if self._window.memory and not on_gpu():
                entry = {"phase": name, "began": began, "seconds": time.time() - began, "before": before, "after": _resident()}
                self._memory.append(entry)

    def _drop(self) -> None:
        with self._excused("an older window could not be ended"):
            if self._trace is not None:
                self._trace.stop()
        self._window = self._trace = None

    @contextmanager
    def _excused(self, what: str) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            name = self._window.name if self._window else ""
            self._failures.append(f"{name}: {what}: {type(error).__name__}: {error}")


class Profiled(Protocol):
    """A worker whose methods are phases."""

    profiler: Profiler


def phase(name: str) -> Callable[[Method], Method]:
    """Make a worker's method a phase of its traces. ``{}`` in ``name`` stands for the first argument, as the role of a model.

    Outside a window it costs one look at a flag. Above ``ray.method``, whose marks Ray looks for on the innermost function.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def watched(self: Profiled, *args: Any, **kwargs: Any) -> Any:
            if not self.profiler.active:
                return method(self, *args, **kwargs)
            with self.profiler.phase(name.format(*args[:1])):
                return method(self, *args, **kwargs)

        return watched  # type: ignore[return-value]

    return decorate


def _write(target: Path, fill: Callable[[Path], object]) -> str:
    """Have ``fill`` write a file aside, and give it its name."""
    aside = target.with_name(f"{target.name}.writing")
    try:
        fill(aside)
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
    return str(target)


def _export(trace: torch.profiler.profile, target: Path) -> None:
    """Raise OSError where PyTorch left no whole file: it says so in the log alone."""
    plain = target.with_name(f"{target.name}.json")
    try:
        trace.export_chrome_trace(str(plain))
        _check_whole(plain)
        with open(plain, "rb") as source, gzip.open(target, "wb", compresslevel=4) as out:
            shutil.copyfileobj(source, out, 1 << 20)
    finally:
        plain.unlink(missing_ok=True)


def _check_whole(file: Path) -> None:
    with open(file, "rb") as stream:
        stream.seek(max(0, file.stat().st_size - 64))
        if not stream.read().rstrip().endswith(b"}"):
            raise OSError(f"{file} ends in the middle; is the disk full?")


def _resident() -> int:
    return psutil.Process().memory_info().rss
