"""A checkpoint continues the run: bit for bit in the same layout, to rounding in another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.errors import CheckpointError
from megarl.megatron.checkpoint import load_engine, save_engine
from megarl.megatron.engine import Engine, MicroBatch
from megarl.megatron.losses import MiniBatchTotals, SupervisedLossSpec
from megarl.megatron.model import Role
from megarl.megatron.optimizer import OptimizerSettings
from megarl.types import Layout, Rank
from megarl.weights.families import read_hf_config
from tests.megatron.models import HOSTILE_LENGTHS, sequences, tiny_mixture, tiny_qwen2
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


FAST = ("pp2", "dp2 distributed optimizer")
SAME = {
    "pp2": (Layout(pipeline=2), False),
    "dp2 distributed optimizer": (Layout(data=2), True),
    "vpp2": (Layout(pipeline=2, virtual_pipeline=2), False),
    "cp2 distributed optimizer": (Layout(context=2), True),
    "vpp2 dp2 distributed optimizer": (Layout(pipeline=2, virtual_pipeline=2, data=2), True),
}


@pytest.mark.parametrize(
    ("layout", "distributed"),
    [pytest.param(*case, id=name, marks=() if name in FAST else pytest.mark.slow) for name, case in SAME.items()],
)
def test_same_layout_is_bit_identical(layout: Layout, distributed: bool, model_dir: Path, tmp_path: Path) -> None:
    whole = run_ranks(layout, undisturbed, model_dir, tmp_path, distributed)[0]
    assert run_ranks(layout, resumed, model_dir, tmp_path, distributed)[0] == whole[3:]
    assert whole[0] > whole[5], "training must have changed something"


MIXTURE_LAYOUTS = {
    "ep2": (Layout(expert=2, data=2), False),
    "ep2 distributed optimizer": (Layout(expert=2, data=4), True),
    "ep2 tp2 sp": (Layout(tensor=2, expert=2, sequence_parallel=True), False),
    "tp2 sp": (Layout(tensor=2, sequence_parallel=True), False),
}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "distributed"), MIXTURE_LAYOUTS.values(), ids=MIXTURE_LAYOUTS)
def test_experts_are_bit_identical_in_the_same_layout_and_close_in_another(layout: Layout, distributed: bool, tmp_path: Path) -> None:
    model = tiny_mixture(tmp_path / "model")
    target = tmp_path / "checkpoint"
    target.mkdir()
    whole = run_ranks(layout, undisturbed, model, target, distributed)[0]
    assert run_ranks(layout, resumed, model, target, distributed)[0] == whole[3:]
    later = run_ranks(Layout(pipeline=2, expert=3, data=3), resumed, model, target, distributed)[0]
    assert abs(later[0] - whole[3]) <= 1e-6 * abs(whole[3])
    np.testing.assert_allclose(later, whole[3:], rtol=1e-3)
    (refusal,) = run_ranks(Layout(), refused, model, target)
    assert "a checkpoint with experts that are cut otherwise than the rest" in refusal


def refused(rank: Rank, model_dir: Path, target: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load_engine(make(rank, model_dir, False), target)
    return str(error.value)


@pytest.fixture(scope="module")
def tp2_run(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses of an undisturbed run under TP2, and its checkpoint."""
    directory = tmp_path_factory.mktemp("tp2")
    return run_ranks(Layout(tensor=2), undisturbed, model_dir, directory, False)[0], directory


OTHERS = {
    "one rank": Layout(),
    "pp2": Layout(pipeline=2),
    "tp2 pp2": Layout(tensor=2, pipeline=2),
    "vpp2 cp2": Layout(pipeline=2, virtual_pipeline=2, context=2),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
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


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed optimizer"])
def test_a_checkpoint_before_the_first_step_can_be_resumed(distributed: bool, model_dir: Path, tmp_path: Path) -> None:
    whole = run_ranks(Layout(data=2), saved_untrained, model_dir, tmp_path, distributed)[0]
    assert run_ranks(Layout(data=2), resumed, model_dir, tmp_path, distributed)[0] == whole
