"""Profiled steps of a real run: a trace of each process that was asked for, and not one number changed."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.demo import ROOT, metrics

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RECIPE = ROOT / "recipes" / "bench" / "C0.yaml"

# Phases of one step in each process; rank 0 of two tensor-parallel ranks is the one that reports.
ACTOR = {"share weights of actor", "forward actor", "forward reference", "compare log-probs", "update actor"}
CRITIC = {"forward critic", "kl penalty", "advantages", "whiten", "update critic"}


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench")
    subprocess.run([sys.executable, ROOT / "recipes" / "bench" / "prepare.py", "C0", "--out", out], check=True, timeout=120)
    return out


def train(workload: Path, run_dir: Path, **changes: Any) -> str:
    """PPO steps; the actor and the engine are cut over two ranks. Returns what was printed."""
    values = {
        "model": workload / "model",
        "data.train_files": f"[{workload / 'train.parquet'}]",
        "reward.path": ROOT / "recipes" / "bench" / "reward.py",
        "run.dir": run_dir,
        "run.save_every_steps": 2,
        "run.export_hf": "false",
        "cluster.placement": "separate",
        "algorithm.advantage_estimator": "gae",
        "actor.layout.tensor": 2,
        "actor.optim.lr": 1e-3,
        "critic.optim.lr": 1e-3,
        "critic.samples_per_mini_batch": 128,
        "critic.max_tokens_per_micro_batch": 2048,
        "rollout.tensor_parallel": 2,
    }
    overrides = [f"{key}={value}" for key, value in {**values, **changes}.items()]
    command = [sys.executable, "-m", "megarl.cli.main", "train", str(RECIPE), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trace(file: Path) -> tuple[set[str], set[str]]:
    """Names of the phases, and of all else that was recorded."""
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        found = json.load(stream)["traceEvents"]
    phases = {event["name"] for event in found if event.get("cat") == "user_annotation"}
    return phases, {event["name"] for event in found if event.get("cat") == "cpu_op"}


def test_a_profile_changes_no_number_and_a_failing_one_ends_nothing(workload: Path, tmp_path: Path) -> None:
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    assert "profile: " not in train(workload, plain, **{"run.total_steps": 3})
    assert not (plain / "profile").exists()

    said = train(workload, watched, **{"run.total_steps": 2, "profile.steps": "[2]", "profile.memory": "true"})
    assert f"profile: 10 files in {watched / 'profile'}\n" in said
    directory = watched / "profile" / "step_2"
    processes = ("actor_rank_0", "critic_rank_0", "rollout_rank_0", "rollout_rank_0_tensor_0", "rollout_rank_0_tensor_1")
    traces = {name: trace(directory / f"{name}.json.gz") for name in processes}
    assert traces["actor_rank_0"][0] >= ACTOR and traces["critic_rank_0"][0] >= CRITIC
    assert "aten::scaled_dot_product_attention" in traces["actor_rank_0"][1]
    assert traces["rollout_rank_0"][0] >= {"sync weights", "generate"}
    for rank in (0, 1):  # the processes in which vLLM computes
        phases, operations = traces[f"rollout_rank_0_tensor_{rank}"]
        assert "sync weights" in phases and any("mm" in name for name in operations)
    table = json.loads((directory / "actor_rank_0.memory.json").read_text())
    assert {row["phase"] for row in table["phases"]} >= ACTOR
    assert all(row["before"] > 50 << 20 and row["seconds"] > 0 for row in table["phases"])

    (watched / "profile").rename(tmp_path / "profile")
    (watched / "profile").write_text("no directory")
    said = train(workload, watched, **{"run.total_steps": 3, "profile.steps": "[3]", "profile.ranks": "[1]"})
    assert said.count("warning: a profile failed, and the run goes on (said once): actor_rank_1: the profiler could not be started") == 1
    assert json.loads((watched / "run.json").read_text())["profile"]["failed"] == 1
    assert metrics(plain) == metrics(watched)
    assert len(metrics(plain)) == 3
