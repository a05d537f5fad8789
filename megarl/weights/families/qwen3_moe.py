"""Qwen3-MoE (arXiv:2505.09388): Qwen3's attention, and experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.weights.architecture import Architecture
from megarl.weights.families.dense import (
    INPUT_NORM,
    ROTARY_BUFFERS,
    attention_rows,
    decoder_table,
    megatron_kwargs,
    norm_row,
    read_sizes,
    tied_head,
)
from megarl.weights.families.llama import attention_biases
from megarl.weights.families.mistral import window_everywhere
from megarl.weights.families.mixture import chosen_experts, expert_rows, mixture_kwargs, router_row
from megarl.weights.families.read import MOST_EXPERTS, bool_of, cannot, check_rope, refuse, size_of, with_defaults
from megarl.weights.sizes import ModelSizes
from megarl.weights.table import Family, Table


def _sizes(hf_config: Mapping) -> ModelSizes:
    refuse(hf_config, decoder_sparse_step=1)  # experts in every layer
    if hf_config["mlp_only_layers"] not in (None, []):
        raise cannot("mlp_only_layers", hf_config["mlp_only_layers"], "none: experts in every layer")
    # The key is num_experts on disk, and num_local_experts in files that transformers 5 wrote.
    experts = size_of(hf_config, "num_experts", most=MOST_EXPERTS)
    sizes = replace(read_sizes(hf_config), experts=experts, expert_ffn=size_of(hf_config, "moe_intermediate_size"))
    chosen_experts(hf_config, sizes)
    return sizes


def _table(hf_config: Mapping) -> Table:
    hf_config = with_defaults(hf_config)
    sizes = _sizes(hf_config)
    norm = norm_row("pre_mlp_layernorm", "post_attention_layernorm")
    layer = (
        INPUT_NORM,
        *attention_rows(attention_biases(hf_config), qk_norm=True),
        norm,
        router_row("mlp."),
        *expert_rows("mlp.", ("gate_proj", "up_proj", "down_proj")),
    )
    return decoder_table(sizes, (layer,) * sizes.layers)


def _kwargs(hf_config: Mapping) -> dict[str, dict]:
    hf_config = with_defaults(hf_config)
    check_rope(hf_config)
    sizes = _sizes(hf_config)
    kwargs = megatron_kwargs(sizes, hf_config, biases=attention_biases(hf_config), qk_norm=True)
    kwargs["transformer"] |= mixture_kwargs(hf_config, sizes)
    # Softmax over all experts first where the chosen ones' weights aren't made to sum to 1; else the order makes no difference.
    kwargs["transformer"]["moe_router_pre_softmax"] = not bool_of(hf_config, "norm_topk_prob")
    return kwargs


def _architecture(hf_config: Mapping) -> Architecture:
    slides = bool_of(with_defaults(hf_config), "use_sliding_window")
    return Architecture(windows=window_everywhere(hf_config) if slides else ())


QWEN3_MOE = Family("qwen3_moe", _table, _kwargs, _architecture, unused=lambda hf_config: (ROTARY_BUFFERS, *tied_head(hf_config)))
