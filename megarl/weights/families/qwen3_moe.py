"""Qwen3-MoE (arXiv:2505.09388): Qwen3's attention; in each layer a router sends a token to a few of many experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.weights.families.dense import (
    HF,
    MEGATRON,
    attention_rows,
    cannot,
    decoder_family,
    megatron_kwargs,
    read_sizes,
    size_of,
)
from megarl.weights.table import HfTensor, ModelSizes, Row, copy_op, gate_up

_EXPERT = "mlp.experts.local_experts.{expert}."
_TE = MEGATRON + "mlp.experts."

_MIXTURE = (
    Row(MEGATRON + "pre_mlp_layernorm.weight", (HfTensor(HF + "post_attention_layernorm.weight", ("hidden",)),), copy_op, None),
    Row(MEGATRON + "mlp.router.weight", (HfTensor(HF + "mlp.gate.weight", ("experts", "hidden")),), copy_op, None),
    Row(MEGATRON + _EXPERT + "linear_fc1.weight",
        tuple(HfTensor(HF + "mlp.experts.{expert}." + x + "_proj.weight", ("expert_ffn", "hidden")) for x in ("gate", "up")),
        gate_up, tensor_axis=0, expert=True, te=_TE + "linear_fc1.weight{expert}"),
    Row(MEGATRON + _EXPERT + "linear_fc2.weight", (HfTensor(HF + "mlp.experts.{expert}.down_proj.weight", ("hidden", "expert_ffn")),),
        copy_op, tensor_axis=1, expert=True, te=_TE + "linear_fc2.weight{expert}"),
)  # fmt: skip


def _sizes(hf_config: Mapping) -> ModelSizes:
    if hf_config.get("decoder_sparse_step", 1) != 1:
        raise cannot("decoder_sparse_step", hf_config["decoder_sparse_step"], "1: experts in every layer")
    if hf_config.get("mlp_only_layers"):
        raise cannot("mlp_only_layers", hf_config["mlp_only_layers"], "none: experts in every layer")
    # The key is num_experts on disk, and num_local_experts in files that transformers 5 wrote.
    experts = size_of(hf_config, "num_experts" if "num_experts" in hf_config else "num_local_experts")
    chosen = size_of(hf_config, "num_experts_per_tok")
    if chosen > experts:
        raise cannot("num_experts_per_tok", chosen, f"at most {experts}, the number of experts")
    return replace(read_sizes(hf_config), experts=experts, expert_ffn=size_of(hf_config, "moe_intermediate_size"))


def _kwargs(hf_config: Mapping) -> dict[str, dict]:
    sizes = _sizes(hf_config)
    kwargs = megatron_kwargs(sizes, hf_config, qkv_bias=False, qk_norm=True)
    kwargs["transformer"] |= {
        "num_moe_experts": sizes.experts,
        "moe_ffn_hidden_size": sizes.expert_ffn,
        "moe_router_topk": size_of(hf_config, "num_experts_per_tok"),
        # Softmax over all experts first where the chosen ones' weights aren't made to sum to 1; else the order makes no difference.
        "moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",  # the auxiliary loss belongs to pretraining
        "moe_aux_loss_coeff": 0.0,
    }
    return kwargs


QWEN3_MOE = decoder_family("qwen3_moe", _sizes, _kwargs, (*attention_rows(qkv_bias=False, qk_norm=True), *_MIXTURE))
