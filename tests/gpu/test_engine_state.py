"""One engine on a GPU: a checkpoint brings it back bit for bit, also before its first step, and a critic starts from zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.models import sequences, small_qwen2
from tests.gpu.ranks import on_one_rank

CASES = [(distributed, steps) for distributed in (True, False) for steps in (0, 2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """All that is measured here, in one process: each costs twenty seconds of imports."""
    return on_one_rank(measure, small_qwen2(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("checkpoints"))


def measure(rank: Any, model_dir: Path, directory: Path) -> dict[Any, Any]:
    restored = {case: save_and_restore(rank, model_dir, directory / f"{case[0]}-{case[1]}", *case) for case in CASES}
    other = {"float32": float32_against_hugging_face(rank, model_dir), "critic": values_of_a_fresh_critic(rank, model_dir)}
    return restored | other


def build(rank: Any, model_dir: Path, distributed: bool, head: str = "lm") -> Any:
    from megarl.megatron.engine import Engine
    from megarl.megatron.model import Role
    from megarl.megatron.optimizer import OptimizerSettings
    from megarl.weights.families import read_hf_config

    settings = OptimizerSettings(lr=1e-2, distributed=distributed)
    engine = Engine(read_hf_config(model_dir), rank, Role(head, True, "bfloat16"), settings)
    engine.load_hf(model_dir)
    engine.enable_training()
    return engine


def step(engine: Any) -> float:
    from megarl.megatron.engine import MicroBatch
    from megarl.megatron.losses import MiniBatchTotals, SupervisedLossSpec

    prompts, responses = sequences()
    totals = MiniBatchTotals(tokens=int(responses.lengths.sum()), samples=len(responses))
    result = engine.train_step([MicroBatch(prompts, responses, {})], SupervisedLossSpec(), totals, lr=1e-2)
    assert result.applied
    return result.sums["loss"]


def weights(engine: Any) -> dict[str, Any]:
    return {n: p.detach().clone() for n, p in engine.named_parameters().items()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all((a[n] == b[n]).all() for n in a)


def save_and_restore(rank: Any, model_dir: Path, directory: Path, distributed: bool, steps_before: int) -> dict[str, Any]:
    from megarl.megatron.checkpoint import load_engine, save_engine

    first = build(rank, model_dir, distributed)
    start = weights(first)
    for _ in range(steps_before):
        step(first)
    directory.mkdir()
    save_engine(first, directory)
    saved = weights(first)
    losses = [step(first), step(first)]
    second = build(rank, model_dir, distributed)
    load_engine(second, directory)
    return {
        "learned": not same(start, weights(first)),
        "restored": same(saved, weights(second)),
        "losses": (losses, [step(second), step(second)]),
    }


def float32_against_hugging_face(rank: Any, model_dir: Path) -> dict[str, Any]:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from megarl.megatron.engine import Engine, MicroBatch
    from megarl.megatron.model import Role
    from megarl.weights.families import read_hf_config

    engine = Engine(read_hf_config(model_dir), rank, Role("lm", False, "float32"))
    engine.load_hf(model_dir)
    prompts, responses = sequences()
    ours = engine.forward([MicroBatch(prompts, responses, {})])["log_probs"][0]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").cuda()
    theirs = []
    for i in range(len(prompts)):
        tokens = torch.from_numpy(np.concatenate([prompts[i], responses[i]]).astype(np.int64))[None].cuda()
        row = model(tokens).logits[0, len(prompts[i]) - 1 : -1].log_softmax(-1)
        theirs.append(row.gather(1, tokens[0, len(prompts[i]) :, None])[:, 0].detach().cpu().numpy())
    return {"spec": engine.spec, "error": float(np.abs(ours - np.concatenate(theirs)).max())}


def values_of_a_fresh_critic(rank: Any, model_dir: Path) -> float:
    from megarl.megatron.engine import MicroBatch

    engine = build(rank, model_dir, True, head="value")
    prompts, responses = sequences()
    found = engine.forward([MicroBatch(prompts, responses, {})])
    return float(abs(found["values"][0]).max() + abs(found["last_values"][0]).max())


@pytest.mark.parametrize(("distributed", "steps"), CASES)
def test_checkpoint(found: dict[Any, Any], distributed: bool, steps: int) -> None:
    result = found[distributed, steps]
    assert result["learned"]
    assert result["restored"]
    # Kernels that add in any order round differently.
    assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-5)


def test_float32_takes_local_layers(found: dict[Any, Any]) -> None:
    """Transformer Engine has no packed attention in float32; our own computes it, to float32's rounding."""
    assert found["float32"]["spec"] == "local"
    assert found["float32"]["error"] < 1e-4


def test_fresh_critic(found: dict[Any, Any]) -> None:
    assert found["critic"] == 0.0
