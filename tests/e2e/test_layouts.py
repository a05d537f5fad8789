"""How actor and critic are cut, each for itself, changes a run's numbers by rounding alone: interleaved pipelines, context parallelism,
and a critic of more replicas than the actor has (and the other way round).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.weights.families import read_hf_config
from tests.e2e.demo import metrics, prepare, short, train
from tests.megatron.models import random_qwen2

pytestmark = pytest.mark.cluster

ONE = {f"{role}.layout.{size}": 1 for role in ("actor", "critic") for size in ("tensor", "pipeline", "data")}
LAYOUTS = {
    "vpp2, critic dp2": {"actor.layout.pipeline": 2, "actor.layout.virtual_pipeline": 2, "critic.layout.data": 2},
    "cp2 dp2, critic cp2": {"actor.layout.context": 2, "actor.layout.data": 2, "critic.layout.context": 2},
}


def run(data: Path, run_dir: Path, layout: dict[str, Any]) -> list[dict[str, float]]:
    """Two PPO steps from the untrained model."""
    settings = {"warm_start.enabled": "false", "data.val_files": "[]", "run.total_steps": 2, "run.save_every_steps": -1}
    done = train(short(data, run_dir, **{**settings, "run.export_hf": "false", "actor.max_tokens_per_micro_batch": 128}, **ONE | layout))
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(run_dir)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's data and tokenizer, with a model of four layers."""
    out = prepare(tmp_path_factory.mktemp("demo"))
    random_qwen2(out / "model", vocab=read_hf_config(out / "model")["vocab_size"], hidden=128, ffn=96, spread=0.1)
    return out


@pytest.fixture(scope="module")
def one_rank_each(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return run(data, tmp_path_factory.mktemp("runs") / "one", {})


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_numbers_are_those_of_one_rank_each(
    data: Path, one_rank_each: list[dict[str, float]], layout: dict[str, Any], tmp_path: Path
) -> None:
    first, second = run(data, tmp_path / "run", layout)
    assert first == pytest.approx(one_rank_each[0], rel=1e-4, abs=1e-5)
    assert second["actor/reward_kl_penalty"] != 0.0, "the actor must have learnt"
    assert second["critic/values/max"] != 0.0, "and the critic"
    assert second == pytest.approx(one_rank_each[1], rel=1e-2, abs=1e-4)
