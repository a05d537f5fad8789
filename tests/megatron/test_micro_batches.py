"""How samples are cut into micro-batches, and that replicas have unequal numbers of them, changes rounding alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.megatron.engine import Engine, MicroBatch
from megarl.megatron.losses import MiniBatchTotals, SupervisedLossSpec
from megarl.megatron.model import Role
from megarl.megatron.optimizer import OptimizerSettings
from megarl.types import Layout, Rank
from megarl.weights.families import read_hf_config
from tests.megatron.models import HOSTILE_LENGTHS, sequences, tiny_mixture, tiny_qwen2
from tests.megatron.ranks import run_ranks

LENGTHS = HOSTILE_LENGTHS["around 16"]
Cut = list[list[int]]

# What each replica has: one and five micro-batches, two of unequal size and one, a whole sample each.
CUTS: list[list[Cut]] = [[[[0]], [[1], [2], [3], [4], [5]]], [[[0, 1, 2], [5]], [[3, 4]]], [[[0], [1], [2]], [[3], [4], [5]]]]


def work(rank: Rank, model_dir: Path) -> list[dict[str, Any]]:
    engine = Engine(read_hf_config(model_dir), rank, Role("lm", trainable=True), OptimizerSettings(lr=1e-3))
    engine.load_hf(model_dir)
    engine.enable_training()
    prompts, responses = sequences(LENGTHS)
    totals = MiniBatchTotals(int(responses.lengths.sum()), len(LENGTHS))
    found = []
    for cut in CUTS:
        own = cut[rank.data] if rank.layout.data == 2 else cut[0] + cut[1]
        batches = [MicroBatch(prompts.take(rows), responses.take(rows), {}) for rows in own]
        outputs = engine.forward(batches)
        log_probs = (
            {row: part for rows, lp in zip(own, outputs["log_probs"], strict=True) for row, part in split(rows, lp)} if outputs else {}
        )
        sums = engine.gradients(batches, SupervisedLossSpec(), totals)
        gradients = {name: p.main_grad.clone().numpy() for name, p in engine.named_parameters().items()}
        found.append({"loss": sums["loss"], "log_probs": log_probs, "gradients": gradients})
    return found


def split(rows: list[int], log_probs: np.ndarray) -> list[tuple[int, np.ndarray]]:
    ends = np.cumsum([LENGTHS[row][1] for row in rows])
    return list(zip(rows, np.split(log_probs, ends[:-1]), strict=True))


LAYOUTS = {
    "one rank": ("dense", Layout()),
    "dp2": ("dense", Layout(data=2)),
    "pp2 dp2": ("dense", Layout(pipeline=2, data=2)),
    "vpp2": ("dense", Layout(pipeline=2, virtual_pipeline=2)),
    "vpp2 dp2": ("dense", Layout(pipeline=2, virtual_pipeline=2, data=2)),
    "cp2 dp2": ("dense", Layout(context=2, data=2)),
    "ep2": ("mixture", Layout(expert=2, data=2)),
    "ep2 vpp2": ("mixture", Layout(pipeline=2, virtual_pipeline=2, expert=2, data=2)),
    "ep2 cp3 dp2, one group in two replicas": ("mixture", Layout(context=3, expert=2, data=2)),
    "ep2 tp2 sp dp2": ("mixture", Layout(tensor=2, expert=2, data=2, sequence_parallel=True)),
    "ep4 tp2 sp dp2": ("mixture", Layout(tensor=2, expert=2, expert_tensor=2, data=2, sequence_parallel=True)),
}


FAST = ("ep2 vpp2",)
PARAMETERS = [pytest.param(*case, id=name, marks=() if name in FAST else pytest.mark.slow) for name, case in LAYOUTS.items()]


@pytest.mark.parametrize(("model", "layout"), PARAMETERS)
def test_every_cut_gives_the_same_gradients(tmp_path: Path, model: str, layout: Layout) -> None:
    directory = tiny_qwen2(tmp_path) if model == "dense" else tiny_mixture(tmp_path)
    for result in run_ranks(layout, work, directory):
        first = result[0]
        for other in result[1:]:
            assert other["loss"] == pytest.approx(first["loss"], rel=1e-6)
            for row in first["log_probs"].keys() & other["log_probs"].keys():
                np.testing.assert_allclose(other["log_probs"][row], first["log_probs"][row], rtol=1e-5, atol=1e-5)
            for name, gradient in first["gradients"].items():
                assert np.abs(other["gradients"][name] - gradient).max() <= 1e-5 * np.abs(gradient).max(), name
