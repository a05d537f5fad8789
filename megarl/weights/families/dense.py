"""What dense decoders with RMSNorm, rotary positions, grouped-query attention and a gated SiLU MLP share (Llama and its kin)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

MEGATRON = "decoder.layers.{layer}."
HF = "model.layers.{layer}."

_QKV_BIAS = Row(
    MEGATRON + "self_attention.linear_qkv.bias",
    tuple(HfTensor(f"{HF}self_attn.{x}_proj.bias", (dim,)) for x, dim in (("q", "q"), ("k", "kv"), ("v", "kv"))),
    qkv_by_group,
    tensor_axis=0,
)

# Norms of each head's query and key, one weight for all heads.
_QK_NORMS = tuple(
    Row(f"{MEGATRON}self_attention.{x}_layernorm.weight", (HfTensor(f"{HF}self_attn.{x}_norm.weight", ("head",)),), copy_op, None)
    for x in ("q", "k")
)

_ATTENTION = (
    Row(MEGATRON + "input_layernorm.weight", (HfTensor(HF + "input_layernorm.weight", ("hidden",)),), copy_op, None,
        te=MEGATRON + "self_attention.linear_qkv.layer_norm_weight"),
    Row(MEGATRON + "self_attention.linear_qkv.weight",
        tuple(HfTensor(f"{HF}self_attn.{x}_proj.weight", (dim, "hidden")) for x, dim in (("q", "q"), ("k", "kv"), ("v", "kv"))),
        qkv_by_group, tensor_axis=0),
    Row(MEGATRON + "self_attention.linear_proj.weight", (HfTensor(HF + "self_attn.o_proj.weight", ("hidden", "q")),), copy_op,
        tensor_axis=1),
)  # fmt: skip

_MLP = (
    Row(MEGATRON + "pre_mlp_layernorm.weight", (HfTensor(HF + "post_attention_layernorm.weight", ("hidden",)),), copy_op, None,
        te=MEGATRON + "mlp.linear_fc1.layer_norm_weight"),
    Row(MEGATRON + "mlp.linear_fc1.weight", tuple(HfTensor(f"{HF}mlp.{x}_proj.weight", ("ffn", "hidden")) for x in ("gate", "up")),
        gate_up, tensor_axis=0),
    Row(MEGATRON + "mlp.linear_fc2.weight", (HfTensor(HF + "mlp.down_proj.weight", ("hidden", "ffn")),), copy_op, tensor_axis=1),
)  # fmt: skip

_EMBEDDING = HfTensor("model.embed_tokens.weight", ("vocab", "hidden"))


def dense_family(model_type: str, *, qkv_bias: bool = False, qk_norm: bool = False) -> Family:
    """A family of this shape, perhaps with biases on query, key and value, or with norms of query and key."""
    return decoder_family(
        model_type,
        read_sizes,
        lambda hf_config: megatron_kwargs(read_sizes(hf_config), hf_config, qkv_bias=qkv_bias, qk_norm=qk_norm),
        (*attention_rows(qkv_bias=qkv_bias, qk_norm=qk_norm), *_MLP),
    )


def attention_rows(*, qkv_bias: bool, qk_norm: bool) -> tuple[Row, ...]:
    """Input norm and attention of one layer."""
    return (*_ATTENTION, *((_QKV_BIAS,) if qkv_bias else ()), *(_QK_NORMS if qk_norm else ()))


def decoder_family(
    model_type: str,
    sizes: Callable[[Mapping], ModelSizes],
    kwargs: Callable[[Mapping], dict[str, dict]],
    layer_rows: tuple[Row, ...],
) -> Family:
    """A family whose edges are Llama's: embedding, last norm, output layer tied or not."""
    return Family(
        model_type=model_type,
        sizes=sizes,
        megatron_kwargs=kwargs,
        layer_rows=layer_rows,
        embedding=Row("embedding.word_embeddings.weight", (_EMBEDDING,), pad_vocabulary, tensor_axis=0, place=FIRST),
        final_norm=Row("decoder.final_layernorm.weight", (HfTensor("model.norm.weight", ("hidden",)),), copy_op, None, place=LAST),
        output=Row("output_layer.weight", (HfTensor("lm_head.weight", ("vocab", "hidden")),), pad_vocabulary, tensor_axis=0, place=LAST),
        tied_output=Row("output_layer.weight", (_EMBEDDING,), pad_vocabulary, tensor_axis=0, place=LAST, duplicate=True),
        # The name and shape of the head of transformers' ...ForSequenceClassification with one label.
        value_head=Row("output_layer.weight", (HfTensor("score.weight", ("one", "hidden")),), copy_op, None, place=LAST, optional=True),
    )


