"""The Python blocks of docs/quickstart.md, in order, as one program: in a directory of their own, with a cluster that they start."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.demo import ROOT, prepare

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "quickstart.md"


def blocks(text: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


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


def test_every_block_of_the_page_is_found() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(blocks(text)) == text.count("```python") >= 9
