"""Norms of ours are transformers' in every dtype, and say when their gradients are partial."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from megarl.errors import ModelError
from megarl.megatron.norm import LayerNorm, RMSNorm, ZeroCenteredRMSNorm, norm_class


def config(**changes: object) -> SimpleNamespace:
    given = {"params_dtype": torch.float32, "sequence_parallel": True, "normalization": "RMSNorm", "layernorm_zero_centered_gamma": False}
    return SimpleNamespace(**given | changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_zero_centred_norm_is_gemmas_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = ZeroCenteredRMSNorm(config(params_dtype=dtype), 24, 1e-6), Gemma2RMSNorm(24, 1e-6).to(dtype)
    weight, x = torch.randn(24, dtype=dtype), torch.randn(50, 1, 24, dtype=dtype) * 3
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(weight)
        assert torch.equal(ours(x), theirs(x))
        assert ours(x).dtype is dtype


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", [RMSNorm, ZeroCenteredRMSNorm, LayerNorm])
def test_every_parameter_is_marked(kind: type[torch.nn.Module], sequence_parallel: bool) -> None:
    norm = kind(config(sequence_parallel=sequence_parallel), 8)
    assert [p.sequence_parallel for p in norm.parameters()] == [sequence_parallel] * len(list(norm.parameters()))


def test_an_unknown_norm_is_refused() -> None:
    assert norm_class(config()) is RMSNorm
    assert norm_class(config(layernorm_zero_centered_gamma=True)) is ZeroCenteredRMSNorm
    assert norm_class(config(normalization="LayerNorm")) is LayerNorm
    with pytest.raises(ModelError, match="LayerNorm"):
        norm_class(config(normalization="LayerNorm", layernorm_zero_centered_gamma=True))
