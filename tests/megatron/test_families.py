"""Families that need layers, norms, windows or rotary positions of ours compute what transformers computes, and so do their gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.megatron.cpu import on_compute_device
from megarl.megatron.engine import Engine, MicroBatch
from megarl.megatron.model import Role
from megarl.megatron.optimizer import OptimizerSettings
from megarl.types import Layout, Rank
from megarl.weights.families import read_hf_config
from tests.megatron.family_models import builder
from tests.megatron.models import HOSTILE_LENGTHS, sequences
from tests.megatron.ranks import run_ranks
from tests.megatron.test_parity import assert_close, compare, measure, reference

LAYOUTS = {
    "one rank": Layout(),
    "tp2": Layout(tensor=2),
    "tp4": Layout(tensor=4),
    "tp2 sp": Layout(tensor=2, sequence_parallel=True),
    "pp2": Layout(pipeline=2),
    "pp2 vpp2": Layout(pipeline=2, virtual_pipeline=2),
    "cp2": Layout(context=2),
    "cp2 tp2 sp": Layout(tensor=2, context=2, sequence_parallel=True),
    "pp2 tp2 sp": Layout(tensor=2, pipeline=2, sequence_parallel=True),
}
# What can break where: windows and rotary positions of ours under context parallelism, new norms' gradients under tensor and sequence
# parallelism, tied embeddings and unequal stages under pipelines, fewer key/value heads than tensor-parallel ranks.
CASES = [
    ("llama3 rope", "one rank"),
    ("llama3 rope", "tp2 sp"),
    ("llama3 rope", "tp4"),
    ("linear rope and biases", "tp2 sp"),
    ("linear rope and biases", "tp2"),
    ("yarn", "one rank"),
    ("yarn", "pp2"),
    ("yarn", "cp2"),
    ("window", "one rank"),
    ("window", "cp2"),
    ("window", "pp2 vpp2"),
    ("window of one", "one rank"),
    ("windowed qwen2", "pp2"),
    ("longrope short", "cp2"),
    ("longrope short", "tp2"),
    ("longrope long", "one rank"),
    ("parallel", "one rank"),
    ("parallel", "tp2"),
    ("parallel", "tp2 sp"),
    ("parallel", "pp2 vpp2"),
    ("neox in sequence", "pp2 tp2 sp"),
    ("gemma2", "one rank"),
    ("gemma2", "tp2"),
    ("gemma2", "cp2 tp2 sp"),
    ("gemma2", "pp2 vpp2"),
    ("gemma2 of three layers", "pp2"),
    ("gemma2 of three layers", "pp2 tp2 sp"),
    ("gemma3", "one rank"),
    ("gemma3", "tp2"),
    ("gemma3", "tp4"),
    ("gemma3", "cp2 tp2 sp"),
    ("gemma3", "pp2 vpp2"),
]
FAST = [
    ("llama3 rope", "tp2 sp"),
    ("yarn", "pp2"),
    ("window", "cp2"),
    ("parallel", "tp2 sp"),
    ("gemma2", "cp2 tp2 sp"),
    ("gemma3", "pp2 vpp2"),
]
PARAMETERS = [pytest.param(*case, id=", ".join(case), marks=() if case in FAST else pytest.mark.slow) for case in CASES]

LISTS = {name: HOSTILE_LENGTHS[name] for name in ("one long", "around 16")}
LONGER_THAN_16 = {"all long": [(40, 23), (20, 5), (17, 1)]}
LONGEST = {"longrope short": 80}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return builder(tmp_path_factory.mktemp("families"))


def work(rank: Rank, model_dir: Path, lists: dict[str, list[tuple[int, int]]], longest: int | None) -> dict[str, Any]:
    engine = Engine(read_hf_config(model_dir), rank, Role("lm", trainable=True, longest=longest), OptimizerSettings(lr=1e-3))
    engine.load_hf(model_dir)
    engine.enable_training()
    return {"shards": engine.shards} | {name: measure(engine, rank, lengths) for name, lengths in lists.items()}


@pytest.mark.parametrize(("name", "layout"), PARAMETERS)
def test_equals_transformers(model: Callable[[str], Path], name: str, layout: str) -> None:
    directory = model(name)
    lists = LONGER_THAN_16 if name == "longrope long" else LISTS
    for result in run_ranks(LAYOUTS[layout], work, directory, lists, LONGEST.get(name)):
        for key, lengths in lists.items():
            compare(result[key], reference(directory, tuple(lengths)), lengths, result["shards"])


def values(rank: Rank, model_dir: Path, head: np.ndarray) -> dict[str, list[np.ndarray]]:
    engine = Engine(read_hf_config(model_dir), rank, Role("value", trainable=False))
    engine.load_hf(model_dir)
    if rank.is_last_stage:
        engine.named_parameters()["output_layer.weight"].data.copy_(torch.from_numpy(head))
    return engine.forward([MicroBatch(*sequences(HOSTILE_LENGTHS["one long"]), {})])


def test_a_value_head_is_not_capped(model: Callable[[str], Path]) -> None:
    """Its values would all lie within the cap of the logits, 2.5."""
    directory = model("gemma2")
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").model
    head = np.full((1, 40), 0.5, np.float32)
    prompts, responses = sequences(HOSTILE_LENGTHS["one long"])
    expected = []
    with torch.no_grad():
        for i in range(len(prompts)):
            tokens = torch.from_numpy(np.concatenate([prompts[i], responses[i]]).astype(np.int64))[None]
            hidden = theirs(tokens).last_hidden_state[0, len(prompts[i]) - 1 : -1]
            expected.append((hidden @ torch.from_numpy(head).T)[:, 0].numpy())
    joined = np.concatenate(expected)
    assert np.abs(joined).max() > 5.0
    assert_close(run_ranks(Layout(pipeline=2), values, directory, head)[1]["values"][0], joined, "values")


def embedded(rank: Rank, model_dir: Path, tokens: torch.Tensor) -> list[list[float]]:
    engine = Engine(read_hf_config(model_dir), rank, Role("lm", trainable=False, dtype="bfloat16"))
    engine.load_hf(model_dir)
    with torch.no_grad(), on_compute_device():
        return engine.chunks[0].embedding(tokens, torch.zeros_like(tokens))[:, 0].float().tolist()


def test_the_scale_of_embeddings_is_rounded_as_transformers_rounds_it(model: Callable[[str], Path]) -> None:
    """In bfloat16 the square root of 40 is another number, and the product again."""
    directory = model("gemma2")
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).model.embed_tokens
    tokens = torch.arange(61)[None]
    with torch.no_grad():
        assert run_ranks(Layout(), embedded, directory, tokens)[0] == theirs(tokens)[0].float().tolist()
