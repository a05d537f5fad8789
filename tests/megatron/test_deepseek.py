"""DeepSeek-V2 and V3 on Megatron compute what transformers computes, in every kind of layout; training leaves the router's bias alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from megarl.megatron.checkpoint import load_engine, save_engine
from megarl.megatron.engine import Engine, MicroBatch
from megarl.megatron.losses import MiniBatchTotals, SupervisedLossSpec
from megarl.megatron.model import Role
from megarl.megatron.optimizer import OptimizerSettings
from megarl.megatron.routing import Routing, choose
from megarl.types import Layout, Rank
from megarl.weights.families import read_hf_config
from tests.megatron.mixture_parity import check_parity, parity_cases
from tests.megatron.mixtures import MODELS, make
from tests.megatron.models import HOSTILE_LENGTHS, sequences
from tests.megatron.ranks import run_ranks

LENGTHS = HOSTILE_LENGTHS["around 16"]
LAYOUTS = {
    "one rank": Layout(),
    "tp2 sp": Layout(tensor=2, sequence_parallel=True),  # latents are gathered, tokens scattered, the shared key's gradient summed
    "pp2": Layout(pipeline=2),  # 3 layers: unequal stages
    "pp3": Layout(pipeline=3),
    "vpp2": Layout(pipeline=2, virtual_pipeline=2),
    "cp2": Layout(context=2),
    "cp3": Layout(context=3),
    "ep2": Layout(expert=2, data=2),
    "ep2 tp2 sp pp2": Layout(tensor=2, pipeline=2, expert=2, sequence_parallel=True),
    "ep2 etp2 tp2 sp": Layout(tensor=2, expert=2, expert_tensor=2, data=2, sequence_parallel=True),
    "cp2 tp2 sp": Layout(tensor=2, context=2, sequence_parallel=True),
}
CASES = [("v3", name) for name in LAYOUTS if name != "vpp2"] + [("v3 deep", "vpp2"), ("v3 dense", "tp2 sp")]
CASES += [(model, name) for model in ("v3 plain", "v2", "v2 lite") for name in ("one rank", "tp2 sp", "pp2", "cp2", "ep2")]
FAST = [
    ("v3", "one rank"),
    ("v3", "tp2 sp"),
    ("v3", "pp2"),
    ("v3", "cp2"),
    ("v3 plain", "one rank"),
    ("v2", "one rank"),
    ("v2 lite", "ep2"),
]


@pytest.mark.parametrize(("model", "layout"), parity_cases(CASES, FAST))
def test_equals_hugging_face(model: str, layout: str, model_dirs: dict[str, Path]) -> None:
    check_parity(model_dirs[model], LAYOUTS[layout])


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(name, tmp_path_factory.mktemp("model")) for name in MODELS if name.startswith("v")}


@pytest.mark.parametrize("model", ["v3", "v2 lite"])
def test_a_configuration_as_it_was_published_means_the_same(model: str, tmp_path: Path) -> None:
    model_dir = make(model, tmp_path)
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = {"type": scaling.pop("rope_type")} | scaling
    path.write_text(json.dumps(config | {"scoring_func": "sigmoid" if model == "v3" else "softmax", "moe_layer_freq": 1, "ep_size": 1}))
    check_parity(model_dir, Layout())


ROUTERS = {
    "softmax, all experts": ({}, Routing(3)),
    "softmax, few groups": ({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, Routing(3, groups=4, groups_chosen=2)),
    "sigmoid, few groups": ({"n_group": 3, "topk_group": 2}, Routing(3, True, 3, 2, 2, normalize=True, bias=True)),
    "sigmoid, one group": ({"n_group": 1, "topk_group": 1}, Routing(3, True, 1, 1, 2, normalize=True, bias=True)),
    "sigmoid, one expert": (
        {"n_group": 3, "topk_group": 1, "num_experts_per_tok": 1},
        Routing(1, True, 3, 1, 2, normalize=True, bias=True),
    ),
    "sigmoid, not normalized": ({"n_group": 3, "topk_group": 2, "norm_topk_prob": False}, Routing(3, True, 3, 2, 2, bias=True)),
}


@pytest.mark.parametrize(("settings", "rule"), ROUTERS.values(), ids=ROUTERS)
def test_experts_and_weights_are_those_of_transformers(settings: dict[str, Any], rule: Routing) -> None:
    torch.manual_seed(0)
    common = {"n_routed_experts": 12, "num_experts_per_tok": 3, "hidden_size": 64, "routed_scaling_factor": 1.7}
    if rule.sigmoid:
        router = DeepseekV3TopkRouter(DeepseekV3Config(**(common | settings)))
        router.e_score_correction_bias.normal_(std=0.5)
    else:
        router = DeepseekV2TopkRouter(DeepseekV2Config(**(common | settings)))
    hidden = torch.randn(200, 64) / 8
    with torch.no_grad():
        router.weight.normal_()
        logits, weights, experts = router(hidden)
        bias = router.e_score_correction_bias if rule.sigmoid else None
        mine, chosen = choose(logits, Routing(**{**vars(rule), "scale": 1.7}), bias)
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, experts, True))
    torch.testing.assert_close(mine, torch.zeros_like(mine).scatter(1, experts, weights), rtol=1e-6, atol=0)
    assert len(chosen.unique(dim=0)) > 1, "tokens must differ in what they choose"


def engine_of(rank: Rank, model_dir: Path, dtype: str = "float32") -> Engine:
    engine = Engine(read_hf_config(model_dir), rank, Role("lm", trainable=True, dtype=dtype), OptimizerSettings(lr=1e-2))
    engine.load_hf(model_dir)
    engine.enable_training()
    return engine


def step(engine: Engine, rank: Rank, seed: int = 0) -> float:
    prompts, responses = sequences(LENGTHS, seed)
    rows = list(range(len(LENGTHS)))[rank.data :: rank.layout.data]
    totals = MiniBatchTotals(int(responses.lengths.sum()), len(LENGTHS))
    batches = [MicroBatch(prompts.take(rows), responses.take(rows), {})]
    result = engine.train_step(batches, SupervisedLossSpec(), totals, lr=1e-2)
    assert result.applied
    return result.sums["loss"]


def bits(engine: Engine, ending: str) -> dict[str, bytes]:
    found = {name: tensor for name, tensor in engine.named_parameters().items() if name.endswith(ending)}
    return {name: tensor.detach().clone().view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


def values(rank: Rank, model_dir: Path) -> list[np.ndarray]:
    engine = Engine(read_hf_config(model_dir), rank, Role("value", trainable=False))
    engine.load_hf(model_dir)
    if rank.is_last_stage:
        engine.named_parameters()["output_layer.weight"].data.fill_(1.0)
    prompts, responses = sequences(LENGTHS)
    return engine.forward([MicroBatch(prompts, responses, {})]).get("values", [])


def test_a_critic_has_the_same_values_in_another_layout(model_dirs: dict[str, Path]) -> None:
    (alone,) = run_ranks(Layout(), values, model_dirs["v3"])[0]
    (cut,) = run_ranks(Layout(tensor=2, pipeline=2, sequence_parallel=True), values, model_dirs["v3"])[-1]
    assert alone.std() > 0
    np.testing.assert_allclose(cut, alone, rtol=1e-5, atol=1e-5 * np.abs(alone).max())


def trained(rank: Rank, model_dir: Path, dtype: str) -> dict[str, Any]:
    engine = engine_of(rank, model_dir, dtype)
    before = bits(engine, "router.expert_bias"), bits(engine, "router.weight")
    for seed in range(2):
        step(engine, rank, seed)
    dtypes = {tensor.dtype for name, tensor in engine.named_parameters().items() if name.endswith("expert_bias")}
    return {"before": before, "after": (bits(engine, "router.expert_bias"), bits(engine, "router.weight")), "dtypes": dtypes}


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(Layout(), "bfloat16"), (Layout(tensor=2, expert=2, sequence_parallel=True), "float32")],
    ids=["one rank", "ep2 tp2 sp"],
)
def test_training_leaves_the_bias_of_the_router_alone(layout: Layout, dtype: str, tmp_path: Path) -> None:
    model_dir = make("v3", tmp_path)
    tensors = load_file(model_dir / "model.safetensors")
    biases = [f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)]
    for result in run_ranks(layout, trained, model_dir, dtype):
        (bias, weight), (bias_after, weight_after) = result["before"], result["after"]
        assert [np.frombuffer(b, np.float32).tolist() for b in bias.values()] == [tensors[name].tolist() for name in biases]
        assert bias_after == bias
        assert weight and all(weight_after[name] != weight[name] for name in weight), "training must have changed something"
        assert result["dtypes"] == {torch.float32}


def saved(rank: Rank, model_dir: Path, target: Path) -> list[float]:
    engine = engine_of(rank, model_dir)
    step(engine, rank, 0)
    save_engine(engine, target)
    return [step(engine, rank, 1), step(engine, rank, 2)]


def resumed(rank: Rank, model_dir: Path, target: Path) -> tuple[list[float], dict[str, bytes]]:
    engine = engine_of(rank, model_dir)
    for name, tensor in engine.named_parameters().items():
        if name.endswith("expert_bias"):
            tensor.zero_()  # so that it must come from the checkpoint
    load_engine(engine, target)
    return [step(engine, rank, 1), step(engine, rank, 2)], bits(engine, "expert_bias")


CHECKPOINTS = {
    "one rank to pp2": ("v3", Layout(), Layout(pipeline=2)),
    "ep2 tp2 sp to ep3 pp2": ("v3", Layout(tensor=2, expert=2, sequence_parallel=True), Layout(pipeline=2, expert=3, data=3)),
    "v2 pp3 to cp2": ("v2", Layout(pipeline=3), Layout(context=2)),
}


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [pytest.param(*case, id=name, marks=() if name == "one rank to pp2" else pytest.mark.slow) for name, case in CHECKPOINTS.items()],
)
def test_a_checkpoint_continues_in_another_layout(
    model: str, before: Layout, after: Layout, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    whole = run_ranks(before, saved, model_dirs[model], tmp_path)[0]
    tensors = load_file(model_dirs[model] / "model.safetensors")
    for later, biases in run_ranks(after, resumed, model_dirs[model], tmp_path):
        # The first loss comes from the loaded weights alone; later ones also from Adam, which turns rounding into steps.
        assert abs(later[0] - whole[0]) <= 1e-6 * abs(whole[0])
        np.testing.assert_allclose(later, whole, rtol=1e-3)
        known = (
            {tensors[f"model.layers.{i}.mlp.gate.e_score_correction_bias"].numpy().tobytes() for i in (1, 2)} if model == "v3" else set()
        )
        assert set(biases.values()) <= known and (biases or model == "v2" or after.pipeline > 1)
