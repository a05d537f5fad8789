"""Norms for layer specs without Transformer Engine.

megatron-core's own wrapper refuses sequence parallelism. Under it each rank sees a part of the tokens, and the mark ``sequence_parallel``
on weights and biases makes megatron-core sum their gradients over the tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.errors import ModelError, explain


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm (arXiv:1910.07467)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class ZeroCenteredRMSNorm(torch.nn.Module):
    """RMSNorm that multiplies by 1 + weight, in float32 and before it casts back (Gemma, arXiv:2403.08295)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(hidden)


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm (arXiv:1607.06450), with a bias."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias.sequence_parallel = config.sequence_parallel


def norm_class(config: TransformerConfig) -> type[torch.nn.Module]:
    """The norm of the local layer spec. Raises ModelError for one that isn't there."""
    known = {("RMSNorm", False): RMSNorm, ("RMSNorm", True): ZeroCenteredRMSNorm, ("LayerNorm", False): LayerNorm}
    found = known.get((config.normalization, config.layernorm_zero_centered_gamma))
    if found is None:
        raise ModelError(
            explain(
                "no such norm in megarl's layers",
                got=f"normalization {config.normalization}, zero-centred weight {config.layernorm_zero_centered_gamma}",
                expected="RMSNorm, RMSNorm with a zero-centred weight, or LayerNorm",
                do="use a model with one of these",
            )
        )
    return found
