"""The three things a model is trained on, each from the outputs of one micro-batch to one number.

A loss receives denominators of the whole mini-batch, so that the sum over micro-batches and data-parallel ranks is the loss of the
mini-batch, however it was cut. Metrics travel as sums over tokens with the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megarl.algo.aggregate import token_weights
from megarl.algo.policy_losses import POLICY_LOSSES
from megarl.algo.value_losses import clipped_value_loss

Columns = dict[str, torch.Tensor]
Sums = dict[str, torch.Tensor]


@dataclass(frozen=True)
class MiniBatchTotals:
    """Denominators: response tokens and samples of the whole mini-batch, over all data-parallel ranks."""

    tokens: int
    samples: int


@dataclass(frozen=True)
class PolicyLossSpec:
    """PPO's clipped objective (arXiv:1707.06347, eq. 7) with an optional entropy bonus."""

    clip_low: float
    clip_high: float
    clip_dual: float
    entropy_coef: float
    aggregation: str
    name: str = "ppo_clip"

    needs: tuple[str, ...] = ("log_probs", "advantages")
    with_entropy: bool = True

    def __call__(self, outputs: Columns, columns: Columns, lengths: torch.Tensor, totals: MiniBatchTotals) -> tuple[torch.Tensor, Sums]:
        weights = token_weights(lengths, self.aggregation, total_tokens=totals.tokens, total_samples=totals.samples)
        policy = POLICY_LOSSES[self.name](
            outputs["log_probs"],
            columns["log_probs"],
            columns["advantages"],
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            clip_dual=self.clip_dual,
        )
        entropy = outputs["entropy"]
        pg_loss = (weights * policy.per_token).sum()
        loss = pg_loss - self.entropy_coef * (weights * entropy).sum()
        per_token = 1.0 / totals.tokens
        sums = {"pg_loss": pg_loss.detach(), "entropy": entropy.detach().sum() * per_token}
        sums |= {name: value.sum() * per_token for name, value in policy.metrics.items()}
        return loss, sums


@dataclass(frozen=True)
class ValueLossSpec:
    """PPO's clipped value loss, averaged over tokens."""

    clip: float

    needs: tuple[str, ...] = ("values", "returns")
    with_entropy: bool = False

    def __call__(self, outputs: Columns, columns: Columns, lengths: torch.Tensor, totals: MiniBatchTotals) -> tuple[torch.Tensor, Sums]:
        per_token, clipped = clipped_value_loss(outputs["values"], columns["values"], columns["returns"], clip=self.clip)
        loss = per_token.sum() / totals.tokens
        return loss, {
            "vf_loss": loss.detach(),
            "vf_clipfrac": clipped.float().sum() / totals.tokens,
            "vpred_mean": outputs["values"].detach().sum() / totals.tokens,
        }


@dataclass(frozen=True)
class SupervisedLossSpec:
    """Negative log-likelihood of the responses, averaged over tokens."""

    needs: tuple[str, ...] = ()
    with_entropy: bool = False

    def __call__(self, outputs: Columns, columns: Columns, lengths: torch.Tensor, totals: MiniBatchTotals) -> tuple[torch.Tensor, Sums]:
        loss = -outputs["log_probs"].sum() / totals.tokens
        return loss, {"loss": loss.detach()}


LossSpec = Any  # one of the above: ``needs``, ``with_entropy`` and the call
