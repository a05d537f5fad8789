"""Transformer Engine's attention with what a layer has of its own: a window, rotary positions. Imported only where that is installed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.megatron.packed import PackedSequences
from megarl.megatron.rope import Rotary, rotate


class EngineAttention(TEDotProductAttention):
    """As :class:`megarl.megatron.attention.PackedAttention`, in Transformer Engine's kernels; without soft-capping."""

    def __init__(self, config: TransformerConfig, *args: Any, window: int | None = None, rotary: Rotary | None = None, **kwargs: Any):
        if window is not None:
            config = copy.copy(config)  # megatron-core reads one window for all layers from it
            config.window_size = (window - 1, 0)  # tokens before a query's own, and after it
            config.window_attn_skip_freq = None
        super().__init__(config, *args, **kwargs)
        self.rotary = rotary

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, packed_seq_params: PackedSequences, **kwargs: Any
    ) -> torch.Tensor:
        if self.rotary is not None:
            query, key = (rotate(x, self.rotary, packed_seq_params) for x in (query, key))
        return super().forward(query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)
