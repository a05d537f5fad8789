"""Two real processes, one run directory."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.checkpoint.lock import RunLock
from megarl.errors import ConfigError

HOLD = """
import sys
from pathlib import Path
from megarl.checkpoint.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Another process that holds the lock of ``tmp_path / "run"`` until it gets a line."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def refusal(run: Path) -> str:
    with pytest.raises(ConfigError) as caught, RunLock(run):
        pass
    return str(caught.value)


def test_a_second_process_is_refused_and_told_the_owner(owner: subprocess.Popen, tmp_path: Path) -> None:
    said = refusal(tmp_path / "run")
    assert f"process {owner.pid} on {socket.gethostname()}" in said
    assert str(tmp_path / "run") in said
    assert refusal(tmp_path / "run") == said  # a refused attempt leaves the owner's name in the file
    with RunLock(tmp_path / "other run"):
        pass


def test_the_lock_ends_with_its_owner(owner: subprocess.Popen, tmp_path: Path) -> None:
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    with RunLock(tmp_path / "run"):
        assert f"process {os.getpid()} " in refusal(tmp_path / "run")


def test_the_lock_ends_with_its_block(owner: subprocess.Popen, tmp_path: Path) -> None:
    owner.communicate("go on\n")
    assert owner.returncode == 0
    assert (tmp_path / "run" / "lock").read_text() == ""
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path / "run"):
        _ = 1 / 0
    with RunLock(tmp_path / "run"):
        pass


def test_workers_that_outlive_the_owner_do_not_keep_it(tmp_path: Path) -> None:
    spawn = "subprocess.Popen([sys.executable, '-c', 'print(0, flush=True); input()'], close_fds=False)"
    script = HOLD.replace("import sys", "import subprocess, sys").replace('print("held", flush=True)', spawn)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "0\n"  # the worker runs; it ends with the pipe that it shares with its parent
        assert f"process {owner.pid} " in refusal(tmp_path)
        owner.kill()
        owner.wait()
        with RunLock(tmp_path):
            pass
        owner.stdin.write("\n")


def test_an_owner_that_has_not_written_its_name_yet(owner: subprocess.Popen, tmp_path: Path) -> None:
    os.truncate(tmp_path / "run" / "lock", 0)
    assert "locked by a process that is just starting" in refusal(tmp_path / "run")
