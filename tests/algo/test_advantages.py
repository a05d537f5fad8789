import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageInputs,
    Advantages,
    gae,
    group_relative,
    grpo,
    register_advantage_estimator,
)
from megarl.algo.kl import kl_penalised_rewards
from megarl.algo.ragged import sum_per_sample
from megarl.config.schema import AlgorithmConfig
from megarl.errors import ConfigError, DataError

from .ragged_batches import lengths, normals, offsets_of, quick, rows_of, seeds

shares = st.sampled_from([0.0, 0.3, 0.95, 0.99, 1.0])


def slow_gae(rewards, values, offsets, gamma, lam, bootstrap):
    advantages = [0.0] * len(rewards)
    for sample, (start, end) in enumerate(rows_of(offsets)):
        following, next_value = 0.0, bootstrap[sample]
        for t in range(end - 1, start - 1, -1):
            delta = rewards[t] + gamma * next_value - values[t]
            following = delta + gamma * lam * following
            advantages[t] = following
            next_value = values[t]
    return advantages


@quick
@given(lengths, seeds, shares, shares, st.booleans())
def test_gae_equals_the_definition(counts, seed, gamma, lam, bootstrapped):
    offsets = offsets_of(counts)
    rewards, values, bootstrap = normals(seed, sum(counts), sum(counts), len(counts))
    advantages, returns = gae(rewards, values, offsets, gamma=gamma, lam=lam, bootstrap_values=bootstrap if bootstrapped else None)
    ends = bootstrap.tolist() if bootstrapped else [0.0] * len(counts)
    expected = torch.tensor(slow_gae(rewards.tolist(), values.tolist(), offsets, gamma, lam, ends), dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(returns, expected + values, rtol=1e-10, atol=1e-9)


def test_gae_by_hand():
    # two tokens: delta = [0 + .5*4 - 2, 1 - 4] = [0, -3]; A = [0 + .5*.5*-3, -3]
    rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 4.0])
    advantages, returns = gae(rewards, values, torch.tensor([0, 2]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [-0.75, -3.0]
    assert returns.tolist() == [1.25, 1.0]
    assert advantages.dtype == torch.float32


@quick
@given(lengths, seeds)
def test_gae_of_a_sample_does_not_depend_on_its_neighbours(counts, seed):
    offsets = offsets_of(counts)
    rewards, values = normals(seed, sum(counts), sum(counts), dtype=torch.float32)
    together, _ = gae(rewards, values, offsets, gamma=0.99, lam=0.95)
    alone = [gae(rewards[a:b], values[a:b], torch.tensor([0, b - a]), gamma=0.99, lam=0.95)[0] for a, b in rows_of(offsets)]
    assert torch.equal(together, torch.cat(alone))


def test_gae_with_gamma_and_lambda_one_is_return_minus_value():
    offsets = offsets_of([3, 5000])
    rewards, values = normals(1, 5003, 5003)
    advantages, returns = gae(rewards, values, offsets, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns[offsets[:-1]], sum_per_sample(rewards, offsets))
    torch.testing.assert_close(advantages, returns - values)


def test_gae_accepts_no_tokens_and_empty_responses():
    nothing = torch.empty(0)
    assert gae(nothing, nothing, torch.tensor([0, 0]), gamma=1.0, lam=1.0)[0].numel() == 0
    advantages, _ = gae(torch.ones(2), torch.zeros(2), torch.tensor([0, 1, 1, 2]), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("offsets", [torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([0, 2, 1, 3]), torch.tensor([0.0, 3.0])])
def test_gae_refuses_offsets_that_do_not_cut_the_tokens(offsets):
    with pytest.raises(DataError, match="offsets"):
        gae(torch.zeros(3), torch.zeros(3), offsets, gamma=1.0, lam=1.0)


def test_gae_refuses_bad_numbers():
    good, bad, offsets = torch.zeros(3), torch.tensor([0.0, math.nan, 0.0]), torch.tensor([0, 3])
    with pytest.raises(DataError, match="values is not finite[\\s\\S]*position 1"):
        gae(good, bad, offsets, gamma=1.0, lam=1.0)
    with pytest.raises(DataError, match="unequal shape"):
        gae(good, torch.zeros(1), offsets, gamma=1.0, lam=1.0)
    with pytest.raises(ConfigError, match="gamma"):
        gae(good, good, offsets, gamma=1.5, lam=1.0)


def slow_group_relative(scores, groups, norm_by_std, eps):
    result = []
    for score, group in zip(scores, groups, strict=True):
        members = [s for s, g in zip(scores, groups, strict=True) if g == group]
        mean = math.fsum(members) / len(members)
        std = math.sqrt(math.fsum((m - mean) ** 2 for m in members) / (len(members) - 1)) if len(members) > 1 else 0.0
        result.append((score - mean) / (std + eps) if norm_by_std else score - mean)
    return result


grouped = st.lists(st.tuples(st.floats(-5, 5), st.integers(-3, 3), st.integers(1, 30)), min_size=1, max_size=24)


@quick
@given(grouped, st.booleans())
def test_grpo_equals_the_definition(samples, norm_by_std):
    scores, groups, counts = (list(column) for column in zip(*samples, strict=True))
    got = group_relative(torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), norm_by_std=norm_by_std, eps=1e-3)
    expected = torch.tensor(slow_group_relative(scores, groups, norm_by_std, 1e-3), dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    per_token = grpo(torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), offsets_of(counts), norm_by_std=norm_by_std, eps=1e-3)
    torch.testing.assert_close(per_token, expected.repeat_interleave(torch.tensor(counts)).float())


@quick
@given(grouped, seeds)
def test_grpo_follows_a_permutation_of_the_samples(samples, seed):
    scores, groups, _ = (torch.tensor(column) for column in zip(*samples, strict=True))
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
    straight = group_relative(scores, groups, norm_by_std=True)
    torch.testing.assert_close(group_relative(scores[order], groups[order], norm_by_std=True), straight[order], rtol=1e-6, atol=1e-6)


def test_grpo_of_equal_scores_and_of_a_single_sample_is_zero():
    assert group_relative(torch.tensor([0.1, 0.1, 0.1, 7.0]), torch.tensor([0, 0, 0, 1]), norm_by_std=True).abs().max() < 1e-9


def test_grpo_refuses_a_failed_score():
    with pytest.raises(DataError, match="scores is not finite"):
        group_relative(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]), norm_by_std=True)


