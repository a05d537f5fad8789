"""Mixtral (arXiv:2401.04088): Mistral's attention, and experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.weights.architecture import Architecture
from megarl.weights.families.dense import (
    INPUT_NORM,
    ROTARY_BUFFERS,
    Biases,
    attention_rows,
    decoder_table,
    megatron_kwargs,
    norm_row,
    read_sizes,
)
from megarl.weights.families.mistral import window_everywhere
from megarl.weights.families.mixture import chosen_experts, expert_rows, mixture_kwargs, router_row
from megarl.weights.families.read import check_rope, size_of
from megarl.weights.sizes import ModelSizes
from megarl.weights.table import Family, Table


def _sizes(hf_config: Mapping) -> ModelSizes:
    sizes = read_sizes(hf_config)
    sizes = replace(sizes, experts=size_of(hf_config, "num_local_experts", 8), expert_ffn=sizes.ffn)
    chosen_experts(hf_config, sizes, 2)
    return sizes


def _table(hf_config: Mapping) -> Table:
    sizes = _sizes(hf_config)
    layer = (
        INPUT_NORM,
        *attention_rows(Biases(), qk_norm=False),
        norm_row("pre_mlp_layernorm", "post_attention_layernorm"),
        router_row("block_sparse_moe."),
        *expert_rows("block_sparse_moe.", ("w1", "w3", "w2")),
    )
    return decoder_table(sizes, (layer,) * sizes.layers)


def _kwargs(hf_config: Mapping) -> dict[str, dict]:
    check_rope(hf_config)
    sizes, hf_config = _sizes(hf_config), {"rope_theta": 1e6, "num_experts_per_tok": 2} | dict(hf_config)  # its own defaults
    kwargs = megatron_kwargs(sizes, hf_config)
    kwargs["transformer"] |= mixture_kwargs(hf_config, sizes)
    return kwargs


MIXTRAL = Family(
    "mixtral",
    _table,
    _kwargs,
    lambda hf_config: Architecture(windows=window_everywhere(hf_config)),
    unused=lambda hf_config: (ROTARY_BUFFERS,),
)
