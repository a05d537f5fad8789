"""Engines of several layouts load a converted checkpoint, bit for bit as they load the Hugging Face directory itself.

And the other way: what a run saved, of any layout, becomes a Hugging Face directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.convert.inspect import inspect
from megarl.convert.targets import plan_model
from megarl.convert.to_hf import to_hf
from megarl.convert.to_megatron import to_megatron
from megarl.convert.verify import verify
from megarl.megatron.checkpoint import load_engine, save_engine
from megarl.megatron.engine import Engine
from megarl.megatron.model import Role
from megarl.megatron.optimizer import OptimizerSettings
from megarl.types import Layout, Rank
from megarl.weights.families import read_hf_config
from tests.convert.directories import assert_same_tensors, config, tensors
from tests.megatron.ranks import run_ranks
from tests.weights.families import save_model

DENSE = {
    "one": Layout(),
    "tp2 pp2": Layout(tensor=2, pipeline=2),
    "pp2 vpp2": Layout(pipeline=2, virtual_pipeline=2),
    "tp4": Layout(tensor=4),  # a rank has a part of a key/value head; another padded vocabulary
}
MIXTURE = {
    "one": Layout(),
    "ep2 pp2": Layout(expert=2, data=2, pipeline=2),
    "tp2 ep2 etp1": Layout(tensor=2, expert=2, expert_tensor=1, sequence_parallel=True),
    "etp2 ep3": Layout(tensor=2, data=3, expert=3, expert_tensor=2, sequence_parallel=True),
}
FAST = {("qwen2", "tp2 pp2"), ("qwen3_moe", "ep2 pp2"), ("deepseek_v3", "tp2 ep2 etp1"), ("gpt_neox", "tp2 pp2"), ("gemma2", "pp2 vpp2")}
FAMILIES = {
    "llama biases": DENSE, "qwen2": DENSE, "phi3": DENSE, "gpt_neox": DENSE, "gemma2": DENSE, "gemma3": DENSE,
    "qwen3_moe": MIXTURE, "mixtral": MIXTURE, "deepseek_v2": MIXTURE, "deepseek_v3": MIXTURE,
}  # fmt: skip
CASES = [
    pytest.param(family, layout, id=f"{family}-{name}", marks=() if (family, name) in FAST else pytest.mark.slow)
    for family, layouts in FAMILIES.items()
    for name, layout in layouts.items()
]


def held(engine: Engine) -> dict[str, torch.Tensor]:
    """All that the engine has of the model: parameters, and the router's bias, which is none."""
    chunks = engine.chunks
    found = {f"{i}.{name}": tensor for i, chunk in enumerate(chunks) for name, tensor in chunk.state_dict().items() if tensor is not None}
    return {name: tensor for name, tensor in found.items() if torch.is_tensor(tensor) and "_extra_state" not in name}


def compare(rank: Rank, hf_dir: Path, checkpoint: Path, head: str, dtype: str) -> int:
    """Load both ways; how many tensors there are."""
    read, loaded = (Engine(read_hf_config(hf_dir), rank, Role(head, trainable=False, dtype=dtype)) for _ in range(2))
    for tensor in held(loaded).values():
        tensor.fill_(-777.0)
    read.load_hf(hf_dir)
    load_engine(loaded, checkpoint)
    expected, found = held(read), held(loaded)
    assert expected.keys() == found.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    assert not different, different
    return len(expected)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_engines_load_a_converted_checkpoint(family: str, layout: Layout, tmp_path: Path) -> None:
    source = save_model(family, tmp_path / "hf")
    to_megatron(source, tmp_path / "megatron", file_bytes=50_000, quiet=True)
    assert all(count > 5 for count in run_ranks(layout, compare, source, tmp_path / "megatron", "lm", "float32"))


def test_a_bfloat16_checkpoint_loads_into_float32_and_back(tmp_path: Path) -> None:
    source = save_model("qwen3", tmp_path / "hf", dtype=torch.bfloat16)
    to_megatron(source, tmp_path / "megatron", quiet=True)
    for dtype in ("float32", "bfloat16"):
        run_ranks(Layout(), compare, source, tmp_path / "megatron", "lm", dtype)


