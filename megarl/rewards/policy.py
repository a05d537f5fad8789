"""What a step does with samples whose reward call failed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from megarl.errors import ConfigError, DataError, DivergedError, explain
from megarl.types import Scores

FAILURE_POLICIES = ("drop_group", "zero", "abort")


@dataclass(frozen=True)
class Kept:
    """Which samples go on, and with which score."""

    keep: np.ndarray  # [B] bool
    score: np.ndarray  # [B] float64; NaN where keep is False and the call failed
    failed: int  # failed calls
    dropped: int  # samples left out: failed ones and their groups
    failed_by_status: dict[str, int]  # error, timeout, invalid -> calls


def apply_failure_policy(scores: Scores, groups: np.ndarray, policy: str, max_failed_share: float) -> Kept:
    """Apply ``policy`` to the failed calls of a step.

    drop_group leaves out every sample of a group with a failed call: a group-relative baseline of the others would be biased.
    zero gives failed samples the score 0, since the recipe says so. abort ends the run at the first failure.

    Args:
        scores: of B samples.
        groups: [B], samples of one prompt share a number.
        policy: one of ``FAILURE_POLICIES``.
        max_failed_share: share of failed calls, in [0, 1], above which the run stops whatever the policy.

    Raises:
        ConfigError: unknown policy, or a share outside [0, 1].
        DataError: a failure under abort, no sample left, or scores whose parts do not fit together.
        DivergedError: more than ``max_failed_share`` of the calls failed.
    """
    if policy not in FAILURE_POLICIES:
        raise ConfigError(
            explain("unknown failure policy", where="reward.on_failure", got=repr(policy), expected=" | ".join(FAILURE_POLICIES))
        )
    if not 0.0 <= max_failed_share <= 1.0:
        raise ConfigError(
            explain("share out of range", where="reward.max_failed_share", got=max_failed_share, expected="a number in [0, 1]")
        )
    failed = _failed(scores, groups)
    count = int(failed.sum())
    by_status = dict(Counter(status for status in scores.status if status != "ok"))
    said = "; ".join(scores.message[:3])
    if count and policy == "abort":
        raise DataError(
            explain(f"{count} of {len(failed)} reward calls failed", where="reward.on_failure: abort", got=f"{by_status}. {said}")
        )
    if count > max_failed_share * len(failed):
        raise DivergedError(
            explain(
                "too many reward calls failed",
                where="reward.max_failed_share",
                got=f"{count} of {len(failed)}: {by_status}. {said}",
                expected=f"at most {max_failed_share:.1%}",
                do="correct the reward function, raise reward.timeout_s, or raise reward.max_failed_share",
            )
        )
    if policy == "zero":
        return Kept(np.ones(len(failed), dtype=bool), np.where(failed, 0.0, scores.score), count, 0, by_status)
    keep = ~np.isin(groups, groups[failed])
    if not keep.any():
        raise DataError(explain("no sample left after dropping failed groups", where="reward.on_failure", got=f"{by_status}. {said}"))
    return Kept(keep, scores.score.copy(), count, int((~keep).sum()), by_status)


def _failed(scores: Scores, groups: np.ndarray) -> np.ndarray:
    failed = np.array([status != "ok" for status in scores.status], dtype=bool)
    if not len(failed) == len(scores.score) == len(groups) or not np.array_equal(failed, ~np.isfinite(scores.score)):
        raise DataError(
            explain(
                "scores do not fit their statuses",
                where="apply_failure_policy",
                got=f"{len(scores.score)} scores, {len(failed)} statuses, {len(groups)} groups",
                expected="one of each per sample; a finite score exactly where the status is ok",
            )
        )
    return failed
