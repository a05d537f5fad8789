"""What a run shows while it goes on: a bar on a terminal, else exactly one line per step. Only the controller draws."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

_COLUMNS = (
    ("reward", "critic/score/mean", "{:.3f}"),
    ("held-out", "val/reward/mean", "{:.3f}"),
    ("kl", "actor/reward_kl_penalty", "{:.4f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("length", "response_length/mean", "{:.1f}"),
    ("", "timing_s/step", "{:.2f} s"),
)


def step_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """One step in one line; metrics that the step lacks are left out."""
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for label, name, form in _COLUMNS:
        if name in metrics:
            parts.append(f"{label} {form.format(metrics[name])}".strip())
    return "  ".join(parts)


class Progress:
    """``total`` steps of which ``done`` lie behind; a context manager. ``stream`` decides between bar and lines."""

    def __init__(self, total: int, stream: TextIO | None = None, *, done: int = 0):
        self.total = total
        self.stream = stream or sys.stdout
        self._bar = None
        if self.stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeRemainingColumn())
            self._bar = RichProgress(*columns, console=Console(file=self.stream))
            self._task = self._bar.add_task(f"step {done}/{total}", total=total, completed=done)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that ``step`` is done."""
        line = step_line(step, self.total, metrics)
        if self._bar is None:
            print(line, file=self.stream, flush=True)
        else:
            self._bar.update(self._task, completed=step, description=line)
