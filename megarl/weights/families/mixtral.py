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
    tied_head,
)
from megarl.weights.families.mistral import window_everywhere
from megarl.weights.families.mixture import chosen_experts, expert_rows, mixture_kwargs, router_row
from megarl.weights.families.read import MOST_EXPERTS, check_rope, size_of, with_defaults
from megarl.weights.sizes import ModelSizes
from megarl.weights.table import Family, Table


def _sizes(hf_config: Mapping) -> ModelSizes:
    full = with_defaults(hf_config)
    sizes = read_sizes(full)
    sizes = replace(sizes, experts=size_of(full, "num_local_experts", most=MOST_EXPERTS), expert_ffn=sizes.ffn)
    chosen_experts(full, sizes)
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
    sizes = _sizes(hf_config)
    kwargs = megatron_kwargs(sizes, hf_config)
    kwargs["transformer"] |= mixture_kwargs(with_defaults(hf_config), sizes)
    return kwargs


MIXTRAL = Family(
    "mixtral",
    _table,
    _kwargs,
    lambda hf_config: Architecture(windows=window_everywhere(hf_config)),
    unused=lambda hf_config: (ROTARY_BUFFERS, *tied_head(hf_config)),
)
