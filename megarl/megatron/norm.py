"""RMSNorm for layer specs without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm (arXiv:1910.07467) whose weight says when its gradient is partial.

    megatron-core's own wrapper refuses sequence parallelism; under it each rank sees a part of the tokens, and the mark makes
    megatron-core sum the gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
