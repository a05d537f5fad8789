"""Who shares devices with whom changes no number: colocated (actor and critic in the same processes, engines that sleep in between) and
separate runs of one recipe agree bit for bit on a CPU. One of the two is interrupted, so that rates that fall must go on where they were.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.demo import ROOT, metrics

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RECIPE = ROOT / "recipes" / "bench" / "C0.yaml"


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench")
    subprocess.run([sys.executable, ROOT / "recipes" / "bench" / "prepare.py", "C0", "--out", out], check=True, timeout=120)
    return out


def train(workload: Path, run_dir: Path, **changes: Any) -> list[dict[str, float]]:
    """Three PPO steps, in the first of which the critic learns alone; both cut by tensor parallelism. The metrics without clocks."""
    values = {
        "model": workload / "model",
        "data.train_files": f"[{workload / 'train.parquet'}]",
        "reward.path": ROOT / "recipes" / "bench" / "reward.py",
        "run.dir": run_dir,
        "run.total_steps": 3,
        "run.save_every_steps": 2,
        "algorithm.critic_warmup_steps": 1,
        "algorithm.advantage_estimator": "gae",
        "actor.layout.tensor": 2,
        "actor.optim.lr": 1e-3,
        "actor.optim.schedule": "cosine",
        "actor.optim.schedule_steps": 4,
        "critic.layout.tensor": 2,
        "critic.optim.lr": 1e-3,
        "critic.optim.lr_warmup_steps": 1,
        "critic.optim.schedule": "linear",
        "critic.optim.schedule_steps": 5,
        "critic.optim.lr_min": 1e-4,
        "critic.samples_per_mini_batch": 128,
        "critic.max_tokens_per_micro_batch": 2048,
        "rollout.engines": 2,
    }
    overrides = [f"{key}={value}" for key, value in {**values, **changes}.items()]
    command = [sys.executable, "-m", "megarl.cli.main", "train", str(RECIPE), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return metrics(run_dir)


def test_colocated_equals_separate_and_interrupted(workload: Path, tmp_path: Path) -> None:
    colocated = train(workload, tmp_path / "colocated", **{"cluster.placement": "colocated"})
    begun = train(workload, tmp_path / "separate", **{"cluster.placement": "separate", "run.total_steps": 2})
    assert len(begun) == 2
    separate = train(workload, tmp_path / "separate", **{"cluster.placement": "separate"})
    assert len(colocated) == 3
    assert colocated[1]["critic/values/max"] != 0.0, "the critic must have learnt"
    assert colocated[2]["actor/reward_kl_penalty"] != 0.0, "and the actor"
    # Linear from 1e-3 at step 1 to 1e-4 at step 5; half a cosine over the actor's own steps, of which the critic's first is none.
    assert [step["critic/lr"] for step in separate] == pytest.approx([1e-3, 7.75e-4, 5.5e-4])
    rates = [0.5e-3 * (1 + math.cos(math.pi * step / 4)) for step in (1, 2)]
    assert "actor/lr" not in separate[0] and [step["actor/lr"] for step in separate[1:]] == pytest.approx(rates)
    # Before the second step the actor hasn't changed: engines that slept are given its weights again, others have them still.
    received = [[step.pop("perf/sync_gb") > 0 for step in run] for run in (colocated, separate)]
    assert received == [[True, True, True], [True, False, True]]
    assert colocated == separate
    logs = {path.name for path in (tmp_path / "colocated" / "logs").iterdir()}
    assert not any("critic" in name for name in logs), f"a colocated critic has no processes of its own: {logs}"
