"""One line on stderr that says how far a conversion is: bytes, rate, time left."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_EVERY_S = 1.0  # on a terminal, where the line is written over
_EVERY_PLAIN_S = 10.0  # elsewhere, where each is a line of a log


class Progress:
    """Counts bytes; :meth:`add` prints at most once a second, or every ten where no terminal reads along."""

    def __init__(self, what: str, total: int, done: int = 0, stream: TextIO | None = None):
        self._what, self._total = what, total
        self._done = self._start = done
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._began = self._shown = time.monotonic()

    def add(self, nbytes: int) -> None:
        """``nbytes`` more are done."""
        self._done += nbytes
        now = time.monotonic()
        if now - self._shown >= (_EVERY_S if self._terminal else _EVERY_PLAIN_S):
            self._show(now)

    def finish(self) -> None:
        """Print the last line."""
        self._show(time.monotonic())
        if self._terminal:
            print(file=self._stream, flush=True)

    def _show(self, now: float) -> None:
        self._shown = now
        end = "" if self._terminal else "\n"
        start = "\r\x1b[K" if self._terminal else ""
        print(f"{start}{self.line(now)}", end=end, file=self._stream, flush=True)

    def line(self, now: float) -> str:
        """What is printed at a time of the monotonic clock."""
        seconds = max(now - self._began, 1e-9)
        rate = (self._done - self._start) / seconds
        share = self._done / self._total if self._total else 1.0
        left = f"{duration((self._total - self._done) / rate)} left" if rate > 0 and self._done < self._total else duration(seconds)
        return f"{self._what}: {size(self._done)} of {size(self._total)} ({share:.0%}), {size(rate)}/s, {left}"


def size(nbytes: float) -> str:
    """Bytes as people read them: 5.00 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def duration(seconds: float) -> str:
    """1 h 02 min, 3 min 20 s, or 4.0 s."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{seconds:.1f} s"
