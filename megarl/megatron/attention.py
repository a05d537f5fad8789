"""Causal attention over packed sequences by torch's scaled_dot_product_attention, for machines without Transformer Engine."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.megatron.packed import PackedSequences


class PackedAttention(MegatronModule):
    """Core attention of a Megatron layer spec: softmax(q k^T / sqrt(d)) v inside each packed sequence, causal.

    Shapes: query [T, heads, d], key and value [T, groups, d] with heads = groups x k (grouped-query attention, arXiv:2305.13245);
    returns [T, heads * d]. Heads and groups are those of this tensor-parallel rank.
    """

    def __init__(self, config: TransformerConfig, *, softmax_scale: float | None = None, **_unused: Any):
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **_unused: Any,
    ) -> torch.Tensor:
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        tokens, heads, width = query.shape
        output = query.new_zeros(tokens, heads, width)
        for index, valid in packed_seq_params.length_buckets:
            q, k, v = (x[index].transpose(1, 2) for x in (query, key, value))  # [b, heads, s, d]
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale).transpose(1, 2)
            output = output.index_put((index[valid],), mixed[valid])
        return output.reshape(tokens, heads * width)
