"""What transformers computes with the models of ``mixtures``, and whether Megatron computes it too."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megarl.types import Layout
from megarl.weights.families import read_hf_config
from tests.megatron.mixtures import by_table
from tests.megatron.models import HOSTILE_LENGTHS, sequences
from tests.megatron.ranks import run_ranks
from tests.megatron.test_parity import TEMPERATURE, compare, work


@cache
def _loaded(model_dir: Path) -> PreTrainedModel:
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, **settings)


@cache
def reference(model_dir: Path, lengths: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """transformers, one sequence at a time: logits and log-probs at the responses, and gradients of the mean negative log-prob."""
    model = _loaded(model_dir)
    model.zero_grad()
    prompts, responses = sequences(list(lengths))
    rows, log_probs, entropies = [], [], []
    for i in range(len(lengths)):
        tokens = torch.from_numpy(np.concatenate([prompts[i], responses[i]]).astype(np.int64))[None]
        row = model(tokens).logits[0, len(prompts[i]) - 1 : -1] / TEMPERATURE
        log_p = row.log_softmax(dim=-1)
        rows.append(row * TEMPERATURE)
        log_probs.append(log_p.gather(1, tokens[0, len(prompts[i]) :, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(dim=-1))
    joined = torch.cat(log_probs)
    (-joined.mean()).backward()
    found = {n: (torch.zeros_like(p) if p.grad is None else p.grad).clone().numpy() for n, p in model.named_parameters()}
    return {
        "logits": torch.cat(rows).detach().numpy(),
        "log_probs": joined.detach().numpy(),
        "entropy": torch.cat(entropies).detach().numpy(),
        "gradients": by_table(read_hf_config(model_dir), found),
    }


def parity_cases(cases: list[tuple[str, str]], fast: list[tuple[str, str]]) -> list[Any]:
    """(model, layout) as parameters of a test, with marks on those that aren't ``fast``."""
    assert set(fast) <= set(cases)
    return [pytest.param(*case, id=" ".join(case), marks=() if case in fast else pytest.mark.slow) for case in cases]


def check_parity(model_dir: Path, layout: Layout) -> None:
    """Logits, log-probs, entropies, gradients and their norm on every rank are transformers'."""
    lists = {name: lengths if len(lengths) >= layout.data else lengths * layout.data for name, lengths in HOSTILE_LENGTHS.items()}
    expected = {name: reference(model_dir, tuple(lengths)) for name, lengths in lists.items()}
    for result in run_ranks(layout, work, model_dir, lists):
        learned = {name: shard for name, shard in result["shards"].items() if not name.endswith("router.expert_bias")}
        for name, lengths in lists.items():
            compare(result[name], expected[name], lengths, learned)
