"""A checkpoint continues the run: bit for bit in the same layout, to rounding in another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.megatron.checkpoint import load_engine, save_engine
from megarl.megatron.engine import Engine, MicroBatch
from megarl.megatron.losses import MiniBatchTotals, SupervisedLossSpec
from megarl.megatron.model import Role
from megarl.megatron.optimizer import OptimizerSettings
from megarl.megatron.world import Rank
from megarl.types import Layout
from megarl.weights.families import read_hf_config
from tests.megatron.models import HOSTILE_LENGTHS, sequences, tiny_qwen2
from tests.megatron.ranks import run_ranks

LENGTHS = HOSTILE_LENGTHS["around 16"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


def make(rank: Rank, model_dir: Path, distributed: bool) -> Engine:
    engine = Engine(read_hf_config(model_dir), rank, Role("lm", trainable=True), OptimizerSettings(lr=1e-3, distributed=distributed))
    engine.load_hf(model_dir)
    engine.enable_training()
    return engine


def step(engine: Engine, rank: Rank, seed: int) -> float:
    prompts, responses = sequences(LENGTHS, seed)
    rows = list(range(len(LENGTHS)))[rank.data :: rank.layout.data]
    totals = MiniBatchTotals(int(responses.lengths.sum()), len(LENGTHS))
    return engine.train_step([MicroBatch(prompts.take(rows), responses.take(rows), {})], SupervisedLossSpec(), totals, lr=1e-3).sums["loss"]


def undisturbed(rank: Rank, model_dir: Path, target: Path, distributed: bool) -> list[float]:
    """Three steps, a save, three more."""
    engine = make(rank, model_dir, distributed)
    losses = [step(engine, rank, s) for s in range(3)]
    save_engine(engine, target)
    return losses + [step(engine, rank, s) for s in range(3, 6)]


def resumed(rank: Rank, model_dir: Path, target: Path, distributed: bool) -> list[float]:
    engine = make(rank, model_dir, distributed)
    load_engine(engine, target)
    return [step(engine, rank, s) for s in range(3, 6)]


@pytest.mark.parametrize(
    ("layout", "distributed"),
    [(Layout(pipeline=2), False), (Layout(data=2), True)],
    ids=["pp2", "dp2 distributed optimizer"],
)
def test_same_layout_is_bit_identical(layout: Layout, distributed: bool, model_dir: Path, tmp_path: Path) -> None:
    whole = run_ranks(layout, undisturbed, model_dir, tmp_path, distributed)[0]
    assert run_ranks(layout, resumed, model_dir, tmp_path, distributed)[0] == whole[3:]
    assert whole[0] > whole[5], "training must have changed something"


@pytest.fixture(scope="module")
def tp2_run(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses of an undisturbed run under TP2, and its checkpoint."""
    directory = tmp_path_factory.mktemp("tp2")
    return run_ranks(Layout(tensor=2), undisturbed, model_dir, directory, False)[0], directory


@pytest.mark.parametrize("other", [Layout(), Layout(pipeline=2), Layout(tensor=2, pipeline=2)], ids=["one rank", "pp2", "tp2 pp2"])
def test_other_layout_agrees_to_rounding(other: Layout, model_dir: Path, tp2_run: tuple[list[float], Path]) -> None:
    whole, directory = tp2_run
    later = run_ranks(other, resumed, model_dir, directory, False)[0]
    # The first loss comes from the loaded weights alone; later ones also from Adam, which turns rounding into steps.
    assert abs(later[0] - whole[3]) <= 1e-6 * abs(whole[3])
    np.testing.assert_allclose(later, whole[3:], rtol=1e-4)


def test_tensor_parallel_is_bit_identical(model_dir: Path, tp2_run: tuple[list[float], Path]) -> None:
    whole, directory = tp2_run
    assert run_ranks(Layout(tensor=2), resumed, model_dir, directory, False)[0] == whole[3:]


def saved_untrained(rank: Rank, model_dir: Path, target: Path, distributed: bool) -> list[float]:
    """A save before the first optimizer step, as while a critic warms up."""
    engine = make(rank, model_dir, distributed)
    save_engine(engine, target)
    return [step(engine, rank, s) for s in range(3, 6)]


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed optimizer"])
def test_a_checkpoint_before_the_first_step_can_be_resumed(distributed: bool, model_dir: Path, tmp_path: Path) -> None:
    whole = run_ranks(Layout(data=2), saved_untrained, model_dir, tmp_path, distributed)[0]
    assert run_ranks(Layout(data=2), resumed, model_dir, tmp_path, distributed)[0] == whole
