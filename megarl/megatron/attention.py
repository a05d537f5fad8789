"""Causal attention over packed sequences by torch's scaled_dot_product_attention, for machines without Transformer Engine."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.megatron.packed import PackedSequences


class PackedAttention(MegatronModule):
    """Core attention of a Megatron layer spec: softmax(q k^T / sqrt(d)) v inside each packed sequence, causal.

    Shapes: query [T, heads, d], key and value [T, groups, d] with heads = groups x k (grouped-query attention, arXiv:2305.13245);
    returns [T, heads * d]. Heads and groups are those of this tensor-parallel rank, tokens those of this context-parallel rank.
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
        tokens, heads, width = query.shape
        repeats = heads // key.shape[1]
        if packed_seq_params.context.size > 1:
            # Keys and values of all ranks, with the gradients summed back to where they came from. Few bytes beside hidden states, since
            # groups are fewer than heads.
            group = parallel_state.get_context_parallel_group()
            key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=group) for x in (key, value))
        if repeats > 1:
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        output = query.new_zeros(tokens, heads, width)
        for part in packed_seq_params.rectangles:
            q, k, v = (x[rows].transpose(1, 2) for x, rows in ((query, part.queries), (key, part.keys), (value, part.keys)))
            mixed = torch.nn.functional.scaled_dot_product_attention(  # [b, heads, s, d]
                q, k, v, attn_mask=part.mask, is_causal=part.mask is None, scale=self.scale
            ).transpose(1, 2)
            output = output.index_put((part.queries[part.real],), mixed[part.real])
        return output.reshape(tokens, heads * width)
