"""Causal attention over packed sequences in plain torch: where there is no Transformer Engine, or none of what a model needs."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.megatron.packed import PackedSequences
from megarl.megatron.rope import Rotary, rotate


def engine_is_right(key_size: int, value_size: int) -> bool:
    """Whether Transformer Engine's kernels for packed sequences give right gradients with heads of these sizes.

    Measured on an H200 (Transformer Engine 2.20.2, cuDNN 9.19; tests/gpu/test_head_sizes.py): forward is right everywhere, but with keys
    or values larger than 128 gradients are wrong by a third, or NaN. Keys up to 192 with values up to 128 are right, as DeepSeek has them.
    """
    return key_size <= 192 and value_size <= 128


class PackedAttention(MegatronModule):
    """Core attention of a Megatron layer spec: softmax(q k^T * scale) v inside each packed sequence, causal.

    Shapes: query [T, heads, d], key [T, groups, d] and value [T, groups, v] with heads = groups x k (grouped-query attention,
    arXiv:2305.13245); returns [T, heads * v]. Heads and groups are those of this tensor-parallel rank, tokens those of this
    context-parallel rank.

    Args:
        softmax_scale: None: 1 / sqrt(d).
        window: how many of the newest tokens a query sees, its own among them; None: all.
        softcap: c: scores become c tanh(scores / c) (Gemma 2, arXiv:2408.00118); None: as they are.
        rotary: turn queries and keys by it first; None: they come turned.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        window: int | None = None,
        softcap: float | None = None,
        rotary: Rotary | None = None,
        **_unused: Any,
    ):
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.window, self.softcap, self.rotary = window, softcap, rotary

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
        tokens, heads, _ = query.shape
        repeats = heads // key.shape[1]
        if self.rotary is not None:
            query, key = (rotate(x, self.rotary, packed_seq_params) for x in (query, key))
        if packed_seq_params.context.size > 1:
            # Keys and values of all ranks, with the gradients summed back to where they came from. Few bytes beside hidden states, since
            # groups are fewer than heads.
            group = parallel_state.get_context_parallel_group()
            key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=group) for x in (key, value))
        if repeats > 1:
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        output = query.new_zeros(tokens, heads, value.shape[-1])
        for part in packed_seq_params.rectangles(self.window):
            q, k, v = (x[rows].transpose(1, 2) for x, rows in ((query, part.queries), (key, part.keys), (value, part.keys)))
            mixed = self._mix(q, k, v, part.mask).transpose(1, 2)
            output = output.index_put((part.queries[part.real],), mixed[part.real])
        return output.reshape(tokens, -1)

    def _mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[b, heads, s, d], [b, heads, t, d], [b, heads, t, v] -> [b, heads, s, v]. ``mask``: True: a query sees a key; None: causal."""
        if self.softcap is None:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)
        if mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = torch.tanh(q @ k.transpose(2, 3) * self.scale / self.softcap) * self.softcap
        weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1, dtype=torch.float32)
        return weights.to(v.dtype) @ v
