"""A discarded engine frees its memory: model, gradients and optimizer, whatever the optimizer ties together."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

from megarl.megatron.engine import Engine, MicroBatch
from megarl.megatron.losses import MiniBatchTotals, SupervisedLossSpec
from megarl.megatron.model import Role
from megarl.megatron.optimizer import OptimizerSettings
from megarl.types import Layout, Rank
from megarl.weights.families import read_hf_config
from tests.megatron.models import sequences, tiny_qwen2
from tests.megatron.ranks import run_ranks


def survivors(rank: Rank, model_dir: Path, dtype: str, distributed: bool) -> list[str]:
    """What is left of an engine that was trained and discarded."""
    engine = Engine(read_hf_config(model_dir), rank, Role("lm", True, dtype), OptimizerSettings(1e-3, distributed=distributed))
    engine.load_hf(model_dir)
    engine.enable_training()
    prompts, responses = sequences([(3, 4), (5, 2)])
    engine.train_step([MicroBatch(prompts, responses, {})], SupervisedLossSpec(), MiniBatchTotals(6, 2), lr=1e-3)
    parts = {"model": engine.chunks[0], "optimizer": engine.optimizer} | engine.named_parameters()
    watched = {name: weakref.ref(part) for name, part in parts.items()}
    del parts
    engine.discard()
    return [name for name, part in watched.items() if part() is not None]


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_left(tmp_path: Path, dtype: str, distributed: bool) -> None:
    assert run_ranks(Layout(), survivors, tiny_qwen2(tmp_path), dtype, distributed) == [[]]
