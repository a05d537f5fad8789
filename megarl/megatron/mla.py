"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): its configuration, its layer, and the changes of a layer spec.

Queries, keys and values come from short vectors: keys and values of all heads from one a token. Part of a query and of a key, the same for
all heads, carries the rotary positions. megarl takes megatron-core's modules and computes queries, keys and values itself, since
megatron-core's rotary positions aren't those of transformers, and its gradient of the shared key is partial under tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megarl.megatron.attention import PackedAttention, engine_is_right
from megarl.megatron.norm import RMSNorm
from megarl.megatron.packed import PackedSequences
from megarl.megatron.rope import Rotary, rotary_by_name
from megarl.megatron.routing import GroupRouter, Routing

# transformers gives the norms of the short vectors this one, whatever ``rms_norm_eps`` says.
SHORT_NORM_EPS = 1e-6


@dataclass
class LatentConfig(MLATransformerConfig):
    """megatron-core's configuration, and what the layers of ours need beyond it."""

    rotary: Rotary | None = None  # of the part of queries and keys that turns
    rotary_pairs: bool = True  # a rotation turns neighbours (0, 1), (2, 3) and so on; else (0, size / 2), (1, size / 2 + 1) and so on
    routing: Routing | None = None  # of mixture layers

    def __post_init__(self) -> None:
        self.apply_rope_fusion = False  # a kernel for megatron-core's own rotary positions
        super().__post_init__()


def latent_kwargs(hf_config: Mapping, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :class:`LatentConfig` from those of megatron-core's configuration: rotary positions and routing become ours."""
    rest = {key: value for key, value in kwargs.items() if key not in _OURS}
    scaling = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}  # as transformers 5 has it, or 4
    if scaling.get("rope_type", scaling.get("type", "default")) == "default":
        scaling = {}
    return rest | {
        "qk_layernorm": True,
        "rope_type": "rope",  # megatron-core builds a table of it, which nothing reads
        # The softmax's scale is mscale^2 / sqrt(query size); megatron-core's mscale of these two is transformers'.
        "rotary_scaling_factor": scaling.get("factor") or 1.0,
        "mscale_all_dim": scaling.get("mscale_all_dim") or 0.0,
        "rotary": rotary_by_name(hf_config, {None})[None],
        "rotary_pairs": bool(hf_config.get("rope_interleave", True)),
        "routing": _routing(hf_config, kwargs) if kwargs.get("num_moe_experts") else None,
    }


# What the router of ours reads instead; megatron-core changes the bias in each step where it knows of one, and bounds the others.
_OURS = (
    "moe_router_score_function",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "moe_router_pre_softmax",
)


def _routing(hf_config: Mapping, kwargs: Mapping[str, Any]) -> Routing:
    sigmoid = kwargs.get("moe_router_score_function", "softmax") == "sigmoid"
    return Routing(
        chosen=kwargs["moe_router_topk"],
        sigmoid=sigmoid,
        groups=kwargs.get("moe_router_num_groups") or 1,
        groups_chosen=kwargs.get("moe_router_group_topk") or 1,
        group_best=2 if sigmoid else 1,
        normalize=sigmoid and bool(hf_config.get("norm_topk_prob", True)),
        scale=float(kwargs.get("moe_router_topk_scaling_factor") or 1.0),
        bias=bool(kwargs.get("moe_router_enable_expert_bias", False)),
    )


def rotate(x: torch.Tensor, sequences: PackedSequences, config: LatentConfig) -> torch.Tensor:
    """``x`` [T, heads, rotary size] turned by its positions; neighbours come out apart, as transformers' DeepSeek-V3 has it."""
    cosine, sine = _turns(sequences, config.rotary)
    first, second = (x[..., 0::2], x[..., 1::2]) if config.rotary_pairs else x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