def read_sizes(hf_config: Mapping) -> ModelSizes:
    """Lengths of a dense model. Raises ModelError naming a key that Megatron can't represent."""
    _refuse_unrepresentable(hf_config)
    heads = size_of(hf_config, "num_attention_heads")
    hidden = size_of(hf_config, "hidden_size")
    groups = heads if hf_config.get("num_key_value_heads") is None else size_of(hf_config, "num_key_value_heads")
    if heads % groups:
        raise cannot("num_key_value_heads", groups, f"a divisor of num_attention_heads = {heads}")
    if hf_config.get("head_dim") is None and hidden % heads:
        raise cannot("hidden_size", hidden, f"a multiple of num_attention_heads = {heads}, or a head_dim")
    return ModelSizes(
        layers=size_of(hf_config, "num_hidden_layers"),
        hidden=hidden,
        ffn=size_of(hf_config, "intermediate_size"),
        heads=heads,
        query_groups=groups,
        head_dim=hidden // heads if hf_config.get("head_dim") is None else size_of(hf_config, "head_dim"),
        vocab=size_of(hf_config, "vocab_size"),
        tied=bool(hf_config.get("tie_word_embeddings", False)),
    )


def megatron_kwargs(sizes: ModelSizes, hf_config: Mapping, *, qkv_bias: bool, qk_norm: bool) -> dict[str, dict]:
    """Arguments of megatron-core's TransformerConfig and GPTModel."""
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
        "qk_layernorm": qk_norm,
        "add_bias_linear": False,
    }
    model = {
        "vocab_size": sizes.vocab,
        "max_sequence_length": size_of(hf_config, "max_position_embeddings"),
        "position_embedding_type": "rope",
        "rotary_base": _rope_theta(hf_config),
        "rotary_percent": 1.0,
        "share_embeddings_and_output_weights": sizes.tied,
    }
    return {"transformer": transformer, "model": model}


def _refuse_unrepresentable(hf_config: Mapping) -> None:
    """Each refusal is a feature that would change the forward pass without an error if it were ignored."""
    if hf_config.get("hidden_act", "silu") != "silu":
        raise cannot("hidden_act", hf_config["hidden_act"], "silu")
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf_config.get(key)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or any(isinstance(value, Mapping) for value in rope.values()):
            raise cannot(key, rope, "rope_type default, one for all layers")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise cannot(f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
    if hf_config.get("use_sliding_window", False):
        raise cannot("use_sliding_window", True, "false")
    if any(kind != "full_attention" for kind in hf_config.get("layer_types") or ()):
        raise cannot("layer_types", sorted(set(hf_config["layer_types"])), "full_attention in every layer")
    for key in ("attention_bias", "mlp_bias"):
        if hf_config.get(key, False):
            raise cannot(key, True, "false")
    if hf_config.get("quantization_config") is not None:
        raise cannot("quantization_config", hf_config["quantization_config"], "unquantized weights")


def _rope_theta(hf_config: Mapping) -> float:
    """transformers 5 keeps the base under ``rope_parameters``, 4 beside the other keys; 10000 where neither names it (its own default)."""
    rope = hf_config.get("rope_parameters") or {}
    return float(rope.get("rope_theta", hf_config.get("rope_theta", 10000.0)))


def size_of(hf_config: Mapping, key: str) -> int:
    """A positive integer of ``config.json``."""
    value = hf_config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise cannot(key, value, "a positive integer")
    return value


def _number(hf_config: Mapping, key: str) -> float:
    value = hf_config.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise cannot(key, value, "a number")
    return float(value)


def cannot(key: str, got: Any, expected: str) -> ModelError:
    """The error of a key that Megatron can't represent."""
    return ModelError(
        explain(
            f"`{key}` of this model can't be represented",
            where="config.json",
            got=repr(got),
            expected=expected,
            do="use a model without it",
        )
    )
