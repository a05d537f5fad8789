"""Run another command of megarl to its end, as the benchmarks do."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType


def run_to_end(command: Sequence[str]) -> int:
    """The exit code of ``command``, whose output goes to stderr: stdout is for the caller's figures.

    It ends with its caller: what interrupts or terminates this process is passed on, and waited for. A run left behind would hold devices.
    """
    child = subprocess.Popen(list(command), stdout=sys.stderr)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        if child.poll() is None:
            child.terminate()
            child.wait()


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
