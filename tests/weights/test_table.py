"""Every rank's shards against the reference layouts; and what the families refuse."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from megarl.errors import ModelError
from megarl.types import Layout
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.hf_io import load_into
from megarl.weights.table import padded_vocab_size
from tests.weights import reference

LAYOUTS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_every_rank_loads_exactly_what_the_reference_holds(tmp_path: Path, model_type: str, tied: bool) -> None:
    c = reference.config(model_type=model_type, tie_word_embeddings=tied)
    hf = reference.save(c, tmp_path)
    for tp, pp in LAYOUTS:
        for tp_rank, pp_rank in itertools.product(range(tp), range(pp)):
            shards = model_family(c).shard(c, Layout(tensor=tp, pipeline=pp), tp_rank, pp_rank)
            params = {name: torch.full(shard.shape, -1.0) for name, shard in shards.items()}
            assert load_into(params, shards, tmp_path) == ()
            expected = reference.megatron(c, hf, tp, pp, tp_rank=tp_rank, pp_rank=pp_rank)
            assert params.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(params[name], value), (name, tp, pp, tp_rank, pp_rank)


def test_the_transformer_engine_spec_renames_the_norms_alone() -> None:
    c = reference.config()
    local, te = (model_family(c).shard(c, Layout(), 0, 0, spec=spec) for spec in ("local", "te"))
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
    last = model_family(c).shard(c, Layout(tensor=2, pipeline=pipeline), 1, pipeline - 1, head="value")["output_layer.weight"]
    assert (last.shape, last.replicated_over_tp, last.duplicate, last.optional) == ((1, 20), True, False, True)
    assert "output_layer.weight" in model_family(c).shard(c, Layout(pipeline=2), 0, 1)
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
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
def test_what_megatron_cannot_represent_is_refused_by_name(changes: dict, says: str) -> None:
    c = reference.config(**changes)
    with pytest.raises(ModelError, match=says):
        model_family(c).megatron_kwargs(c)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(tensor=8), "num_key_value_heads"),
        (Layout(pipeline=3), "num_hidden_layers"),
        (Layout(tensor=3), "num_attention_heads"),
        (Layout(virtual_pipeline=2), "virtual_pipeline"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_name(layout: Layout, says: str) -> None:
    c = reference.config()
    with pytest.raises(ModelError, match=says):
        model_family(c).shard(c, layout, 0, 0)


def test_config_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="config.json is missing"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json"):
        read_hf_config(tmp_path)