def keys_and_shapes(rank: Rank, hf_config: dict[str, Any], head: str) -> dict[str, tuple[int, ...]]:
    """What megatron-core asks for: every key of the engine's own sharded state, and the shape of the tensor behind it."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories

    from megarl.megatron.checkpoint import _sharded_state

    state = _sharded_state(Engine(hf_config, rank, Role(head, trainable=False)), loading=False)
    apply_factories(state)
    found: dict[str, tuple[int, ...]] = {}

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                collect(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                collect(inner)
        else:
            assert isinstance(value, ShardedTensor) and not isinstance(value, ShardedTensorFactory), type(value)
            found[value.key] = tuple(value.global_shape)

    collect(state)
    return found


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("family", ["llama biases", "gpt_neox", "gemma3", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_keys_and_shapes_are_those_that_megatron_asks_for(family: str, head: str, tmp_path: Path) -> None:
    """Of both versions, over two stages: no key too few, none too many."""
    settings = read_hf_config(save_model(family, tmp_path / "hf"))
    asked: dict[str, tuple[int, ...]] = {}
    for found in run_ranks(Layout(pipeline=2), keys_and_shapes, settings, head):
        asked |= found
    assert {target.place.key: target.global_shape for target in plan_model(settings, head).targets} == asked


def saved(rank: Rank, hf_dir: Path, target: Path, head: str, trained: bool) -> None:
    engine = Engine(read_hf_config(hf_dir), rank, Role(head, trained), OptimizerSettings(lr=1e-3, distributed=True) if trained else None)
    engine.load_hf(hf_dir)
    if trained:
        engine.enable_training()
    save_engine(engine, target)


@pytest.mark.parametrize(
    ("family", "layout", "trained"),
    [
        pytest.param("qwen2", Layout(tensor=4), False, id="qwen2 tp4"),
        pytest.param("qwen2", Layout(pipeline=2, virtual_pipeline=2, data=2), True, id="qwen2 trained", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", Layout(tensor=2, expert=2, data=2, sequence_parallel=True), False, id="qwen3_moe tp2 ep2"),
        pytest.param("qwen3_moe", Layout(data=2), True, id="qwen3_moe trained", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", Layout(pipeline=2, tensor=2, sequence_parallel=True), False, id="deepseek", marks=pytest.mark.slow),
    ],
)
def test_what_a_run_saved_becomes_a_hugging_face_directory(family: str, layout: Layout, trained: bool, tmp_path: Path) -> None:
    source = save_model(family, tmp_path / "hf")
    actor = tmp_path / "step_3" / "actor"
    actor.mkdir(parents=True)
    run_ranks(layout, saved, source, actor, "lm", trained)
    (source / "tokenizer.json").write_text("{}")
    to_hf(actor, tmp_path / "back", tokenizer=source, quiet=True)
    assert_same_tensors(tensors(source), tensors(tmp_path / "back"))
    assert config(tmp_path / "back") == config(source)
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    assert verify(tmp_path / "back", actor, quiet=True) == sum(t.numel() for t in tensors(source).values())
    found = inspect(actor)
    assert not found.missing and found.parameters == sum(t.numel() for t in tensors(source).values())
    assert (found.optimizer_bytes > 0) is trained


def value_head(rank: Rank, hf_dir: Path, target: Path) -> torch.Tensor:
    engine = Engine(read_hf_config(hf_dir), rank, Role("value", trainable=False, dtype="bfloat16"))
    engine.load_hf(hf_dir)
    head = next(p for name, p in engine.named_parameters().items() if name == "output_layer.weight")
    head.data.copy_(torch.arange(head.numel()).view(head.shape))
    save_engine(engine, target)
    return head.detach().float()


def test_a_critic_of_a_run_becomes_a_classifier_of_one_label(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    source = save_model("qwen2", tmp_path / "hf")
    (tmp_path / "critic").mkdir()
    (expected,) = run_ranks(Layout(), value_head, source, tmp_path / "critic")
    (source / "tokenizer.json").write_text("{}")
    to_hf(tmp_path / "critic", tmp_path / "back", tokenizer=source, quiet=True)
    assert config(tmp_path / "back")["architectures"] == ["Qwen2ForSequenceClassification"]
    assert config(tmp_path / "back")["dtype"] == "bfloat16"
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "back")
    assert torch.equal(model.score.weight.float(), expected)
