import math

import numpy as np
import pytest

from megarl.errors import ConfigError, DataError, DivergedError
from megarl.rewards.policy import apply_failure_policy
from megarl.types import Scores

GROUPS = np.array([7, 7, 3, 3, 5, 5])


def scores_of(*entries):
    """A number is a score, a string a failed status."""
    score = np.array([math.nan if isinstance(entry, str) else entry for entry in entries])
    status = tuple(entry if isinstance(entry, str) else "ok" for entry in entries)
    return Scores(score, status, message=tuple(f"item {i}: {s}" for i, s in enumerate(status) if s != "ok"))


def test_drop_group_leaves_out_the_whole_group():
    kept = apply_failure_policy(scores_of(1.0, "timeout", 0.5, 0.25, 0.0, 1.0), GROUPS, "drop_group", 0.5)
    assert kept.keep.tolist() == [False, False, True, True, True, True]
    assert kept.score[kept.keep].tolist() == [0.5, 0.25, 0.0, 1.0]
    assert (kept.failed, kept.dropped, kept.failed_by_status) == (1, 2, {"timeout": 1})


def test_zero_scores_zero_because_the_recipe_says_so():
    scores = scores_of(1.0, "timeout", 0.5, "error", 0.0, 1.0)
    kept = apply_failure_policy(scores, GROUPS, "zero", 0.5)
    assert kept.keep.all()
    assert kept.score.tolist() == [1.0, 0.0, 0.5, 0.0, 0.0, 1.0]
    assert (kept.failed, kept.dropped) == (2, 0)
    assert math.isnan(scores.score[1])  # what the pool said stays as it was


def test_abort_ends_at_the_first_failure():
    with pytest.raises(DataError, match=r"1 of 6 reward calls failed[\s\S]*item 1: invalid"):
        apply_failure_policy(scores_of(1.0, "invalid", 0.5, 0.0, 0.0, 1.0), GROUPS, "abort", 1.0)


@pytest.mark.parametrize("policy", ["drop_group", "zero", "abort"])
def test_nothing_happens_without_failures(policy):
    kept = apply_failure_policy(scores_of(*range(6)), GROUPS, policy, 0.0)
    assert kept.keep.all()
    assert kept.score.tolist() == [0, 1, 2, 3, 4, 5]
    assert kept.failed_by_status == {}


@pytest.mark.parametrize("policy", ["drop_group", "zero"])
def test_the_run_stops_above_the_share_and_not_at_it(policy):
    scores = scores_of("error", 1.0, 1.0, 1.0, "timeout", 1.0)
    assert apply_failure_policy(scores, GROUPS, policy, 2 / 6).failed == 2
    with pytest.raises(DivergedError, match=r"2 of 6[\s\S]*at most 33.0%"):
        apply_failure_policy(scores, GROUPS, policy, 0.33)


def test_no_sample_left_is_an_error():
    with pytest.raises(DataError, match="no sample left"):
        apply_failure_policy(scores_of("error", 1.0), np.array([0, 0]), "drop_group", 0.5)


def test_scores_that_contradict_their_statuses_are_refused():
    for scores in (Scores(np.array([0.0]), ("error",)), Scores(np.array([math.nan]), ("ok",)), Scores(np.array([1.0, 2.0]), ("ok",))):
        with pytest.raises(DataError, match="do not fit"):
            apply_failure_policy(scores, np.zeros(len(scores.score)), "zero", 1.0)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="drop_group | zero | abort"):
        apply_failure_policy(scores_of(1.0), np.array([0]), "ignore", 1.0)
    with pytest.raises(ConfigError, match="share out of range"):
        apply_failure_policy(scores_of(1.0), np.array([0]), "zero", 1.5)
