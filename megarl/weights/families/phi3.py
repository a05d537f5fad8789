"""Phi-3 and Phi-4-mini (arXiv:2404.14219): Llama's shape with query, key and value fused in one tensor, gate and up in another."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.weights.architecture import Architecture
from megarl.weights.families.dense import (
    HF,
    INPUT_NORM,
    MEGATRON,
    MLP_NORM,
    ROTARY_BUFFERS,
    decoder_table,
    linear_row,
    megatron_kwargs,
    read_sizes,
    tied_head,
)
from megarl.weights.families.mistral import window_everywhere
from megarl.weights.families.read import cannot, check_original, check_rope_set, number_of, rope_of, size_of, turned_part, with_defaults
from megarl.weights.ops import gate_up, qkv_by_group
from megarl.weights.table import Family, HfTensor, Row, Table

# transformers takes these words of older files for longrope.
_ROPES = ("default", "longrope", "su", "yarn")

_LAYER = (
    INPUT_NORM,
    Row(MEGATRON + "self_attention.linear_qkv.weight", (HfTensor(HF + "self_attn.qkv_proj.weight", ("q+kv+kv", "hidden")),),
        qkv_by_group, tensor_axis=0),
    linear_row("self_attention.linear_proj", ("self_attn.o_proj",), ("hidden",), "q", axis=1),
    MLP_NORM,
    Row(MEGATRON + "mlp.linear_fc1.weight", (HfTensor(HF + "mlp.gate_up_proj.weight", ("ffn+ffn", "hidden")),), gate_up, tensor_axis=0),
    linear_row("mlp.linear_fc2", ("mlp.down_proj",), ("hidden",), "ffn", axis=1),
)  # fmt: skip


def _table(hf_config: Mapping) -> Table:
    sizes = read_sizes(hf_config)
    return decoder_table(sizes, (_LAYER,) * sizes.layers)


def _kwargs(hf_config: Mapping) -> dict[str, dict]:
    rope, sizes = rope_of(hf_config), read_sizes(hf_config)
    part = turned_part(rope, sizes.head_dim)
    check_rope_set(rope, types=_ROPES)
    if rope["rope_type"] != "default":
        _check_long(hf_config, rope, part)
    kwargs = megatron_kwargs(sizes, hf_config)
    kwargs["model"]["rotary_percent"] = part
    return kwargs


def _check_long(hf_config: Mapping, rope: Mapping, part: float) -> None:
    """LongRoPE needs a factor for each pair of dimensions, of short and of long sequences."""
    pairs = int(size_of(hf_config, "hidden_size") // size_of(hf_config, "num_attention_heads") * part) // 2
    for key in ("short_factor", "long_factor"):
        factors = rope.get(key)
        if not isinstance(factors, list) or len(factors) != pairs:
            raise cannot(key, factors, f"{pairs} numbers, one for each pair of dimensions that turn")
        for factor in factors:
            number_of({key: factor}, key, above=0)
    if rope.get("factor") is not None:
        number_of(rope, "factor", above=0)
    check_original(with_defaults(hf_config), rope)


PHI3 = Family(
    "phi3",
    _table,
    _kwargs,
    lambda hf_config: Architecture(windows=window_everywhere(hf_config)),
    unused=lambda hf_config: (ROTARY_BUFFERS, *tied_head(hf_config)),
)