def test_estimators_are_found_by_name():
    rewards, offsets = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0, 2, 3])
    inputs = AdvantageInputs(rewards, torch.tensor([1.0, 3.0]), torch.tensor([5, 5]), offsets, torch.zeros(3))
    by_gae = ADVANTAGE_ESTIMATORS["gae"](inputs, AlgorithmConfig())
    assert by_gae.advantages.tolist() == [1.0, 1.0, 3.0]
    by_grpo = ADVANTAGE_ESTIMATORS["grpo"](inputs, AlgorithmConfig(norm_by_std=False))
    assert by_grpo.advantages.tolist() == [-1.0, -1.0, 1.0]
    assert by_grpo.returns is None


def test_gae_bootstraps_only_when_the_recipe_says_so():
    inputs = AdvantageInputs(torch.zeros(1), torch.zeros(1), torch.tensor([0]), torch.tensor([0, 1]), torch.zeros(1), torch.tensor([2.0]))
    assert ADVANTAGE_ESTIMATORS["gae"](inputs, AlgorithmConfig()).advantages.tolist() == [0.0]
    assert ADVANTAGE_ESTIMATORS["gae"](inputs, AlgorithmConfig(bootstrap_truncated=True)).advantages.tolist() == [2.0]
    silent = AdvantageInputs(torch.zeros(1), torch.zeros(1), torch.tensor([0]), torch.tensor([0, 1]), torch.zeros(1))
    with pytest.raises(DataError, match="without bootstrap values"):
        ADVANTAGE_ESTIMATORS["gae"](silent, AlgorithmConfig(bootstrap_truncated=True))


def test_gae_without_a_critic_says_so():
    inputs = AdvantageInputs(torch.zeros(1), torch.zeros(1), torch.tensor([0]), torch.tensor([0, 1]))
    with pytest.raises(DataError, match="gae without values"):
        ADVANTAGE_ESTIMATORS["gae"](inputs, AlgorithmConfig())


def test_a_package_adds_its_own_estimator():
    @register_advantage_estimator("test_score_itself")
    def score_itself(inputs, config):
        return Advantages(inputs.scores.repeat_interleave(inputs.offsets.diff()))

    inputs = AdvantageInputs(torch.zeros(2), torch.tensor([4.0]), torch.tensor([0]), torch.tensor([0, 2]))
    assert ADVANTAGE_ESTIMATORS["test_score_itself"](inputs, AlgorithmConfig()).advantages.tolist() == [4.0, 4.0]
    with pytest.raises(ConfigError, match="registered twice"):
        register_advantage_estimator("test_score_itself")(lambda inputs, config: None)
    with pytest.raises(ConfigError, match="gae | grpo"):
        ADVANTAGE_ESTIMATORS["gea"]


def test_grpo_compares_rewards_less_their_kl_penalty() -> None:
    """Two responses of equal score: the one that went farther from the reference has the lower advantage."""
    offsets = torch.tensor([0, 2, 5])
    scores, groups = torch.tensor([0.5, 0.5]), torch.tensor([0, 0])
    log_probs, ref = torch.full((5,), -1.0), torch.tensor([-1.0, -1.0, -2.0, -2.0, -2.0])
    found = {}
    for coef in (0.0, 0.1):
        rewards, _ = kl_penalised_rewards(scores, log_probs, ref, offsets, coef=coef, estimator="k1")
        inputs = AdvantageInputs(rewards, scores, groups, offsets, None, None)
        found[coef] = ADVANTAGE_ESTIMATORS["grpo"](inputs, AlgorithmConfig(advantage_estimator="grpo", norm_by_std=False)).advantages
    assert found[0.0].tolist() == [0.0] * 5
    # 3 tokens x 1 nat x 0.1 apart, and centred.
    assert found[0.1].tolist() == pytest.approx([0.15, 0.15, -0.15, -0.15, -0.15])
