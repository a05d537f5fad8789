"""The critic: values and gradients of a value head on every layout, against Hugging Face's hidden states."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from megarl.megatron.cpu import on_compute_device
from megarl.megatron.engine import Engine, MicroBatch
from megarl.megatron.losses import MiniBatchTotals, ValueLossSpec
from megarl.megatron.model import Role
from megarl.megatron.optimizer import OptimizerSettings
from megarl.types import Layout, Ragged, Rank
from megarl.weights.families import read_hf_config
from tests.megatron.models import HOSTILE_LENGTHS, sequences, tiny_qwen2
from tests.megatron.ranks import run_ranks

LENGTHS = HOSTILE_LENGTHS["one long"]
LAYOUTS = {
    "one rank": Layout(),
    "pp2": Layout(pipeline=2),
    "dp2": Layout(data=2),
    "tp2 pp2 sp": Layout(tensor=2, pipeline=2, sequence_parallel=True),
    "vpp2 cp2": Layout(pipeline=2, virtual_pipeline=2, context=2),
    "cp2 tp2 sp": Layout(tensor=2, context=2, sequence_parallel=True),
}
HEAD = torch.linspace(-0.5, 0.5, 64)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


def targets() -> tuple[Ragged, Ragged]:
    """Old values and returns of each response token."""
    responses = sequences(LENGTHS)[1]
    rng = np.random.default_rng(3)
    made = [rng.normal(size=len(responses.values)).astype(np.float32) for _ in range(2)]
    return Ragged(made[0], responses.offsets), Ragged(made[1], responses.offsets)


@cache
def reference(model_dir: Path) -> dict[str, Any]:
    model = AutoModel.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    head = HEAD.clone().requires_grad_()
    prompts, responses = sequences(LENGTHS)
    old, returns = targets()
    values, last, loss = [], [], torch.zeros(())
    for i in range(len(prompts)):
        tokens = torch.from_numpy(np.concatenate([prompts[i], responses[i]]).astype(np.int64))[None]
        row = model(tokens).last_hidden_state[0] @ head
        mine = row[len(prompts[i]) - 1 : -1]
        clipped = torch.clamp(mine, torch.from_numpy(old[i]) - 0.2, torch.from_numpy(old[i]) + 0.2)
        target = torch.from_numpy(returns[i])
        loss = loss + 0.5 * torch.maximum((mine - target) ** 2, (clipped - target) ** 2).sum()
        values.append(mine)
        last.append(row[-1])
    loss = loss / len(responses.values)
    loss.backward()
    gradients = {f"model.{n}": p.grad.numpy() for n, p in model.named_parameters()}
    joined = {"values": torch.cat(values).detach().numpy(), "last_values": torch.stack(last).detach().numpy()}
    return joined | {"loss": float(loss), "gradients": gradients | {"score.weight": head.grad.numpy()[None]}}


def work(rank: Rank, model_dir: Path) -> dict[str, Any]:
    engine = Engine(read_hf_config(model_dir), rank, Role("value", trainable=True), OptimizerSettings(lr=1e-3))
    engine.load_hf(model_dir)
    if rank.is_last_stage:
        (weight,) = (p for name, p in engine.named_parameters().items() if name.endswith("output_layer.weight"))
        assert not weight.any(), "an untrained value head starts at zero"
        weight.data.copy_(HEAD[None])
    engine.enable_training()
    prompts, responses = sequences(LENGTHS)
    old, returns = targets()
    mine = list(range(len(LENGTHS)))[rank.data :: rank.layout.data]
    batches = [MicroBatch(prompts.take([r]), responses.take([r]), {"values": old.take([r]), "returns": returns.take([r])}) for r in mine]
    outputs = engine.forward(batches)
    sums = engine.gradients(batches, ValueLossSpec(clip=0.2), MiniBatchTotals(int(responses.lengths.sum()), len(LENGTHS)))
    with on_compute_device():
        engine.optimizer.prepare_grads()
    return {
        "rows": mine,
        "outputs": {k: np.concatenate(v) for k, v in outputs.items()},
        "loss": sums["vf_loss"],
        "gradients": {n: p.main_grad.clone().numpy() for n, p in engine.named_parameters().items()},
        "shards": engine.shards,
    }


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_values_and_gradients(model_dir: Path, layout: Layout) -> None:
    expected = reference(model_dir)
    starts = sequences(LENGTHS)[1].offsets
    scale = np.abs(expected["values"]).max()
    rounding = 1e-6 * max(np.abs(g).max() for g in expected["gradients"].values())
    for result in run_ranks(layout, work, model_dir):
        if result["outputs"]:
            at = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in result["rows"]])
            assert np.abs(result["outputs"]["values"] - expected["values"][at]).max() <= 1e-5 * scale
            assert np.abs(result["outputs"]["last_values"] - expected["last_values"][result["rows"]]).max() <= 1e-5 * scale
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for name, shard in result["shards"].items():
            for copy in shard.copies:
                whole = expected["gradients"][copy.source.name]
                part = whole[tuple(slice(*b) for b in copy.source.box)]
                mine = result["gradients"][name][tuple(slice(*b) for b in copy.target.box)]
                assert np.abs(mine - part).max() <= 1e-5 * np.abs(whole).max() + rounding, name
