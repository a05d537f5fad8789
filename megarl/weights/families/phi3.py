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
from megarl.weights.families.read import check_rope, rope_value
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
    check_rope(hf_config, types=_ROPES, partial=True)
    kwargs = megatron_kwargs(read_sizes(hf_config), hf_config)
    kwargs["model"]["rotary_percent"] = rope_value(hf_config, "partial_rotary_factor", 1.0)
    return kwargs


PHI3 = Family(
    "phi3",
    _table,
    _kwargs,
    lambda hf_config: Architecture(windows=window_everywhere(hf_config)),
    unused=lambda hf_config: (ROTARY_BUFFERS, *tied_head(hf_config)),
)
