"""A recipe with an estimator of its own and without a reference: the workers know the one, and nobody loads the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.demo import ROOT
from tests.observe.test_sinks import in_tensorboard

pytestmark = pytest.mark.cluster


def test_own_estimator_and_no_reference(tmp_path: Path) -> None:
    prepare = [sys.executable, ROOT / "recipes" / "bench" / "prepare.py", "C0", "--out", tmp_path / "bench"]
    subprocess.run(prepare, check=True, timeout=120)
    changes = {
        "model": tmp_path / "bench" / "model",
        "data.train_files": f"[{tmp_path / 'bench' / 'train.parquet'}]",
        "run.dir": tmp_path / "run",
        "run.total_steps": 1,
        "run.sinks": "[tensorboard]",
        "plugins": "[tests.e2e.plugin_estimator]",
        "algorithm.advantage_estimator": "test_plain_score",
        "algorithm.kl.where": "none",
        "algorithm.kl.coef": 0,
    }
    command = [sys.executable, "-m", "megarl.cli.main", "train", "recipes/bench/C0.yaml", *(f"{k}={v}" for k, v in changes.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (line,) = (json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    # Every response has the same length, so that the mean over tokens is the mean over samples.
    assert line["critic/advantages/mean"] == pytest.approx(line["critic/score/mean"], abs=1e-6)
    assert line["critic/advantages/max"] == pytest.approx(line["critic/score/max"], abs=1e-6)
    assert line["critic/rewards/mean"] == pytest.approx(line["critic/score/mean"], abs=1e-6)
    assert "timing_s/ref" not in line and "actor/reward_kl_penalty" not in line
    assert line["actor/grad_norm"] > 0
    assert "warning: sink" not in done.stdout
    assert in_tensorboard(tmp_path / "run")["actor/grad_norm"] == {1: pytest.approx(line["actor/grad_norm"])}
