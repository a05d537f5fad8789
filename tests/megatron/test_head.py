"""Log-probs and entropy from columns of the logits are torch's own from all of them, and so are their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megarl.megatron.head import vocab_parallel_log_probs
from megarl.types import Layout, Rank
from megarl.weights.sizes import padded_vocab_size
from tests.megatron.ranks import run_ranks

ROWS, VOCAB, TEMPERATURE = 9, 61, 0.7


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (some rows nearly decided), targets, and the weights of log-probs and entropies in a loss."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, VOCAB, generator=generator) * torch.linspace(0.1, 12, ROWS)[:, None]
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return logits, targets, torch.randn(ROWS, generator=generator), torch.randn(ROWS, generator=generator)


def work(rank: Rank) -> dict[bool, dict[str, Any]]:
    logits, targets, by_log_prob, by_entropy = inputs()
    width = padded_vocab_size(VOCAB, rank.layout.tensor) // rank.layout.tensor
    padded = torch.full((ROWS, width * rank.layout.tensor), 50.0)  # padding that would win if it counted
    padded[:, :VOCAB] = logits
    found = {}
    for entropy_gradient in (True, False):
        mine = padded[:, rank.tensor * width : (rank.tensor + 1) * width].clone().requires_grad_()
        log_probs, entropy = vocab_parallel_log_probs(
            mine, targets, vocab_size=VOCAB, temperature=TEMPERATURE, with_entropy=True, entropy_gradient=entropy_gradient
        )
        assert entropy is not None
        (by_log_prob * log_probs + by_entropy * entropy).sum().backward()
        found[entropy_gradient] = {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "gradient": mine.grad}
    return found


def reference(entropy_gradient: bool) -> dict[str, torch.Tensor]:
    logits, targets, by_log_prob, by_entropy = inputs()
    logits = logits.double().requires_grad_()
    log_p = (logits / TEMPERATURE).log_softmax(dim=1)
    log_probs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=1)
    (by_log_prob * log_probs + by_entropy * (entropy if entropy_gradient else entropy.detach())).sum().backward()
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "gradient": logits.grad}


@pytest.mark.parametrize("tensor", [1, 2, 3])
def test_equals_torch(tensor: int) -> None:
    ranks = run_ranks(Layout(tensor=tensor), work)
    for entropy_gradient in (True, False):
        expected = reference(entropy_gradient)
        gradient = torch.cat([rank[entropy_gradient]["gradient"] for rank in ranks], dim=1)
        np.testing.assert_allclose(gradient[:, :VOCAB], expected["gradient"], atol=2e-6)
        assert not gradient[:, VOCAB:].any(), "padding has no gradient"
        for rank in ranks:
            for name in ("log_probs", "entropy"):
                np.testing.assert_allclose(rank[entropy_gradient][name], expected[name], rtol=1e-5, atol=2e-6)
    assert not np.allclose(reference(True)["gradient"], reference(False)["gradient"], atol=1e-3)
