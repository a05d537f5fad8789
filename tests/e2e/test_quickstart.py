"""docs/quickstart.md as written: its Python blocks, in order, as one program in a directory of its own; its commands as two terminals."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.demo import ROOT, prepare

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "quickstart.md"


def blocks(text: str, language: str = "python") -> list[str]:
    """The blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def numbers(output: str, name: str) -> list[float]:
    return [float(found) for found in re.findall(rf"^{re.escape(name)}: (\S+)$", output, flags=re.MULTILINE)]


def test_the_page_runs_as_written(tmp_path: Path) -> None:
    prepare(tmp_path / "build" / "demo")
    program = tmp_path / "quickstart.py"
    program.write_text("\n".join(blocks(PAGE.read_text(encoding="utf-8"))))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp"), "RAY_TMPDIR": "/tmp"}
    environment.pop("RAY_ADDRESS", None)  # sockets have short names, so that Ray keeps its own place
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "megarl 0." in said and "a critic for 1 process, not started" in said
    assert 13 <= numbers(said, "Prompt tokens")[0] <= 16 and numbers(said, "Response tokens") == [0]
    assert "columns: prompts, responses, rollout_log_probs, log_probs, sequences" in said and "PPO step done" in said
    losses, kls = numbers(said, "Critic loss"), numbers(said, "Actor KL divergence")
    assert len(losses) == len(kls) == 3 and all(math.isfinite(x) for x in [*losses, *kls])
    assert losses[0] > 0 and kls[0] == 0.0 and kls[1] != 0.0 and kls[2] != 0.0
    first, second = numbers(said, "KL coefficient")
    assert first not in (0.01, second)
    assert "first sample: <|user|>reverse:" in said and "a Hugging Face directory: model-by-hand" in said
    assert (tmp_path / "model-by-hand" / "config.json").is_file()
    assert not list((tmp_path / "tmp").glob("megarl-*")), "what the trainer needed for a while is gone"


def test_the_server_answers_as_written(tmp_path: Path) -> None:
    """On a free port in the place of 8000, and by this Python."""
    prepare(tmp_path / "build" / "demo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    server, question = (block.replace("8000", port) for block in blocks(PAGE.read_text(encoding="utf-8"), "sh"))
    server = "exec " + re.sub("^python", sys.executable, server)
    log = tmp_path / "server.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as out, subprocess.Popen(["bash", "-c", server], cwd=tmp_path, env=environment, stdout=out, stderr=out) as process:
        try:
            wait_for(f"INFO:root:Rollout server started on port {port}", log, process, deadline_s=240)
            answer = ask(question, port)
        finally:
            process.terminate()
            process.wait(timeout=60)
    assert len(answer["sequences"]) == 2 and all(isinstance(text, str) for text in answer["sequences"])
    assert process.returncode == 0, log.read_text()


def wait_for(line: str, log: Path, process: subprocess.Popen, deadline_s: float) -> None:
    ends = time.monotonic() + deadline_s
    while line not in log.read_text():
        assert process.poll() is None and time.monotonic() < ends, log.read_text()
        time.sleep(0.2)


def ask(command: str, port: str) -> dict:
    """By the page's command; where there is no curl, by what it sends."""
    if shutil.which("curl"):
        return json.loads(subprocess.run(["bash", "-c", command], capture_output=True, timeout=120, check=True).stdout)
    (body,) = re.findall(r"-d '(.*?)'$", command, flags=re.MULTILINE)
    request = urllib.request.Request(f"http://localhost:{port}/generate", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def test_every_block_of_the_page_is_found() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(blocks(text)) == text.count("```python") >= 9 and len(blocks(text, "sh")) == text.count("```sh") == 2
