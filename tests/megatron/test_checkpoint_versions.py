"""Checkpoints between megatron-core versions: a newer one reads what an older one wrote; an older one refuses and says why.

``recorded/checkpoint_0.16.1`` was written by megatron-core 0.16.1: ``python -m tests.megatron.test_checkpoint_versions`` there.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import megatron.core
import torch

from megarl.errors import CheckpointError
from megarl.megatron.checkpoint import load_engine, reads_common_state_inside, save_engine
from megarl.megatron.engine import Engine, MicroBatch
from megarl.megatron.losses import MiniBatchTotals, SupervisedLossSpec
from megarl.megatron.model import Role
from megarl.megatron.optimizer import OptimizerSettings
from megarl.types import Layout, Rank
from megarl.weights.families import read_hf_config
from tests.megatron.models import sequences, tiny_qwen2
from tests.megatron.ranks import run_ranks

RECORDED = Path(__file__).parent / "recorded" / "checkpoint_0.16.1"
SMALL = {
    "model_type": "qwen2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def small_engine(rank: Rank) -> Engine:
    """One layer, trained by two steps from a rule and not from a generator, whose draws may differ between versions of torch."""
    engine = Engine(SMALL, rank, Role("lm", trainable=True), OptimizerSettings(lr=1e-2, distributed=True))
    for parameter in engine.named_parameters().values():
        parameter.data.copy_(torch.sin(torch.arange(parameter.numel(), dtype=torch.float64)).view(parameter.shape) / 10)
    engine.enable_training()
    return engine


def train(engine: Engine) -> float:
    prompts, responses = sequences([(3, 4), (5, 2)])
    totals = MiniBatchTotals(tokens=6, samples=2)
    return engine.train_step([MicroBatch(prompts, responses, {})], SupervisedLossSpec(), totals, lr=1e-2).sums["loss"]


def digests(engine: Engine) -> dict[str, str]:
    return {n: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for n, p in engine.named_parameters().items()}


def record(rank: Rank, target: Path) -> None:
    engine = small_engine(rank)
    train(engine)
    train(engine)
    save_engine(engine, target)
    expected = {"parameters": digests(engine), "next_losses": [train(engine), train(engine)]}
    (target.parent / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def resume(rank: Rank) -> dict:
    engine = small_engine(rank)
    load_engine(engine, RECORDED)
    return {"parameters": digests(engine), "next_losses": [train(engine), train(engine)]}


def test_what_0_16_1_wrote_is_resumed() -> None:
    """Weights bit for bit; and the moments, without which the loss after the next step would be another."""
    expected = json.loads((RECORDED.parent / "expected.json").read_text())
    (found,) = run_ranks(Layout(), resume)
    assert found["parameters"] == expected["parameters"]
    for got, wanted in zip(found["next_losses"], expected["next_losses"], strict=True):
        assert abs(got - wanted) <= 1e-6 * wanted


def save_as_newer_and_load(rank: Rank, model_dir: Path, target: Path) -> str:
    """A save, without the file that only older versions write; then a load, and what came of it."""
    engine = Engine(read_hf_config(model_dir), rank, Role("lm", trainable=False))
    engine.load_hf(model_dir)
    save_engine(engine, target)
    (target / "common.pt").unlink(missing_ok=True)
    try:
        load_engine(engine, target)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_an_older_megatron_core_refuses_what_a_newer_one_wrote(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    target.mkdir()
    (found,) = run_ranks(Layout(), save_as_newer_and_load, tiny_qwen2(tmp_path / "model"), target)
    older = tuple(int(part) for part in megatron.core.__version__.split(".")[:2]) < (0, 19)
    assert reads_common_state_inside() is not older
    assert ("too old" in found and "common.pt" in found) if older else found == "loaded"


if __name__ == "__main__":
    RECORDED.mkdir(parents=True)
    os.chdir(RECORDED.parent)  # a checkpoint holds the path that it was written to
    run_ranks(Layout(), record, Path(RECORDED.name))
