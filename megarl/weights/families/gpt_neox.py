"""GPT-NeoX (arXiv:2204.06745) and Pythia: LayerNorms and biases everywhere, an ungated MLP beside the attention, not behind it."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F

from megarl.weights.architecture import PARALLEL, SEQUENTIAL, Architecture
from megarl.weights.families.dense import VALUE_HEAD
from megarl.weights.families.read import (
    ROPE_TYPES,
    bool_of,
    cannot,
    check_original,
    check_rope_set,
    check_taken,
    layers_of,
    number_of,
    refuse,
    refuse_quantized,
    rope_of,
    size_of,
    turned_part,
    with_defaults,
)
from megarl.weights.ops import copy_op, pad_vocabulary
from megarl.weights.sizes import ModelSizes
from megarl.weights.table import FIRST, LAST, Family, HfTensor, Row, Table

_MEGATRON = "decoder.layers.{layer}."
_HF = "gpt_neox.layers.{layer}."
_EMBEDDING = HfTensor("gpt_neox.embed_in.weight", ("vocab", "hidden"))


def _norms(megatron: str, hf: str, te: str) -> tuple[Row, ...]:
    return tuple(
        Row(f"{_MEGATRON}{megatron}.{x}", (HfTensor(f"{_HF}{hf}.{x}", ("hidden",)),), copy_op, None, te=f"{_MEGATRON}{te}.layer_norm_{x}")
        for x in ("weight", "bias")
    )


def _by_rows(megatron: str, hf: str, rows: str, columns: str) -> tuple[Row, ...]:
    """A linear layer that is cut along its rows, and its bias with it."""
    return (
        Row(f"{_MEGATRON}{megatron}.weight", (HfTensor(f"{_HF}{hf}.weight", (rows, columns)),), copy_op, tensor_axis=0),
        Row(f"{_MEGATRON}{megatron}.bias", (HfTensor(f"{_HF}{hf}.bias", (rows,)),), copy_op, tensor_axis=0),
    )


def _by_columns(megatron: str, hf: str, rows: str, columns: str) -> tuple[Row, ...]:
    """A linear layer that is cut along its columns; its bias, added after the sum over ranks, is whole on each."""
    return (
        Row(f"{_MEGATRON}{megatron}.weight", (HfTensor(f"{_HF}{hf}.weight", (rows, columns)),), copy_op, tensor_axis=1),
        Row(f"{_MEGATRON}{megatron}.bias", (HfTensor(f"{_HF}{hf}.bias", (rows,)),), copy_op, None),
    )


_LAYER = (
    *_norms("input_layernorm", "input_layernorm", "self_attention.linear_qkv"),
    # For each head in turn its query, key and value: as megatron-core has it where every head has its own.
    *_by_rows("self_attention.linear_qkv", "attention.query_key_value", "qkv", "hidden"),
    *_by_columns("self_attention.linear_proj", "attention.dense", "hidden", "hidden"),
    *_norms("pre_mlp_layernorm", "post_attention_layernorm", "mlp.linear_fc1"),
    *_by_rows("mlp.linear_fc1", "mlp.dense_h_to_4h", "ffn", "hidden"),
    *_by_columns("mlp.linear_fc2", "mlp.dense_4h_to_h", "hidden", "ffn"),
)

# Older writers saved the causal mask and the frequencies; transformers has neither in a model's weights.
_BUFFERS = r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"


def _sizes(hf_config: Mapping) -> ModelSizes:
    refuse_quantized(hf_config)
    hf_config = with_defaults(hf_config)
    refuse(hf_config, attention_bias=True)
    heads, hidden = size_of(hf_config, "num_attention_heads"), size_of(hf_config, "hidden_size")
    if hidden % heads:
        raise cannot("hidden_size", hidden, f"a multiple of num_attention_heads = {heads}")
    return ModelSizes(
        layers=layers_of(hf_config),
        hidden=hidden,
        ffn=size_of(hf_config, "intermediate_size"),
        heads=heads,
        query_groups=heads,
        head_dim=hidden // heads,
        vocab=size_of(hf_config, "vocab_size"),
        tied=bool_of(hf_config, "tie_word_embeddings"),
        more={"qkv": 3 * hidden},
    )


def _table(hf_config: Mapping) -> Table:
    sizes = _sizes(hf_config)
    return Table(
        sizes=sizes,
        layers=(_LAYER,) * sizes.layers,
        embedding=Row("embedding.word_embeddings.weight", (_EMBEDDING,), pad_vocabulary, tensor_axis=0, place=FIRST),
        final_norm=tuple(
            Row(f"decoder.final_layernorm.{x}", (HfTensor(f"gpt_neox.final_layer_norm.{x}", ("hidden",)),), copy_op, None, place=LAST)
            for x in ("weight", "bias")
        ),
        output=Row("output_layer.weight", (HfTensor("embed_out.weight", ("vocab", "hidden")),), pad_vocabulary, tensor_axis=0, place=LAST),
        tied_output=Row("output_layer.weight", (_EMBEDDING,), pad_vocabulary, tensor_axis=0, place=LAST, duplicate=True),
        value_head=VALUE_HEAD,
    )


def _kwargs(hf_config: Mapping) -> dict[str, dict]:
    hf_config = with_defaults(hf_config)
    sizes = _sizes(hf_config)
    # The class has no head_dim, and its rotary positions would take one.
    refuse(hf_config, hidden_act="gelu", head_dim=(sizes.head_dim, None))
    rope = rope_of(hf_config, theta="rotary_emb_base", part="rotary_pct", rest=0.25)  # names of its own: others aren't read
    check_rope_set(rope, types=ROPE_TYPES)
    if rope["rope_type"] in ("llama3", "yarn"):
        check_original(hf_config, rope)
    check_taken(hf_config)
    transformer = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "ffn_hidden_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.query_groups,
        "kv_channels": sizes.head_dim,
        "layernorm_epsilon": number_of(hf_config, "layer_norm_eps", above=0),
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "activation_func": F.gelu,
        "add_qkv_bias": True,
        "add_bias_linear": True,
    }
    model = {
        "vocab_size": sizes.vocab,
        "max_sequence_length": size_of(hf_config, "max_position_embeddings"),
        "position_embedding_type": "rope",
        "rotary_base": number_of(rope, "rope_theta", above=1),
        "rotary_percent": turned_part(rope, sizes.head_dim),
        "share_embeddings_and_output_weights": sizes.tied,
    }
    return {"transformer": transformer, "model": model}


def _unused(hf_config: Mapping) -> tuple[tuple[str, str], ...]:
    tied = bool_of(with_defaults(hf_config), "tie_word_embeddings")
    output = ((r"embed_out\.weight", "tied: it is the embedding"),) if tied else ()
    return ((_BUFFERS, "mask and rotary frequencies, which follow from config.json"), *output)


def _architecture(hf_config: Mapping) -> Architecture:
    return Architecture(block=PARALLEL if bool_of(with_defaults(hf_config), "use_parallel_residual") else SEQUENTIAL)


GPT_NEOX = Family(
    "gpt_neox",
    _table,
    _kwargs,
    _architecture,
    unused=_unused,
)
