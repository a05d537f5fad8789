"""What decoders with RMSNorm, rotary positions, grouped-query attention and a gated MLP share (Llama and its kin)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from megarl.weights.architecture import Architecture
from megarl.weights.families.read import (
    bool_of,
    cannot,
    check_rope,
    check_taken,
    layers_of,
    may_be_null,
    number_of,
    refuse,
    refuse_quantized,
    rope_of,
    size_of,
    with_defaults,
)
from megarl.weights.ops import Op, copy_op, gate_up, pad_vocabulary, qkv_by_group
from megarl.weights.sizes import ModelSizes
from megarl.weights.table import FIRST, LAST, Family, HfTensor, Row, Table

MEGATRON = "decoder.layers.{layer}."
HF = "model.layers.{layer}."
BIASES = ("attention_bias", "attention_out_bias", "mlp_bias")  # flags of config.json
ROTARY_BUFFERS = (r".*rotary_emb\.inv_freq", "rotary frequencies, which follow from config.json")


@dataclass(frozen=True)
class Biases:
    """Which linear layers have one."""

    qkv: bool = False
    projection: bool = False  # of the attention's output
    mlp: bool = False


def norm_row(megatron: str, hf: str, *, te: str | None = None, dim: str = "hidden", kind: str = "weight") -> Row:
    """One tensor of a norm in each layer."""
    fused = None if te is None else f"{MEGATRON}{te}_{kind}"
    return Row(f"{MEGATRON}{megatron}.{kind}", (HfTensor(f"{HF}{hf}.{kind}", (dim,)),), copy_op, None, te=fused)


def linear_row(megatron: str, hf: tuple[str, ...], rows: tuple[str, ...], columns: str, op: Op = copy_op, *, axis: int = 0) -> Row:
    """The weight of a linear layer that is made of the weights ``hf``; cut along its rows (``axis`` 0) or columns (1)."""
    tensors = tuple(HfTensor(f"{HF}{name}.weight", (length, columns)) for name, length in zip(hf, rows, strict=True))
    return Row(f"{MEGATRON}{megatron}.weight", tensors, op, tensor_axis=axis)


def bias_row(megatron: str, hf: tuple[str, ...], rows: tuple[str, ...], op: Op = copy_op, *, axis: int | None = 0) -> Row:
    """Its bias. One that is added after the sum over ranks is whole on each (``axis`` None)."""
    tensors = tuple(HfTensor(f"{HF}{name}.bias", (length,)) for name, length in zip(hf, rows, strict=True))
    return Row(f"{MEGATRON}{megatron}.bias", tensors, op, tensor_axis=axis)


INPUT_NORM = norm_row("input_layernorm", "input_layernorm", te="self_attention.linear_qkv.layer_norm")
MLP_NORM = norm_row("pre_mlp_layernorm", "post_attention_layernorm", te="mlp.linear_fc1.layer_norm")
_QKV = tuple(f"self_attn.{x}_proj" for x in "qkv")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def attention_rows(biases: Biases, *, qk_norm: bool) -> tuple[Row, ...]:
    """Attention of one layer, without the norm before it."""
    rows = [
        linear_row("self_attention.linear_qkv", _QKV, ("q", "kv", "kv"), "hidden", qkv_by_group),
        linear_row("self_attention.linear_proj", ("self_attn.o_proj",), ("hidden",), "q", axis=1),
    ]
    if biases.qkv:
        rows.append(bias_row("self_attention.linear_qkv", _QKV, ("q", "kv", "kv"), qkv_by_group))
    if biases.projection:
        rows.append(bias_row("self_attention.linear_proj", ("self_attn.o_proj",), ("hidden",), axis=None))
    if qk_norm:  # of each head's query and key, one weight for all heads
        rows += [norm_row(f"self_attention.{x}_layernorm", f"self_attn.{x}_norm", dim="head") for x in "qk"]
    return tuple(rows)


def mlp_rows(biases: Biases) -> tuple[Row, ...]:
    """A gated MLP, without the norm before it."""
    rows = [
        linear_row("mlp.linear_fc1", _GATE_UP, ("ffn", "ffn"), "hidden", gate_up),
        linear_row("mlp.linear_fc2", ("mlp.down_proj",), ("hidden",), "ffn", axis=1),
    ]
    if biases.mlp:
        rows.append(bias_row("mlp.linear_fc1", _GATE_UP, ("ffn", "ffn"), gate_up))
        rows.append(bias_row("mlp.linear_fc2", ("mlp.down_proj",), ("hidden",), axis=None))
    return tuple(rows)


_EMBEDDING = HfTensor("model.embed_tokens.weight", ("vocab", "hidden"))


def decoder_table(sizes: ModelSizes, layers: tuple[tuple[Row, ...], ...]) -> Table:
    """A table whose edges are Llama's: embedding, last norm, output layer tied or not."""
    return Table(
        sizes=sizes,
        layers=layers,
        embedding=Row("embedding.word_embeddings.weight", (_EMBEDDING,), pad_vocabulary, tensor_axis=0, place=FIRST),
        final_norm=(Row("decoder.final_layernorm.weight", (HfTensor("model.norm.weight", ("hidden",)),), copy_op, None, place=LAST),),
        output=Row("output_layer.weight", (HfTensor("lm_head.weight", ("vocab", "hidden")),), pad_vocabulary, tensor_axis=0, place=LAST),
        tied_output=Row("output_layer.weight", (_EMBEDDING,), pad_vocabulary, tensor_axis=0, place=LAST, duplicate=True),
        value_head=VALUE_HEAD,
    )