def _turns(sequences: PackedSequences, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [T, 1, rotary size / 2] float32, computed by the first layer that asks for them in a micro-batch."""
    key = ("latent rotary", rotary.name)
    if key not in sequences.computed:
        angles = sequences.positions[:, None].float() * rotary.frequencies.to(sequences.positions.device)
        sequences.computed[key] = tuple((f(angles) * rotary.factor)[:, None] for f in (torch.cos, torch.sin))
    return sequences.computed[key]


class LatentAttention(MLASelfAttention):
    """megatron-core's module, with queries, keys and values of ours. [T / tp, 1, hidden] -> the same under sequence parallelism."""

    config: LatentConfig

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):  # the last two where norms are fused
            if hasattr(getattr(self, name, None), "eps"):
                getattr(self, name).eps = SHORT_NORM_EPS

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Take the modules that the spec names; megatron-core 0.19 would put a norm before ``linear_q_proj``, which DeepSeek hasn't."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: None,
        position_ids: None,
        packed_seq_params: PackedSequences,
        **_unused: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Query and key [T, heads, qk size], value [T, heads, v size] of this rank's heads, and the short vectors.

        hidden_states: [T, 1, hidden], under sequence parallelism this rank's part of the T tokens.
        """
        config = self.config
        heads, plain, rotary = self.num_attention_heads_per_partition, config.qk_head_dim, config.qk_pos_emb_head_dim
        short_q, query = self._query(hidden_states)
        short_kv, shared_key = self._short_key_value(hidden_states)
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(short_kv))
        plain_key, value = both.view(len(both), heads, -1).split([plain, config.v_head_dim], dim=-1)
        plain_query, rotary_query = query.view(len(query), heads, -1).split([plain, rotary], dim=-1)
        key = rotate(shared_key[:, None], packed_seq_params, config).expand(-1, heads, -1)
        query = torch.cat([plain_query, rotate(rotary_query, packed_seq_params, config)], dim=-1)
        return query, torch.cat([plain_key, key], dim=-1), value.contiguous(), short_q, short_kv

    def _run_core_attention(self, *tensors: Any, **inputs: Any) -> torch.Tensor:
        """Attend with values of their own size. megatron-core 0.19 fills them up to the keys' size for packed sequences, for which
        Transformer Engine's gradients are wrong (``attention.engine_is_right``).
        """
        return self.core_attention(*tensors, **{"attn_mask_type": self.attn_mask_type} | inputs)

    def _query(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(short vectors or hidden states, [T, heads x qk size])."""
        if self.config.q_lora_rank is None:
            hidden_states = hidden_states.squeeze(1)
            return hidden_states, self.linear_q_proj(hidden_states)[0]
        short = self.linear_q_down_proj(hidden_states)[0].squeeze(1)
        if short.shape[-1] != self.config.q_lora_rank:
            short = self._scattered(gather_from_tensor_model_parallel_region(short))
        return short, self.linear_q_up_proj(self.q_layernorm(short))[0]

    def _short_key_value(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(short vectors, of this rank's tokens; the key that all heads share, of all tokens).

        Each tensor-parallel rank's heads give a part of the shared key's gradient, which is summed on the way back.
        """
        sizes = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        combined = self.linear_kv_down_proj(hidden_states)[0].squeeze(1)
        if combined.shape[-1] != sum(sizes):  # cut over tensor-parallel ranks, and of all tokens
            short, key = gather_from_tensor_model_parallel_region(combined).split(sizes, dim=-1)
            return self._scattered(short), copy_to_tensor_model_parallel_region(key)
        short, key = combined.split(sizes, dim=-1)
        if self.config.sequence_parallel:
            return short, gather_from_sequence_parallel_region(key.contiguous())
        return short, copy_to_tensor_model_parallel_region(key)

    def _scattered(self, x: torch.Tensor) -> torch.Tensor:
        return scatter_to_sequence_parallel_region(x) if self.config.sequence_parallel else x


def latent_block_spec(config: LatentConfig, spec: str, layers: Sequence[int]) -> TransformerBlockSubmodules:
    """One specification for each of ``layers``, counted over the whole model, which are a model chunk's; and the norm after the last."""
    mixtures = [config.routing is not None and bool(config.moe_layer_freq[layer]) for layer in layers]
    make, norm = (_te_layer, _te_norm()) if spec == "te" else (_local_layer, RMSNorm)
    made = {mixture: make(config, mixture) for mixture in set(mixtures)}
    return TransformerBlockSubmodules(layer_specs=[made[mixture] for mixture in mixtures], layer_norm=norm)


def _te_norm() -> Any:
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _te_layer(config: LatentConfig, mixture: bool) -> Any:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if mixture else None, moe_grouped_gemm=mixture, qk_layernorm=True, multi_latent_attention=True
    )
    if not engine_is_right(config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim):
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return _with_ours(layer, mixture)


def _local_layer(config: LatentConfig, mixture: bool) -> Any:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if mixture else None,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        multi_latent_attention=True,
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    attention.q_layernorm = attention.kv_layernorm = RMSNorm
    return _with_ours(layer, mixture)


def _with_ours(layer: Any, mixture: bool) -> Any:
    """megatron-core's ``layer`` with attention and router of ours."""
    layer.submodules.self_attention.module = LatentAttention
    if mixture:
        mlp = layer.submodules.mlp  # a ModuleSpec, since 0.19 a partial
        (mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules).router = GroupRouter
    return layer
