"""A critic that reads other tokens than the actor wrote: values and gradients at the places named, against Hugging Face, on every layout.

Several response tokens share a place, and some places belong to none.
"""

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
from megarl.megatron.packed import ContextRank, pack
from megarl.types import Layout, Ragged, Rank
from megarl.weights.families import read_hf_config
from tests.megatron.models import VOCAB, tiny_qwen2
from tests.megatron.ranks import run_ranks

LAYOUTS = {
    "one rank": Layout(),
    "dp2": Layout(data=2),
    "tp2 pp2": Layout(tensor=2, pipeline=2, sequence_parallel=True),
    "cp2": Layout(context=2),
    "vpp2 cp2": Layout(pipeline=2, virtual_pipeline=2, context=2),
}
HEAD = torch.linspace(-0.5, 0.5, 64)
# Tokens of the critic, and the place that speaks of each of the actor's response tokens: none, one, fewer and more than there are tokens.
LENGTH = (37, 1, 12, 5)
PLACES = ([3, 3, 3, 4, 9, 9, 30, 35], [0, 0, 0], [11] * 40, [])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


def samples() -> dict[str, Ragged]:
    """Critic tokens and predictors, and old values and returns of each response token."""
    rng = np.random.default_rng(0)
    tokens = Ragged.from_list([rng.integers(0, VOCAB, size=n) for n in LENGTH], np.int32)
    predictors = Ragged.from_list(PLACES, np.int32)
    old, returns = (Ragged(rng.normal(size=len(predictors.values)).astype(np.float32), predictors.offsets) for _ in range(2))
    return {"tokens": tokens, "predictors": predictors, "values": old, "returns": returns}


def micro_batch(rows: list[int]) -> MicroBatch:
    taken = {name: column.take(rows) for name, column in samples().items()}
    nothing = Ragged.from_list([[]] * len(rows), np.int32)
    return MicroBatch(taken.pop("tokens"), nothing, taken, predictors=taken.pop("predictors"))


@cache
def reference(model_dir: Path) -> dict[str, Any]:
    model = AutoModel.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    head = HEAD.clone().requires_grad_()
    made = samples()
    values, last, loss = [], [], torch.zeros(())
    for i in range(len(LENGTH)):
        row = model(torch.from_numpy(made["tokens"][i].astype(np.int64))[None]).last_hidden_state[0] @ head
        mine = row[torch.from_numpy(made["predictors"][i].astype(np.int64))]
        old, target = torch.from_numpy(made["values"][i]), torch.from_numpy(made["returns"][i])
        clipped = torch.clamp(mine, old - 0.2, old + 0.2)
        loss = loss + 0.5 * torch.maximum((mine - target) ** 2, (clipped - target) ** 2).sum()
        values.append(mine.detach().numpy())
        last.append(float(row[-1].detach()))
    loss = loss / len(made["predictors"].values)
    loss.backward()
    gradients = {f"model.{n}": p.grad.numpy() for n, p in model.named_parameters()} | {"score.weight": head.grad.numpy()[None]}
    return {"values": values, "last_values": np.array(last), "loss": float(loss.detach()), "gradients": gradients}


def work(rank: Rank, model_dir: Path) -> dict[str, Any]:
    engine = Engine(read_hf_config(model_dir), rank, Role("value", trainable=True), OptimizerSettings(lr=1e-3))
    engine.load_hf(model_dir)
    if rank.is_last_stage:
        (weight,) = (p for name, p in engine.named_parameters().items() if name.endswith("output_layer.weight"))
        weight.data.copy_(HEAD[None])
    engine.enable_training()
    mine = list(range(len(LENGTH)))[rank.data :: rank.layout.data]
    batches = [micro_batch(mine[:1]), micro_batch(mine[1:])]
    outputs = engine.forward(batches)
    sums = engine.gradients(batches, ValueLossSpec(clip=0.2), MiniBatchTotals(sum(map(len, PLACES)), len(LENGTH)))
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
    scale = max(np.abs(v).max() for v in expected["values"] if len(v))
    rounding = 1e-6 * max(np.abs(g).max() for g in expected["gradients"].values())
    for result in run_ranks(layout, work, model_dir):
        if result["outputs"]:
            wanted = np.concatenate([expected["values"][r] for r in result["rows"]])
            assert np.abs(result["outputs"]["values"] - wanted).max() <= 1e-5 * scale
            assert np.abs(result["outputs"]["last_values"] - expected["last_values"][result["rows"]]).max() <= 1e-5 * scale
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for name, shard in result["shards"].items():
            for copy in shard.copies:
                whole = expected["gradients"][copy.source.name]
                part = whole[tuple(slice(*b) for b in copy.source.box)]
                mine = result["gradients"][name][tuple(slice(*b) for b in copy.target.box)]
                assert np.abs(mine - part).max() <= 1e-5 * np.abs(whole).max() + rounding, name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_predictor_is_on_the_rank_of_its_token(size: int) -> None:
    made = samples()
    tokens = Ragged(np.arange(1, 1 + sum(LENGTH), dtype=np.int32), made["tokens"].offsets)
    nothing, cpu = Ragged.from_list([[]] * len(LENGTH), np.int32), torch.device("cpu")
    ranks = [pack(tokens, nothing, align=1, device=cpu, context=ContextRank(r, size), predictors=made["predictors"]) for r in range(size)]
    got = {}
    for rank in ranks:
        assert (rank.samples, rank.responses, len(rank.targets)) == (len(LENGTH), sum(map(len, PLACES)), 0)
        for row, pick in zip(rank.predictors.tolist(), rank.picks.tolist(), strict=True):
            assert pick not in got
            got[pick] = int(rank.tokens[0, row])
    assert [got[i] for i in range(len(got))] == [int(tokens[i][place]) for i, places in enumerate(PLACES) for place in places]


@pytest.mark.parametrize("place", [-1, 5])
def test_a_place_outside_its_sequence_is_refused(place: int) -> None:
    tokens, nothing = Ragged.from_list([[1], [1] * 5], np.int32), Ragged.from_list([[], []], np.int32)
    with pytest.raises(ValueError, match=f"row 1: place {place}"):
        pack(tokens, nothing, align=1, device=torch.device("cpu"), predictors=Ragged.from_list([[0], [4, place]], np.int32))


def refused(rank: Rank, model_dir: Path) -> str:
    engine = Engine(read_hf_config(model_dir), rank, Role("lm", trainable=False))
    with pytest.raises(ValueError, match="a value head's") as error:
        engine.forward([micro_batch([0])])
    return str(error.value)


def test_log_probs_have_no_such_predictors(model_dir: Path) -> None:
    assert run_ranks(Layout(), refused, model_dir)
