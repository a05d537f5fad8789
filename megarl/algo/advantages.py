"""Advantage estimators, by name.

The estimators proper (:func:`gae`, :func:`grpo`) take what their papers name. The registry holds each behind one
signature, ``(AdvantageInputs, AlgorithmConfig) -> Advantages``, so that a recipe chooses one by name and a user's
package can add its own with :func:`register_advantage_estimator`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.ragged import check_finite, check_offsets, check_same_shape, sample_of_token, sum_per_sample
from megarl.algo.registry import Registry
from megarl.config.schema import AlgorithmConfig
from megarl.errors import ConfigError, DataError, explain


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may use. All samples of one group lie in the same inputs."""

    token_rewards: Tensor  # [N] KL penalty included; the score lies on the last token of each response
    scores: Tensor  # [B] the reward function's score
    groups: Tensor  # [B] int64, samples of one prompt share a number
    offsets: Tensor  # [B + 1] int64
    values: Tensor | None = None  # [N] the critic's value of the state before each token; None without a critic
    bootstrap_values: Tensor | None = None  # [B] value after the last token; 0 where the response ended by itself


@dataclass(frozen=True)
class Advantages:
    """What an estimator gives."""

    advantages: Tensor  # [N] float32, not whitened
    returns: Tensor | None = None  # [N] float32, the critic's targets; None without a critic


AdvantageEstimator = Callable[[AdvantageInputs, AlgorithmConfig], Advantages]
ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator")
_NEED_VALUES: set[str] = set()


def register_advantage_estimator(name: str, *, needs_values: bool = False) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Decorator: make an estimator known as ``name``. ``needs_values``: a critic is trained for it."""
    if needs_values:
        _NEED_VALUES.add(name)
    return ADVANTAGE_ESTIMATORS.register(name)


def needs_values(name: str) -> bool:
    """True for registered estimators that take a critic's values. Raises ConfigError for an unknown name."""
    return ADVANTAGE_ESTIMATORS[name] is not None and name in _NEED_VALUES


