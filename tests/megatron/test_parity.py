"""With the same weights in fp32, Megatron computes what Hugging Face computes, in every layout, and so do its gradients."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from transformers import AutoModelForCausalLM

from megarl.megatron.cpu import on_compute_device
from megarl.megatron.engine import Engine, MicroBatch
from megarl.megatron.losses import MiniBatchTotals, SupervisedLossSpec
from megarl.megatron.model import Role
from megarl.megatron.optimizer import OptimizerSettings
from megarl.types import Layout, Ragged, Rank
from megarl.weights.families import read_hf_config
from tests.megatron.models import HOSTILE_LENGTHS, VOCAB, by_expert, sequences, tiny_mixture, tiny_qwen2
from tests.megatron.ranks import run_ranks

LAYOUTS = {
    "one rank": Layout(),
    "tp2": Layout(tensor=2),
    "pp2": Layout(pipeline=2),
    "tp2 pp2": Layout(tensor=2, pipeline=2),
    "dp2": Layout(data=2),
    "tp2 sp": Layout(tensor=2, sequence_parallel=True),
    "tp2 pp2 sp": Layout(tensor=2, pipeline=2, sequence_parallel=True),
    "pp2 dp2": Layout(pipeline=2, data=2),
    "tp2 dp2 sp": Layout(tensor=2, data=2, sequence_parallel=True),
    "vpp2": Layout(pipeline=2, virtual_pipeline=2),
    "vpp2 tp2": Layout(tensor=2, pipeline=2, virtual_pipeline=2),
    "vpp2 tp2 sp": Layout(tensor=2, pipeline=2, virtual_pipeline=2, sequence_parallel=True),
    "vpp2 dp2": Layout(pipeline=2, virtual_pipeline=2, data=2),
    "vpp2 cp2": Layout(pipeline=2, virtual_pipeline=2, context=2),
    "cp2": Layout(context=2),
    "cp3": Layout(context=3),
    "cp2 tp2": Layout(tensor=2, context=2),
    "cp2 tp2 sp": Layout(tensor=2, context=2, sequence_parallel=True),
    "cp2 pp2": Layout(pipeline=2, context=2),
    "cp2 dp2": Layout(context=2, data=2),
}
MIXTURE_LAYOUTS = {
    "one rank": Layout(),
    "ep2": Layout(expert=2, data=2),
    "ep3": Layout(expert=3, data=3),
    "ep2 dp4": Layout(expert=2, data=4),
    "ep2 pp2": Layout(pipeline=2, expert=2, data=2),
    "ep2 vpp2": Layout(pipeline=2, virtual_pipeline=2, expert=2, data=2),
    "ep2 tp2 sp": Layout(tensor=2, expert=2, sequence_parallel=True),
    "ep2 tp2 sp dp2": Layout(tensor=2, expert=2, data=2, sequence_parallel=True),
    "ep2 etp2 tp2 sp": Layout(tensor=2, expert=2, expert_tensor=2, data=2, sequence_parallel=True),
    "etp2 tp2 sp": Layout(tensor=2, expert_tensor=2, sequence_parallel=True),
    "ep2 cp2": Layout(context=2, expert=2),
    # One expert-parallel rank, and experts that are cut otherwise than the rest all the same.
    "tp2 sp": Layout(tensor=2, sequence_parallel=True),
    "tp2 sp pp2": Layout(tensor=2, pipeline=2, sequence_parallel=True),
    "etp2 dp2": Layout(expert_tensor=2, data=2),
    "etp3 cp3": Layout(expert_tensor=3, context=3),
    "etp3 tp2 sp dp3": Layout(tensor=2, expert_tensor=3, data=3, sequence_parallel=True),
    "pp2": Layout(pipeline=2),
}
TEMPERATURE = 0.7


# Tied and untied embeddings differ at the ends of the pipeline; the other layouts need not be run twice.
CASES = [("tied", name) for name in LAYOUTS] + [("untied", "tp2 pp2 sp"), ("untied", "vpp2")]
CASES += [("mixture", name) for name in MIXTURE_LAYOUTS] + [("mixture of softmax", "ep2")]
# Each kind of cut once; the rest are left to `make test`.
FAST = [("tied", name) for name in ("one rank", "dp2", "tp2 pp2 sp", "vpp2", "cp2 tp2 sp")]
FAST += [("mixture", "tp2 sp")]
PARAMETERS = [pytest.param(*case, id=" ".join(case), marks=() if case in FAST else pytest.mark.slow) for case in CASES]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "tied": tiny_qwen2(tmp_path_factory.mktemp("model"), tied=True),
        "untied": tiny_qwen2(tmp_path_factory.mktemp("model"), tied=False),
        "mixture": tiny_mixture(tmp_path_factory.mktemp("model")),
        "mixture of softmax": tiny_mixture(tmp_path_factory.mktemp("model"), norm_topk_prob=False),
    }


@cache
def reference(model_dir: Path, lengths: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """Hugging Face, one sequence at a time: logits and log-probs at the responses, and gradients of the mean negative log-prob."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    prompts, responses = sequences(lengths)
    logits, log_probs, entropies = [], [], []
    for prompt, response in zip(prompts_of(prompts), prompts_of(responses), strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        row = model(tokens).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        log_p = row.log_softmax(dim=-1)
        logits.append(row * TEMPERATURE)
        log_probs.append(log_p.gather(1, tokens[0, len(prompt) :, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(dim=-1))
    joined = torch.cat(log_probs)
    (-joined.mean()).backward()
    return {
        "logits": torch.cat(logits).detach().numpy(),
        "log_probs": joined.detach().numpy(),
        "entropy": torch.cat(entropies).detach().numpy(),
        "gradients": by_expert({n: p.grad.numpy() for n, p in model.named_parameters()}),
    }


def prompts_of(column: Ragged) -> list[np.ndarray]:
    return [column[i] for i in range(len(column))]


def work(rank: Rank, model_dir: Path, lists: dict[str, list[tuple[int, int]]]) -> dict[str, Any]:
    engine = Engine(read_hf_config(model_dir), rank, Role("lm", trainable=True), OptimizerSettings(lr=1e-3))
    engine.load_hf(model_dir)
    engine.enable_training()
    return {"shards": engine.shards} | {name: measure(engine, rank, lengths) for name, lengths in lists.items()}


def measure(engine: Engine, rank: Rank, lengths: list[tuple[int, int]]) -> dict[str, Any]:
    prompts, responses = sequences(lengths)
    mine = list(range(len(lengths)))[rank.data :: rank.layout.data]
    # Two micro-batches of unequal content, so that accumulation is part of what is compared.
    cuts = [mine[: len(mine) // 2], mine[len(mine) // 2 :]]
    batches = [MicroBatch(prompts.take(c), responses.take(c), {}) for c in cuts if c]
    outputs = engine.forward(batches, temperature=TEMPERATURE, with_entropy=True)
    with torch.no_grad():
        logits = engine.run_schedule(
            batches, lambda packed, _batch, full: (gathered(full[0].index_select(0, packed.predictors)), packed.picks), forward_only=True
        )
    starts = np.cumsum([0, *(int(b.responses.lengths.sum()) for b in batches)])
    totals = MiniBatchTotals(tokens=int(responses.lengths.sum()), samples=len(lengths))
    sums = engine.gradients(batches, SupervisedLossSpec(), totals, temperature=TEMPERATURE)
    with on_compute_device():
        engine.optimizer.prepare_grads()
        norm = float(engine.optimizer.get_grad_norm())
    return {
        "rows": mine,
        "outputs": {k: np.concatenate(v) for k, v in outputs.items()},
        "logits": torch.cat([part for part, _ in logits]).numpy() if logits else None,
        "logits_of": np.concatenate([picks.numpy() + start for (_, picks), start in zip(logits, starts, strict=False)]) if logits else None,
        "loss": sums["loss"],
        "grad_norm": norm,
        "gradients": {n: p.main_grad.clone().numpy() for n, p in engine.named_parameters().items() if p.requires_grad},
    }


def gathered(local: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(local) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    torch.distributed.all_gather(parts, local.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=1)[:, :VOCAB]


def assert_close(got: np.ndarray, expected: np.ndarray, what: str, relative: float = 1e-5) -> None:
    error = np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-30)
    assert error <= relative, f"{what}: relative error {error:.2e} > {relative:g}"


@pytest.mark.parametrize(("model", "layout"), PARAMETERS)
def test_equals_hugging_face(model_dirs: dict[str, Path], model: str, layout: str) -> None:
    cut = (MIXTURE_LAYOUTS if model.startswith("mixture") else LAYOUTS)[layout]
    lists = {name: lengths if len(lengths) >= cut.data else lengths * cut.data for name, lengths in HOSTILE_LENGTHS.items()}
    expected = {name: reference(model_dirs[model], tuple(lengths)) for name, lengths in lists.items()}
    for result in run_ranks(cut, work, model_dirs[model], lists):
        for name, lengths in lists.items():
            compare(result[name], expected[name], lengths, result["shards"])


def compare(result: dict[str, Any], expected: dict[str, Any], lengths: list[tuple[int, int]], shards: dict[str, Any]) -> None:
    starts = sequences(lengths)[1].offsets
    at = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in result["rows"]])
    if result["outputs"]:
        if len(result["logits_of"]):  # under context parallelism a rank may have none
            assert_close(result["logits"], expected["logits"][at[result["logits_of"]]], "logits")
        assert_close(result["outputs"]["log_probs"], expected["log_probs"][at], "log-probs")
        assert_close(result["outputs"]["entropy"], expected["entropy"][at], "entropy")
    assert abs(result["loss"] + expected["log_probs"].mean()) <= 1e-5 * abs(expected["log_probs"].mean())
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in expected["gradients"].values()))
    assert_close(np.array(result["grad_norm"]), norm, "gradient norm")
    # Where a gradient is 0 in exact arithmetic (the query of a lone token), a mask's rounding is measured against the largest one.
    rounding = 1e-6 * max(np.abs(g).max() for g in expected["gradients"].values())
    for name, shard in shards.items():
        for copy in shard.copies:
            whole = expected["gradients"][copy.source.name]
            part = whole[tuple(slice(*b) for b in copy.source.box)]
            mine = result["gradients"][name][tuple(slice(*b) for b in copy.target.box)]
            assert np.abs(mine - part).max() <= 1e-5 * np.abs(whole).max() + rounding, f"gradient of {name}"
