"""metrics.jsonl: one line per step, on disk before the next step begins, and never two lines for one step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from megarl.errors import DataError, explain
from megarl.observe.metric_names import PHASES

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends to ``run_dir``/metrics.jsonl.

    ``resume_from`` is the last step that the run keeps: lines of later steps, and a line that a crash cut short, are taken out at
    once, since these steps will be done again.
    """

    def __init__(self, run_dir: str | Path, resume_from: int = 0):
        self.path = Path(run_dir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = -1
        if self.path.exists():
            self._truncate(resume_from)

    @property
    def last_step(self) -> int:
        """The last step that has a line; -1 before the first."""
        return self._last_step

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of ``step``; it is on the disk when this returns.

        Metrics are real numbers; NaN and infinities are written as null with a note. Timings that came under timing_s/ only get
        their aliases timing/ and timing_share/. Raises ValueError for a step that was logged already, TypeError for no number.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step}: a step has one line")
        line: dict[str, Any] = {"step": step}
        notes = {}
        for name, value in with_timing_aliases(metrics).items():
            number = _number(name, value)
            line[name] = number if math.isfinite(number) else None
            if not math.isfinite(number):
                notes[name] = str(number)
        if notes:
            line["notes"] = notes
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._last_step = step

    def _truncate(self, resume_from: int) -> None:
        kept = [line for line in read_metrics(self.path.parent) if line["step"] <= resume_from]
        aside = self.path.with_suffix(".writing")
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.path)
        self._last_step = kept[-1]["step"] if kept else -1


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of a run, oldest first; [] before the first step. A last line cut short by a crash is left out.

    Raises DataError for any other line that is no JSON object with a step.
    """
    path = Path(run_dir) / FILE_NAME
    if not path.exists():
        return []
    *whole, rest = path.read_text(encoding="utf-8").split("\n")
    lines = []
    for number, text in enumerate(whole, start=1):
        lines.append(_parse(text, f"{path}:{number}"))
    return lines  # ``rest``, without its newline, was never whole


def with_timing_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """``metrics`` with timing/X and timing_share/X (of timing_s/step) for each timing_s/X."""
    aliases = {}
    whole = metrics.get("timing_s/step", 0.0)
    for phase in PHASES:
        seconds = metrics.get(f"timing_s/{phase}")
        if seconds is not None:
            aliases[f"timing/{phase}"] = seconds
            if phase != "step" and whole > 0:
                aliases[f"timing_share/{phase}"] = seconds / whole
    return aliases | dict(metrics)


def _number(name: str, value: object) -> float | int:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"metric {name} is no number: {value!r}")
    as_float = float(value)
    return int(as_float) if isinstance(value, int) else as_float


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(explain("a line of metrics is no JSON", where=where, got=text[:80], do="take the line out")) from error
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        raise DataError(explain("a line of metrics has no step", where=where, got=text[:80], do="take the line out"))
    return line
