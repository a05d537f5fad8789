"""What the controller computes between the groups' calls: the KL penalty in the rewards, and advantages.

Both run where the columns are; only a few numbers reach this process. Either order gives the same numbers, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.algo.moments import Moments
from megarl.compat.batch import Estimate, Penalty, TrainerBatch, check_batch, check_whole_groups
from megarl.compat.kl_controller import estimator_of
from megarl.config.schema import AlgorithmConfig
from megarl.controller.metrics import StepMetrics
from megarl.controller.roles import needs_critic
from megarl.data.proto import DataProto
from megarl.errors import ConfigError, DataError, explain

_REWARDS = ("token_rewards",)
_ADVANTAGES = ("raw_advantages", "returns", "advantages")
_NO_PENALTY = "k1"  # any estimator: its coefficient is 0


def compute_advantage(batch: TrainerBatch, gamma: float | None = None, lam: float | None = None, whiten: bool = True) -> TrainerBatch:
    """Add ``advantages`` and, where the batch has ``values``, ``returns``; on a batch that has some already, anew.

    Args:
        batch: scored samples of a trainer, with log_probs and, for an estimator with a critic, values.
        gamma: discount per token; None: the configuration's ``algorithm.gamma``.
        lam: GAE lambda; None: ``algorithm.lam``.
        whiten: shift and scale the advantages of a critic's estimator to mean 0 and variance 1 over all tokens of the batch.

    Raises:
        DataError: a column or the scores are missing (the message names the call to make), or samples that the estimator compares.
        ConfigError: gamma or lam out of range.
    """
    check_batch(batch, "compute_advantage")
    algorithm = batch.run.config.algorithm
    gamma = algorithm.gamma if gamma is None else _number(gamma, "gamma", "compute_advantage", at_most=1.0)
    lam = algorithm.lam if lam is None else _number(lam, "lam", "compute_advantage", at_most=1.0)
    _check_scored(batch, "compute_advantage")
    batch.require("log_probs", by="compute_advantage")
    if needs_critic(batch.run.config):
        batch.require("values", "last_values", by="compute_advantage")
    else:
        check_whole_groups(batch, "compute_advantage")
    proto, metrics = _without(batch.proto, _ADVANTAGES), StepMetrics()
    if batch.penalty is None:
        proto, infos = _token_rewards(batch, batch.scores, coef=0.0, estimator=_NO_PENALTY)
        metrics.add_rewards(infos)
    return _estimated(replace(batch, proto=proto), replace(algorithm, gamma=gamma, lam=lam, whiten_advantages=whiten), metrics)


def apply_kl_penalty(batch: TrainerBatch, kl_ctrl: Any, kl_penalty: str = "kl") -> TrainerBatch:
    """Take ``kl_ctrl.value`` x KL to the reference off the reward of every token, and tell the controller how large the KL was.

    On a batch that has advantages they are computed anew with the settings that they were computed with. The result is to be trained
    on in the place of ``batch``, whose advantages are refused by the updates from here on.

    Args:
        batch: scored samples with log_probs and ref_log_probs.
        kl_ctrl: with ``value``, the coefficient, and ``update(current_kl, n_steps)``: nats per token, and samples.
        kl_penalty: kl (or k1) | abs | mse (k2) | low_var_kl (k3).

    Raises:
        DataError: a column or the scores are missing; a penalty is in the rewards already; somebody has learnt from these advantages.
        ConfigError: a penalty of another name, or a coefficient that is negative or no finite number.
    """
    check_batch(batch, "apply_kl_penalty")
    estimator, coef = estimator_of(kl_penalty), _coefficient(kl_ctrl)
    if batch.penalty is not None:
        got = f"coefficient {batch.penalty.coef:g}, {batch.penalty.estimator}"
        raise DataError(explain("a KL penalty is in the rewards already", where="apply_kl_penalty", got=got, do="apply it once a batch"))
    if batch.estimate is not None and batch.estimate.trained:
        got = f"{' and '.join(batch.estimate.trained)} trained on them"
        do = "call apply_kl_penalty before update_critic and update_actor, and pass them what it returns"
        raise DataError(explain("the penalty would come too late for these advantages", where="apply_kl_penalty", got=got, do=do))
    batch.require("log_probs", "ref_log_probs", by="apply_kl_penalty")
    _check_scored(batch, "apply_kl_penalty")
    if batch.estimate is not None and not needs_critic(batch.run.config):
        check_whole_groups(batch, "apply_kl_penalty")
    metrics = StepMetrics()
    proto, infos = _token_rewards(batch, batch.scores, coef=coef, estimator=estimator)
    metrics.add_kl(infos, coef)
    metrics.add_rewards(infos)
    kl = metrics.values["actor/reward_kl_penalty"]
    found = replace(batch, proto=proto, penalty=Penalty(coef, kl, estimator), estimate=None, metrics={**batch.metrics, **metrics.values})
    if batch.estimate is not None:
        known = batch.estimate
        settings = replace(batch.run.config.algorithm, gamma=known.gamma, lam=known.lam, whiten_advantages=known.whiten)
        found = _estimated(found, settings, metrics)
    kl_ctrl.update(kl, len(batch))
    if batch.estimate is not None:
        batch.estimate.superseded = True
    return found


def mean_kl(batch: TrainerBatch) -> float:
    """Mean over response tokens of log_probs - ref_log_probs, nats: how far the policy that drew the samples is from the reference."""
    _, infos = _token_rewards(batch, np.zeros(len(batch)), coef=0.0, estimator="k1")
    return sum(i["kl_sum"] for i in infos) / sum(i["tokens"] for i in infos)


def _token_rewards(batch: TrainerBatch, scores: np.ndarray, *, coef: float, estimator: str) -> tuple[DataProto, list[dict[str, Any]]]:
    """The batch with fresh ``token_rewards`` and nothing that follows from others."""
    proto = _without(batch.proto, (*_REWARDS, *_ADVANTAGES))
    return batch.run.groups.scribe.apply_kl_penalty(proto, scores, coef=coef, estimator=estimator).result()


def _estimated(batch: TrainerBatch, algorithm: AlgorithmConfig, metrics: StepMetrics) -> TrainerBatch:
    """Advantages from the batch's token rewards, as the controller's own step computes them."""
    groups = batch.run.groups
    proto, infos = groups.scribe.compute_advantage(batch.proto, batch.scores, algorithm).result()
    moments: Moments = metrics.add_returns(infos)
    whitened = algorithm.whiten_advantages and groups.critic is not None
    proto, infos = groups.scribe.whiten(proto, moments if whitened else None).result()
    metrics.add_advantages(infos)
    estimate = Estimate(algorithm.gamma, algorithm.lam, algorithm.whiten_advantages, dict(metrics.values))
    return replace(batch, proto=proto, estimate=estimate, metrics={**batch.metrics, **metrics.values})


def _coefficient(kl_ctrl: Any) -> float:
    if not hasattr(kl_ctrl, "value") or not callable(getattr(kl_ctrl, "update", None)):
        expected = "as AdaptiveKLController: value, and update(current_kl, n_steps)"
        raise ConfigError(explain("no KL controller", where="apply_kl_penalty", got=type(kl_ctrl).__name__, expected=expected))
    return _number(kl_ctrl.value, "kl_ctrl.value", "apply_kl_penalty", at_most=math.inf)


def _number(given: Any, name: str, where: str, *, at_most: float) -> float:
    """A finite number from 0 to ``at_most``. Raises ConfigError."""
    expected = "a finite number from 0" if math.isinf(at_most) else f"a number in [0, {at_most:g}]"
    try:
        number = float(given)
    except (TypeError, ValueError) as error:
        raise ConfigError(explain(f"{name} is no number", where=where, got=repr(given), expected=expected)) from error
    if not (math.isfinite(number) and 0.0 <= number <= at_most):
        raise ConfigError(explain(f"{name} out of range", where=where, got=number, expected=expected))
    return number


def _without(proto: DataProto, columns: tuple[str, ...]) -> DataProto:
    return proto.select([name for name in proto.column_names if name not in columns])


def _check_scored(batch: TrainerBatch, by: str) -> None:
    if batch.scores is None:
        do = "pass reward_fn to the trainer, or score the samples yourself: batch.with_scores(scores)"
        raise DataError(explain("the samples have no scores", where=by, do=do))