def gae(
    token_rewards: Tensor, values: Tensor, offsets: Tensor, *, gamma: float, lam: float, bootstrap_values: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, equation 16).

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  returns_t = A_t + V_t.

    Args:
        token_rewards: [N].
        values: [N], the value of the state before response token t is drawn.
        offsets: [B + 1] int64.
        gamma: discount per token, in [0, 1].
        lam: GAE lambda, in [0, 1].
        bootstrap_values: [B], the value after the last token of each response; None: 0, the response is over.

    Returns:
        Advantages [N] and returns [N] in the dtype of ``values``; the arithmetic is float64.

    Raises:
        ConfigError: gamma or lam outside [0, 1].
        DataError: shapes that do not fit, or a number that is not finite.
    """
    _check_gae(token_rewards, values, offsets, bootstrap_values)
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= number <= 1.0:
            raise ConfigError(explain(f"{name} out of range", where="gae", got=number, expected="a number in [0, 1]"))
    lengths = offsets.diff()
    after = offsets[1:].repeat_interleave(lengths) - torch.arange(values.numel(), device=values.device) - 1  # tokens left behind t
    next_values = torch.zeros_like(values, dtype=torch.float64)
    next_values[:-1] = values[1:].double()
    at_end = torch.zeros_like(next_values) if bootstrap_values is None else bootstrap_values.double().repeat_interleave(lengths)
    next_values = torch.where(after > 0, next_values, at_end)
    deltas = token_rewards.double() + gamma * next_values - values.double()
    advantages = _discounted_suffix_sums(deltas, after, gamma * lam)
    return advantages.to(values.dtype), (advantages + values.double()).to(values.dtype)


def _check_gae(token_rewards: Tensor, values: Tensor, offsets: Tensor, bootstrap_values: Tensor | None) -> None:
    check_same_shape("gae", token_rewards=token_rewards, values=values)
    check_offsets("gae", offsets, values.numel())
    check_finite("gae", token_rewards=token_rewards, values=values)
    if bootstrap_values is not None:
        check_same_shape("gae", bootstrap_values=bootstrap_values, responses=offsets[1:])
        check_finite("gae", bootstrap_values=bootstrap_values)


def _discounted_suffix_sums(x: Tensor, after: Tensor, discount: float) -> Tensor:
    """sum over k in [0, after_t] of discount^k x_{t+k}, by doubling: log2(longest) passes over the tokens, no loop over time.

    After the pass of ``step``, each entry holds the sum of its next 2 x step terms, cut at the end of its response.
    """
    longest = int(after.max()) + 1 if after.numel() else 0
    step = 1
    while step < longest:
        reached = torch.where(after[:-step] >= step, discount**step * x[step:], 0.0)
        x = torch.cat([x[:-step] + reached, x[-step:]])
        step *= 2
    return x


def group_relative(scores: Tensor, groups: Tensor, *, norm_by_std: bool, eps: float = 1e-6) -> Tensor:
    """Each score less its group's mean, divided by (standard deviation + eps) when asked (arXiv:2402.03300, section 4.1.2).

    The deviation is the unbiased one (n - 1). A group of one has no baseline but itself: its advantage is 0.

    Args:
        scores: [B].
        groups: [B] int64; samples of one prompt share a number.

    Returns:
        [B] float64.

    Raises:
        DataError: unequal lengths, or a score that is not finite.
    """
    check_same_shape("grpo", scores=scores, groups=groups)
    check_finite("grpo", scores=scores)
    _, member_of, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    exact = scores.double()
    zeros = torch.zeros(len(counts), dtype=torch.float64, device=scores.device)
    centred = exact - (zeros.index_add(0, member_of, exact) / counts)[member_of]
    if not norm_by_std:
        return centred
    variance = zeros.index_add(0, member_of, centred.square()) / (counts - 1).clamp(min=1)
    return centred / (variance.sqrt() + eps)[member_of]


def grpo(scores: Tensor, groups: Tensor, offsets: Tensor, *, norm_by_std: bool, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages, one number for all tokens of a response (arXiv:2402.03300).

    ``norm_by_std=False`` leaves out the division, as in Dr. GRPO (arXiv:2503.20783). See :func:`group_relative`.

    Returns:
        Advantages [N] float32.
    """
    check_offsets("grpo", offsets, int(offsets[-1]))
    check_same_shape("grpo", scores=scores, responses=offsets[1:])
    return group_relative(scores, groups, norm_by_std=norm_by_std, eps=eps)[sample_of_token(offsets)].float()


@register_advantage_estimator("gae", needs_values=True)
def gae_estimator(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """:func:`gae` with ``algorithm.gamma`` and ``algorithm.lam``; bootstraps only under ``algorithm.bootstrap_truncated``."""
    if inputs.values is None:
        raise DataError(
            explain("gae without values", where="advantage_estimator: gae", expected="values of a critic", do="add a critic, or use grpo")
        )
    if config.bootstrap_truncated and inputs.bootstrap_values is None:
        raise DataError(
            explain("gae without bootstrap values", where="algorithm.bootstrap_truncated", expected="a value after each response")
        )
    bootstrap = inputs.bootstrap_values if config.bootstrap_truncated else None
    advantages, returns = gae(
        inputs.token_rewards, inputs.values, inputs.offsets, gamma=config.gamma, lam=config.lam, bootstrap_values=bootstrap
    )
    return Advantages(advantages.float(), returns.float())


@register_advantage_estimator("grpo")
def grpo_estimator(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """:func:`grpo` with ``algorithm.norm_by_std``, on each response's whole reward: its score less the KL penalty, where there is one."""
    rewards = sum_per_sample(inputs.token_rewards.double(), inputs.offsets)
    return Advantages(grpo(rewards, inputs.groups, inputs.offsets, norm_by_std=config.norm_by_std))
