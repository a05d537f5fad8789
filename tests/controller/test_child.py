"""A benchmark's run ends with the benchmark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from megarl.controller.child import run_to_end

# A caller whose child says that it is there, and would sleep for long.
CALLER = """
import sys
from megarl.controller.child import run_to_end
run_to_end([sys.executable, "-c", "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)",
            sys.argv[1]])
"""


def test_code_and_output(capfd) -> None:
    before = signal.getsignal(signal.SIGTERM)  # Ray sets one, where a test before this one joined a cluster
    assert run_to_end([sys.executable, "-c", "print('figures of the child'); raise SystemExit(5)"]) == 5
    out, err = capfd.readouterr()
    assert (out, err.strip()) == ("", "figures of the child")
    assert signal.getsignal(signal.SIGTERM) is before


def test_termination_is_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    caller = subprocess.Popen([sys.executable, "-c", CALLER, str(file)], env=os.environ)
    try:
        deadline = time.monotonic() + 60
        while not (file.is_file() and file.read_text()):
            assert time.monotonic() < deadline, "the child never came up"
            time.sleep(0.05)
        child = int(file.read_text())
        caller.terminate()
        assert caller.wait(timeout=30) == 128 + signal.SIGTERM
        assert not psutil.pid_exists(child)
    finally:
        caller.kill()
