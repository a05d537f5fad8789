"""What dense decoders with RMSNorm, rotary positions, grouped-query attention and a gated SiLU MLP share (Llama and its kin)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from megarl.errors import ModelError, explain
from megarl.weights.table import (
    FIRST,
    LAST,
    Family,
    HfTensor,
    ModelSizes,
    Row,
    copy_op,
    gate_up,
    pad_vocabulary,
    qkv_by_group,
)

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

_QKV_BIAS = Row(
    _MEGATRON + "self_attention.linear_qkv.bias",
    tuple(HfTensor(f"{_HF}self_attn.{x}_proj.bias", (dim,)) for x, dim in (("q", "q"), ("k", "kv"), ("v", "kv"))),
    qkv_by_group,
    tensor_axis=0,
)

_LAYER_ROWS = (
    Row(_MEGATRON + "input_layernorm.weight", (HfTensor(_HF + "input_layernorm.weight", ("hidden",)),), copy_op, None,
        te=_MEGATRON + "self_attention.linear_qkv.layer_norm_weight"),
    Row(_MEGATRON + "self_attention.linear_qkv.weight",
        tuple(HfTensor(f"{_HF}self_attn.{x}_proj.weight", (dim, "hidden")) for x, dim in (("q", "q"), ("k", "kv"), ("v", "kv"))),
        qkv_by_group, tensor_axis=0),
    Row(_MEGATRON + "self_attention.linear_proj.weight", (HfTensor(_HF + "self_attn.o_proj.weight", ("hidden", "q")),), copy_op,
        tensor_axis=1),
    Row(_MEGATRON + "pre_mlp_layernorm.weight", (HfTensor(_HF + "post_attention_layernorm.weight", ("hidden",)),), copy_op, None,
        te=_MEGATRON + "mlp.linear_fc1.layer_norm_weight"),
    Row(_MEGATRON + "mlp.linear_fc1.weight", tuple(HfTensor(f"{_HF}mlp.{x}_proj.weight", ("ffn", "hidden")) for x in ("gate", "up")),
        gate_up, tensor_axis=0),
    Row(_MEGATRON + "mlp.linear_fc2.weight", (HfTensor(_HF + "mlp.down_proj.weight", ("hidden", "ffn")),), copy_op, tensor_axis=1),
)  # fmt: skip

_EMBEDDING = HfTensor("model.embed_tokens.weight", ("vocab", "hidden"))


def dense_family(model_type: str, *, qkv_bias: bool) -> Family:
    """A family of this shape; Qwen2 has biases on query, key and value, Llama has none."""
    return Family(
        model_type=model_type,
        sizes=_read_sizes,
        megatron_kwargs=lambda hf_config: _megatron_kwargs(hf_config, qkv_bias),
        layer_rows=(*_LAYER_ROWS, _QKV_BIAS) if qkv_bias else _LAYER_ROWS,
        embedding=Row("embedding.word_embeddings.weight", (_EMBEDDING,), pad_vocabulary, tensor_axis=0, place=FIRST),
        final_norm=Row("decoder.final_layernorm.weight", (HfTensor("model.norm.weight", ("hidden",)),), copy_op, None, place=LAST),
        output=Row("output_layer.weight", (HfTensor("lm_head.weight", ("vocab", "hidden")),), pad_vocabulary, tensor_axis=0, place=LAST),
        tied_output=Row("output_layer.weight", (_EMBEDDING,), pad_vocabulary, tensor_axis=0, place=LAST, duplicate=True),
        # The name and shape of the head of transformers' ...ForSequenceClassification with one label.
        value_head=Row("output_layer.weight", (HfTensor("score.weight", ("one", "hidden")),), copy_op, None, place=LAST, optional=True),
    )


def _read_sizes(hf_config: Mapping) -> ModelSizes:
    _refuse_unrepresentable(hf_config)
    heads = _size(hf_config, "num_attention_heads")
    hidden = _size(hf_config, "hidden_size")
    groups = heads if hf_config.get("num_key_value_heads") is None else _size(hf_config, "num_key_value_heads")
    if heads % groups:
        raise _cannot("num_key_value_heads", groups, f"a divisor of num_attention_heads = {heads}")
    if hf_config.get("head_dim") is None and hidden % heads:
        raise _cannot("hidden_size", hidden, f"a multiple of num_attention_heads = {heads}, or a head_dim")
    return ModelSizes(
        layers=_size(hf_config, "num_hidden_layers"),
        hidden=hidden,
        ffn=_size(hf_config, "intermediate_size"),
        heads=heads,
        query_groups=groups,
        head_dim=hidden // heads if hf_config.get("head_dim") is None else _size(hf_config, "head_dim"),
        vocab=_size(hf_config, "vocab_size"),
        tied=bool(hf_config.get("tie_word_embeddings", False)),
    )


def _megatron_kwargs(hf_config: Mapping, qkv_bias: bool) -> dict[str, dict]:
    sizes = _read_sizes(hf_config)
    transformer = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "ffn_hidden_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.query_groups,
        "kv_channels": sizes.head_dim,
        "layernorm_epsilon": _number(hf_config, "rms_norm_eps"),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_qkv_bias": qkv_bias,
        "add_bias_linear": False,
    }
    model = {
        "vocab_size": sizes.vocab,
        "max_sequence_length": _size(hf_config, "max_position_embeddings"),
        "position_embedding_type": "rope",
        "rotary_base": _rope_theta(hf_config),
        "rotary_percent": 1.0,
        "share_embeddings_and_output_weights": sizes.tied,
    }
    return {"transformer": transformer, "model": model}


def _refuse_unrepresentable(hf_config: Mapping) -> None:
    """Each refusal is a feature that would change the forward pass without an error if it were ignored."""
    if hf_config.get("hidden_act", "silu") != "silu":
        raise _cannot("hidden_act", hf_config["hidden_act"], "silu")
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf_config.get(key)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or any(isinstance(value, Mapping) for value in rope.values()):
            raise _cannot(key, rope, "rope_type default, one for all layers")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise _cannot(f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
    if hf_config.get("use_sliding_window", False):
        raise _cannot("use_sliding_window", True, "false")
    if any(kind != "full_attention" for kind in hf_config.get("layer_types") or ()):
        raise _cannot("layer_types", sorted(set(hf_config["layer_types"])), "full_attention in every layer")
    for key in ("attention_bias", "mlp_bias"):
        if hf_config.get(key, False):
            raise _cannot(key, True, "false")
    if hf_config.get("quantization_config") is not None:
        raise _cannot("quantization_config", hf_config["quantization_config"], "unquantized weights")


def _rope_theta(hf_config: Mapping) -> float:
    """transformers 5 keeps the base under ``rope_parameters``, 4 beside the other keys; 10000 where neither names it (its own default)."""
    rope = hf_config.get("rope_parameters") or {}
    return float(rope.get("rope_theta", hf_config.get("rope_theta", 10000.0)))


def _size(hf_config: Mapping, key: str) -> int:
    value = hf_config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _cannot(key, value, "a positive integer")
    return value


def _number(hf_config: Mapping, key: str) -> float:
    value = hf_config.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _cannot(key, value, "a number")
    return float(value)


def _cannot(key: str, got: Any, expected: str) -> ModelError:
    return ModelError(
        explain(
            f"`{key}` of this model can't be represented",
            where="config.json",
            got=repr(got),
            expected=expected,
            do="use a model without it",
        )
    )
