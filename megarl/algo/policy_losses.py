"""Policy losses, by name. Each gives a loss per token; ``aggregate`` holds the weights that make it a mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.ragged import check_same_shape
from megarl.algo.registry import Registry
from megarl.config.schema import ActorConfig
from megarl.errors import ConfigError, explain

# exp(20) is about 5e8: far outside any clip, and still a number whose gradient is finite in float32.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a policy loss may use."""

    log_probs: Tensor  # [N] of the policy being trained; carries the gradient
    old_log_probs: Tensor  # [N] of the policy that the step started with
    advantages: Tensor  # [N]
    offsets: Tensor  # [B + 1] int64, for losses over whole responses


@dataclass(frozen=True)
class PolicyLoss:
    """Loss per token, and sums over the tokens: divide them by the token count of all that were summed."""

    per_token: Tensor  # [N]
    metric_sums: dict[str, Tensor]  # name -> 0-d float64, no gradient


PolicyLossFunction = Callable[[PolicyLossInputs, ActorConfig], PolicyLoss]
POLICY_LOSSES: Registry[PolicyLossFunction] = Registry("policy loss")
register_policy_loss = POLICY_LOSSES.register


def ppo_clip(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, clip_dual: float
) -> PolicyLoss:
    """Clipped surrogate (arXiv:1707.06347, equation 7), optionally with the dual clip (arXiv:1912.09729, equation 5).

    ratio = exp(log_probs - old_log_probs);  loss = max(-A ratio, -A clamp(ratio, 1 - clip_low, 1 + clip_high)), and
    where A < 0 no more than -A clip_dual. The log of the ratio is held within +-20 so that no gradient overflows.

    Args:
        log_probs, old_log_probs, advantages: [N]; NaN goes through to the loss, where the trainer checks for it.
        clip_low, clip_high: widths of the clip below and above 1; they differ in DAPO (arXiv:2503.14476).
        clip_dual: above 1; 0 turns the dual clip off.

    Returns:
        PolicyLoss with the metric sums ``clip_fraction`` (tokens where the clipped term is the larger), ``dual_clip_fraction``
        (tokens held by the dual clip) and ``kl`` (k1: old - new, nats).

    Raises:
        ConfigError: a clip out of range.
        DataError: tensors of unequal shape.
    """
    _check_clips(clip_low, clip_high, clip_dual)
    check_same_shape("ppo_clip", log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    held = torch.zeros_like(advantages, dtype=torch.bool)
    if clip_dual:
        ceiling = -advantages * clip_dual
        held = (advantages < 0) & (loss > ceiling)
        loss = torch.where(held, ceiling, loss)
    sums = {
        "clip_fraction": (clipped > plain).double().sum(),
        "dual_clip_fraction": held.double().sum(),
        "kl": -log_ratio.detach().double().sum(),
    }
    return PolicyLoss(loss, sums)


def _check_clips(clip_low: float, clip_high: float, clip_dual: float) -> None:
    for name, number, sound, expected in (
        ("clip_low", clip_low, 0.0 <= clip_low <= 1.0, "a number in [0, 1]"),
        ("clip_high", clip_high, 0.0 <= clip_high < float("inf"), "a number of 0 or more"),
        ("clip_dual", clip_dual, clip_dual == 0 or 1.0 < clip_dual < float("inf"), "a number above 1, or 0 for off"),
    ):
        if not sound:
            raise ConfigError(explain(f"{name} out of range", where="ppo_clip", got=number, expected=expected))


@register_policy_loss("ppo_clip")
def ppo_clip_loss(inputs: PolicyLossInputs, config: ActorConfig) -> PolicyLoss:
    """:func:`ppo_clip` with the three ``actor.clip_ratio_*`` keys."""
    return ppo_clip(
        inputs.log_probs,
        inputs.old_log_probs,
        inputs.advantages,
        clip_low=config.clip_ratio_low,
        clip_high=config.clip_ratio_high,
        clip_dual=config.clip_ratio_dual,
    )
