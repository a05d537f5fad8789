"""A Ray head that somebody else started: another directory, another environment, a token of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}


@dataclass(frozen=True)
class Head:
    """A head node that lives."""

    address: str
    process: subprocess.Popen[bytes]

    def descendants(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}


@contextmanager
def head_node(log: Path, cpus: int, environment: Mapping[str, str], cwd: str | Path) -> Iterator[Head]:
    """A head with ``cpus`` cores; it and its own children end with the block, and no other Ray is touched."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--num-cpus={cpus}", "--include-dashboard=false"]
    own = tempfile.mkdtemp(prefix="head-", dir="/tmp")  # sockets have short names; and no other program finds this cluster by "auto"
    with open(log, "w") as stream:
        process = subprocess.Popen(
            [*command, f"--port={port}", f"--temp-dir={own}"],
            stdout=stream,
            stderr=stream,
            env=dict(environment) | TOKEN,
            cwd=cwd,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 90
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield Head(f"127.0.0.1:{port}", process)
    finally:
        process.send_signal(signal.SIGTERM)  # it ends its own children
        process.wait(60)
        shutil.rmtree(own, ignore_errors=True)


def joined_environment(**changes: str) -> dict[str, str]:
    """Of a program that joins the head by its address."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | TOKEN | changes
