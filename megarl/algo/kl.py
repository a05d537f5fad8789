"""KL to the reference: estimators, the penalty in the rewards, and the controllers of its coefficient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.algo.ragged import check_finite, check_offsets, check_same_shape, sum_per_sample
from megarl.config.schema import KlConfig
from megarl.errors import CheckpointError, ConfigError, DataError, DivergedError, explain

KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
MAX_PROPORTIONAL_ERROR = 0.2  # arXiv:1909.08593, section 2.2


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) per token from one drawn token (http://joschu.net/blog/kl-approx.html).

    With d = log_probs - ref_log_probs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, abs = |d|. Nothing is clamped.

    Args:
        log_probs, ref_log_probs: [N], nats.
        estimator: one of ``KL_ESTIMATORS``.

    Returns:
        [N], nats.

    Raises:
        ConfigError: unknown estimator.
        DataError: tensors of unequal shape.
    """
    check_same_shape("kl_estimate", log_probs=log_probs, ref_log_probs=ref_log_probs)
    d = log_probs - ref_log_probs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        return torch.expm1(-d) + d  # expm1: exp(-d) - 1 loses all digits for small d
    if estimator == "abs":
        return d.abs()
    raise ConfigError(explain("unknown KL estimator", got=repr(estimator), expected=" | ".join(KL_ESTIMATORS)))


def kl_penalised_rewards(
    scores: Tensor, log_probs: Tensor, ref_log_probs: Tensor, offsets: Tensor, *, coef: float, estimator: str
) -> tuple[Tensor, Tensor]:
    """Token rewards -coef x KL_t, plus the score on the last token of each response (arXiv:1909.08593, equation 2).

    Args:
        scores: [B].
        log_probs, ref_log_probs: [N], of the policy that the step started with and of the reference, nats.
        offsets: [B + 1] int64; every response has at least one token.
        coef: penalty per nat.
        estimator: one of ``KL_ESTIMATORS``.

    Returns:
        Token rewards [N] in the dtype of ``log_probs``, and the KL of each response [B] float64, nats, not multiplied by ``coef``.

    Raises:
        DataError: shapes that do not fit, an empty response (its score would have no token to land on), a number that is
            not finite.
        DivergedError: the estimate overflows.
    """
    check_offsets("kl_penalised_rewards", offsets, log_probs.numel())
    check_same_shape("kl_penalised_rewards", scores=scores, responses=offsets[1:])
    check_finite("kl_penalised_rewards", scores=scores, log_probs=log_probs, ref_log_probs=ref_log_probs)
    if bool((offsets.diff() == 0).any()):
        empty = (offsets.diff() == 0).nonzero().flatten().tolist()
        raise DataError(
            explain("responses without a token", where="kl_penalised_rewards", got=f"samples {empty[:8]}", expected="1 or more")
        )
    kl = kl_estimate(log_probs.double(), ref_log_probs.double(), estimator)
    if not bool(torch.isfinite(kl).all()):
        raise DivergedError(
            explain(
                "the KL estimate is not finite: policy and reference are too far apart",
                where=f"estimator {estimator}",
                got=f"log-prob difference down to {float((log_probs - ref_log_probs).min()):.1f} nats",
                do="use estimator k1 or k2, a larger coefficient, or a smaller learning rate",
            )
        )
    rewards = -coef * kl
    rewards[offsets[1:] - 1] += scores.double()
    return rewards.to(log_probs.dtype), sum_per_sample(kl, offsets)


class FixedKLController:
    """A coefficient that stays."""

    def __init__(self, coef: float):
        self.value = _finite_at_least_zero("kl.coef", coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to adapt; a KL that is not finite raises DivergedError all the same."""
        _check_kl(current_kl)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = _value_of(state)


class AdaptiveKLController:
    """A coefficient that steers the KL to ``target`` (arXiv:1909.08593, section 2.2).

    value <- value (1 + clip(current / target - 1, -0.2, 0.2) n_steps / horizon)

    Args:
        init_kl: first coefficient.
        target: KL aimed at, in the unit of ``current_kl`` (megarl: nats per token).
        horizon: in the unit of ``n_steps`` (megarl: samples).
    """

    def __init__(self, init_kl: float, target: float, horizon: int):
        self.value = _finite_at_least_zero("kl.coef", init_kl)
        if not (target > 0 and math.isfinite(target) and horizon > 0):
            raise ConfigError(explain("adaptive KL out of range", got=f"target={target}, horizon={horizon}", expected="both above 0"))
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient after a step of ``n_steps`` samples whose KL was ``current_kl``.

        Raises:
            DivergedError: the KL is not finite.
            ConfigError: the step is so long that the factor could reach 0 or below (n_steps >= 5 horizon).
        """
        _check_kl(current_kl)
        if MAX_PROPORTIONAL_ERROR * n_steps >= self.horizon:
            raise ConfigError(
                explain(
                    "one step would turn the KL coefficient negative",
                    where="kl.horizon",
                    got=f"horizon={self.horizon} for {n_steps} samples per step",
                    expected=f"a horizon above {MAX_PROPORTIONAL_ERROR * n_steps:g}",
                    do="raise algorithm.kl.horizon",
                )
            )
        error = min(max(current_kl / self.target - 1.0, -MAX_PROPORTIONAL_ERROR), MAX_PROPORTIONAL_ERROR)
        self.value *= 1.0 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = _value_of(state)


KLController = FixedKLController | AdaptiveKLController


def kl_controller(config: KlConfig) -> KLController:
    """The controller that ``algorithm.kl`` asks for.

    Raises:
        ConfigError: unknown controller, or a number out of range.
    """
    if config.controller == "fixed":
        return FixedKLController(config.coef)
    if config.controller == "adaptive":
        return AdaptiveKLController(config.coef, config.target, config.horizon)
    raise ConfigError(explain("unknown algorithm.kl.controller", got=repr(config.controller), expected="adaptive | fixed"))


def _finite_at_least_zero(name: str, number: float) -> float:
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(explain(f"{name} out of range", got=number, expected="a finite number of 0 or more"))
    return float(number)


def _check_kl(current_kl: float) -> None:
    if not math.isfinite(current_kl):
        raise DivergedError(explain("the KL to the reference is not finite", where="KL controller", got=current_kl))


def _value_of(state: dict[str, float]) -> float:
    if set(state) != {"value"} or not math.isfinite(state["value"]) or state["value"] < 0:
        raise CheckpointError(explain("state of a KL controller", got=state, expected="{'value': a finite number of 0 or more}"))
    return float(state["value"])