# The name and shape of the head of transformers' ...ForSequenceClassification with one label.
VALUE_HEAD = Row("output_layer.weight", (HfTensor("score.weight", ("one", "hidden")),), copy_op, None, place=LAST, optional=True)


def dense_family(
    model_type: str,
    *,
    biases: Callable[[Mapping], Biases] = lambda hf_config: Biases(),
    qk_norm: bool = False,
    windows: Callable[[Mapping], tuple[int | None, ...]] = lambda hf_config: (),
) -> Family:
    """A family of Llama's shape, perhaps with biases, with norms of query and key, or with layers that see a window alone.

    ``biases`` is given a configuration without missing keys whose flags are flags.
    """

    def read_biases(hf_config: Mapping) -> Biases:
        full = with_defaults(hf_config)
        for key in BIASES:
            bool_of(full, key, False)
        return biases(full)

    def table(hf_config: Mapping) -> Table:
        sizes, has = read_sizes(hf_config), read_biases(hf_config)
        layer = (INPUT_NORM, *attention_rows(has, qk_norm=qk_norm), MLP_NORM, *mlp_rows(has))
        return decoder_table(sizes, (layer,) * sizes.layers)

    def kwargs(hf_config: Mapping) -> dict[str, dict[str, Any]]:
        check_rope(hf_config)
        return megatron_kwargs(read_sizes(hf_config), hf_config, biases=read_biases(hf_config), qk_norm=qk_norm)

    return Family(
        model_type,
        table,
        kwargs,
        lambda hf_config: Architecture(windows=windows(hf_config)),
        unused=lambda hf_config: (ROTARY_BUFFERS, *tied_head(hf_config)),
    )


def tied_head(hf_config: Mapping) -> tuple[tuple[str, str], ...]:
    """What is unused where the output layer is the embedding."""
    return ((r"lm_head\.weight", "tied: it is the embedding"),) if bool_of(with_defaults(hf_config), "tie_word_embeddings") else ()


def read_sizes(hf_config: Mapping, **more: int) -> ModelSizes:
    """Lengths of a model. Raises ModelError naming a key that is no length, or weights that are stored quantized."""
    refuse_quantized(hf_config)
    hf_config = with_defaults(hf_config)
    heads, hidden = size_of(hf_config, "num_attention_heads"), size_of(hf_config, "hidden_size")
    groups = heads if _is_left_open(hf_config, "num_key_value_heads") else size_of(hf_config, "num_key_value_heads")
    if heads % groups:
        raise cannot("num_key_value_heads", groups, f"a divisor of num_attention_heads = {heads}")
    if not (follows := _is_left_open(hf_config, "head_dim")):
        head_dim = size_of(hf_config, "head_dim")
    elif hidden % heads:
        raise cannot("hidden_size", hidden, f"a multiple of num_attention_heads = {heads}, or a head_dim")
    return ModelSizes(
        layers=layers_of(hf_config),
        hidden=hidden,
        ffn=size_of(hf_config, "intermediate_size"),
        heads=heads,
        query_groups=groups,
        head_dim=hidden // heads if follows else head_dim,
        vocab=size_of(hf_config, "vocab_size"),
        tied=bool_of(hf_config, "tie_word_embeddings"),
        more=more,
    )


def _is_left_open(hf_config: Mapping, key: str) -> bool:
    """Whether a length follows from others: the key is missing and its class has no number for it, or null where it may be."""
    return hf_config.get(key) is None and (key not in hf_config or may_be_null(hf_config, key))


def megatron_kwargs(sizes: ModelSizes, hf_config: Mapping, *, biases: Biases = Biases(), qk_norm: bool = False) -> dict[str, dict]:
    """Arguments of megatron-core's TransformerConfig and GPTModel."""
    hf_config = with_defaults(hf_config)
    refuse(hf_config, hidden_act="silu")
    _check_biases(biases, hf_config)
    check_taken(hf_config)
    transformer = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "ffn_hidden_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.query_groups,
        "kv_channels": sizes.head_dim,
        "layernorm_epsilon": number_of(hf_config, "rms_norm_eps", above=0),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_qkv_bias": biases.qkv,
        "qk_layernorm": qk_norm,
        "add_bias_linear": biases.mlp,
    }
    model = {
        "vocab_size": sizes.vocab,
        "max_sequence_length": size_of(hf_config, "max_position_embeddings"),
        "position_embedding_type": "rope",
        "rotary_base": number_of(rope_of(hf_config), "rope_theta", above=1),
        "rotary_percent": 1.0,
        "share_embeddings_and_output_weights": sizes.tied,
    }
    return {"transformer": transformer, "model": model}


def _check_biases(biases: Biases, hf_config: Mapping) -> None:
    """megatron-core has biases of attention's output and of the MLP, or neither, and with them those of query, key and value.

    Raises ModelError naming the key that asks for another choice.
    """
    if biases.mlp and not biases.projection:
        raise cannot("mlp_bias", True, "false, or a bias of attention's output too: megatron-core has both or neither")
    if biases.projection and not biases.mlp:
        key = "attention_out_bias" if hf_config.get("attention_out_bias") else "attention_bias"
        raise cannot(key, True, "false, or a bias of the MLP too, where the family has one: megatron-core has both or neither")
    if biases.mlp and not biases.qkv:
        raise cannot("attention_bias", False, "true, as mlp_bias: megatron-core has biases of all linear layers then")
