"""The three things a model is trained on, each from the outputs of one micro-batch to one number.

A loss receives denominators of the whole mini-batch, so that the sum over micro-batches and data-parallel ranks is the loss of the
mini-batch, however it was cut. Metrics travel as sums over tokens with the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megarl.algo.aggregate import token_weights
from megarl.algo.policy_losses import POLICY_LOSSES, PolicyLossInputs
from megarl.algo.value_losses import clipped_value_loss
from megarl.config.schema import ActorConfig

Columns = dict[str, torch.Tensor]
Sums = dict[str, torch.Tensor]


@dataclass(frozen=True)
class MiniBatchTotals:
    """Denominators: response tokens and samples of the whole mini-batch, over all data-parallel ranks."""

    tokens: int
    samples: int


@dataclass(frozen=True)
class PolicyLossSpec:
    """The registered policy loss that ``actor.policy_loss`` names, with an optional entropy bonus."""

    config: ActorConfig

    needs: tuple[str, ...] = ("log_probs", "advantages")
    with_entropy: bool = True

    @property
    def entropy_gradient(self) -> bool:
        """Without a bonus the entropy is a metric alone."""
        return self.config.entropy_coef != 0

    def __call__(self, outputs: Columns, columns: Columns, lengths: torch.Tensor, totals: MiniBatchTotals) -> tuple[torch.Tensor, Sums]:
        weights = token_weights(lengths, self.config.loss_aggregation, total_tokens=totals.tokens, total_samples=totals.samples)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        inputs = PolicyLossInputs(outputs["log_probs"], columns["log_probs"], columns["advantages"], offsets)
        policy = POLICY_LOSSES[self.config.policy_loss](inputs, self.config)
        pg_loss = (weights * policy.per_token).sum()
        entropy = outputs["entropy"]
        loss = pg_loss - self.config.entropy_coef * (weights * entropy).sum()
        sums = {"pg_loss": pg_loss.detach(), "entropy": entropy.detach().sum() / totals.tokens}
        return loss, sums | {METRIC_NAMES.get(name, name): value / totals.tokens for name, value in policy.metric_sums.items()}


# Metric sums of the policy losses under the names that verl's users know.
METRIC_NAMES = {"clip_fraction": "pg_clipfrac", "dual_clip_fraction": "pg_clipfrac_lower", "kl": "ppo_kl"}


@dataclass(frozen=True)
class ValueLossSpec:
    """PPO's clipped value loss, averaged over tokens."""

    clip: float

    needs: tuple[str, ...] = ("values", "returns")
    with_entropy: bool = False
    entropy_gradient: bool = False

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
    entropy_gradient: bool = False

    def __call__(self, outputs: Columns, columns: Columns, lengths: torch.Tensor, totals: MiniBatchTotals) -> tuple[torch.Tensor, Sums]:
        loss = -outputs["log_probs"].sum() / totals.tokens
        return loss, {"loss": loss.detach()}


LossSpec = Any  # one of the above: ``needs``, ``with_entropy``, ``entropy_gradient`` and the call
