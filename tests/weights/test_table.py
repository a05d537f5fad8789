"""Every rank's shards against the reference layouts; and what the families refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.errors import ModelError
from megarl.types import Layout, Rank
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.hf_io import load_into
from megarl.weights.sizes import padded_vocab_size
from tests.weights import reference

LAYOUTS = [Layout(tensor=tp, pipeline=pp) for tp in (1, 2, 4) for pp in (1, 2)] + [
    Layout(pipeline=2, virtual_pipeline=2),
    Layout(tensor=2, pipeline=2, virtual_pipeline=2),
    Layout(context=2, data=2),
]
MOE_LAYOUTS = [
    Layout(pipeline=2, virtual_pipeline=2, expert=2, data=2),
    Layout(tensor=2, data=3, expert=3, sequence_parallel=True),
    Layout(tensor=2, data=3, expert=3, expert_tensor=2, sequence_parallel=True),
    Layout(tensor=4, expert=2, expert_tensor=2, sequence_parallel=True),
]
KINDS = {"qwen2": ({}, LAYOUTS), "llama": ({}, LAYOUTS), "qwen3": ({}, LAYOUTS), "qwen3_moe": (reference.MOE, MOE_LAYOUTS)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", KINDS)
def test_every_rank_loads_exactly_what_the_reference_holds(tmp_path: Path, model_type: str, tied: bool) -> None:
    changes, layouts = KINDS[model_type]
    c = reference.config(**{"model_type": model_type, "tie_word_embeddings": tied} | changes)
    hf = reference.save(c, tmp_path)
    assert model_family(c).hf_tensors(c) == {name: tuple(tensor.shape) for name, tensor in hf.items()}
    for rank in (Rank(index, layout) for layout in layouts for index in range(layout.world_size)):
        shards = model_family(c).shard(c, rank)
        params = {name: torch.full(shard.shape, -1.0) for name, shard in shards.items()}
        assert load_into(params, shards, tmp_path) == ()
        expected = reference.megatron(c, hf, rank)
        assert params.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(params[name], value), (name, rank)


def test_names_of_experts_under_transformer_engine_are_those_of_its_grouped_linear_layers() -> None:
    c = reference.config(**reference.MOE)
    names = model_family(c).shard(c, Rank(1, Layout(expert=2, data=2)), spec="te")
    assert "decoder.layers.3.mlp.experts.linear_fc1.weight2" in names
    assert "decoder.layers.3.pre_mlp_layernorm.weight" in names


def test_the_transformer_engine_spec_renames_the_norms_alone() -> None:
    c = reference.config()
    local, te = (model_family(c).shard(c, Rank(0, Layout()), spec=spec) for spec in ("local", "te"))
    assert te.keys() - local.keys() == {
        f"decoder.layers.{i}.{name}"
        for i in range(4)
        for name in ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    }
    assert local.keys() - te.keys() == {
        f"decoder.layers.{i}.{name}.weight" for i in range(4) for name in ("input_layernorm", "pre_mlp_layernorm")
    }
    sources = [{c.source for s in shards.values() for c in s.copies} for shards in (local, te)]
    assert sources[0] == sources[1]


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_value_head_is_one_replicated_row_and_no_vocabulary_output(pipeline: int) -> None:
    c = reference.config(tie_word_embeddings=True)
    layout = Layout(tensor=2, pipeline=pipeline)
    last = model_family(c).shard(c, Rank(layout.world_size - 1, layout), head="value")["output_layer.weight"]
    assert (last.shape, last.replicated_over_tp, last.duplicate, last.optional) == ((1, 20), True, False, True)
    assert "output_layer.weight" in model_family(c).shard(c, Rank(1, Layout(pipeline=2)))
    assert list(model_family(c).hf_tensors(c, head="value"))[-1] == "score.weight"


def test_padding_is_the_least_multiple_of_sixteen_rows_a_rank() -> None:
    assert [padded_vocab_size(61, t) for t in (1, 2, 4)] == [64, 64, 64]
    assert [padded_vocab_size(65, t) for t in (1, 2, 8)] == [80, 96, 128]
    assert padded_vocab_size(151936, 8) == 151936


def test_megatron_kwargs_carry_the_model() -> None:
    kwargs = model_family(reference.config()).megatron_kwargs(reference.config())
    assert kwargs["transformer"]["num_query_groups"] == 4
    assert kwargs["transformer"]["kv_channels"] == 3
    assert kwargs["transformer"]["add_qkv_bias"] is True
    assert kwargs["model"]["rotary_base"] == 5000.0
    old_style = reference.config(model_type="llama", rope_parameters=None, rope_theta=700.0)
    assert model_family(old_style).megatron_kwargs(old_style)["model"]["rotary_base"] == 700.0
    assert model_family(old_style).megatron_kwargs(old_style)["transformer"]["add_qkv_bias"] is False


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "gemma3", "vision_config": {}}, "vision_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ({"use_sliding_window": True, "layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        (reference.MOE | {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (reference.MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (reference.MOE | {"num_experts_per_tok": 7}, "num_experts_per_tok"),
    ],
)
def test_what_megatron_cannot_represent_is_refused_by_name(changes: dict, says: str) -> None:
    c = reference.config(**changes)
    with pytest.raises(ModelError, match=says):
        family = model_family(c)
        family.megatron_kwargs(c)
        family.architecture(c)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(pipeline=5), "num_hidden_layers"),
        (Layout(tensor=3), "num_attention_heads"),
        (Layout(pipeline=2, virtual_pipeline=3), "num_hidden_layers"),
        (Layout(expert=2, data=2), "without experts"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_name(layout: Layout, says: str) -> None:
    c = reference.config()
    with pytest.raises(ModelError, match=says):
        model_family(c).shard(c, Rank(0, layout))


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(expert=4, data=4), "num_experts"),
        (Layout(tensor=2), "sequence_parallel"),
        (Layout(expert_tensor=5, data=5), "intermediate"),
    ],
)
def test_a_layout_that_does_not_fit_the_experts_is_refused_by_name(layout: Layout, says: str) -> None:
    c = reference.config(**reference.MOE)
    with pytest.raises(ModelError, match=says):
        model_family(c).shard(c, Rank(0, layout))


def test_config_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="config.json is missing"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json"):
        read_hf_config(tmp_path)
