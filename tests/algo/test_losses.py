import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megarl.algo.aggregate import LOSS_AGGREGATIONS, token_weights
from megarl.algo.policy_losses import POLICY_LOSSES, PolicyLossInputs, ppo_clip
from megarl.algo.value_losses import clipped_value_loss
from megarl.config.schema import ActorConfig
from megarl.errors import ConfigError, DataError

from .ragged_batches import lengths, normals, offsets_of, quick, seeds

CLIPS = {"clip_low": 0.2, "clip_high": 0.3, "clip_dual": 3.0}


def slow_ppo(log_prob, old, advantage, clip_low, clip_high, clip_dual):
    """(loss, d loss / d log_prob, clipped, dual clipped) of one token, by cases."""
    ratio = math.exp(log_prob - old)
    if advantage >= 0:
        beyond = ratio > 1 + clip_high
        return (-advantage * (1 + clip_high), 0.0, True, False) if beyond else (-advantage * ratio, -advantage * ratio, False, False)
    if clip_dual and ratio > clip_dual:
        return -advantage * clip_dual, 0.0, False, True
    if ratio < 1 - clip_low:
        return -advantage * (1 - clip_low), 0.0, True, False
    return -advantage * ratio, -advantage * ratio, False, False


@quick
@given(seeds, st.integers(1, 200), st.floats(0.01, 3), st.sampled_from([0.0, 3.0]))
def test_ppo_clip_and_its_gradient_equal_the_cases(seed, count, spread, clip_dual):
    noise, old, advantages = normals(seed, count, count, count)
    log_probs = (old + spread * noise).requires_grad_()
    result = ppo_clip(log_probs, old, advantages, clip_low=0.2, clip_high=0.3, clip_dual=clip_dual)
    result.per_token.sum().backward()
    expected = [slow_ppo(*token, 0.2, 0.3, clip_dual) for token in zip(log_probs.tolist(), old.tolist(), advantages.tolist(), strict=True)]
    loss, gradient, clipped, dual = (torch.tensor(column, dtype=torch.float64) for column in zip(*expected, strict=True))
    torch.testing.assert_close(result.per_token, loss)
    torch.testing.assert_close(log_probs.grad, gradient)
    assert result.metric_sums["clip_fraction"] == clipped.sum()
    assert result.metric_sums["dual_clip_fraction"] == dual.sum()
    torch.testing.assert_close(result.metric_sums["kl"], (old - log_probs.detach()).sum())


def test_ppo_clip_at_ratio_one_is_the_policy_gradient():
    old, advantages = normals(3, 50, 50)
    log_probs = old.clone().requires_grad_()
    ppo_clip(log_probs, old, advantages, **CLIPS).per_token.sum().backward()
    torch.testing.assert_close(log_probs.grad, -advantages)


def test_ppo_clip_far_from_the_old_policy_stays_finite():
    log_probs = torch.tensor([0.0, -200.0], requires_grad=True)
    result = ppo_clip(log_probs, torch.tensor([-200.0, 0.0]), torch.tensor([-1.0, -1.0]), clip_low=0.2, clip_high=0.2, clip_dual=0.0)
    result.per_token.sum().backward()
    assert torch.isfinite(result.per_token).all()
    assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_ppo_clip_lets_nan_through(place):
    tensors = [torch.zeros(2), torch.zeros(2), torch.ones(2)]
    tensors[place][1] = math.nan
    per_token = ppo_clip(*tensors, **CLIPS).per_token
    assert torch.isnan(per_token).tolist() == [False, True]


def test_ppo_clip_refuses_what_can_not_be_meant():
    x = torch.zeros(3)
    with pytest.raises(DataError, match="unequal shape"):
        ppo_clip(x, x, torch.zeros(1), **CLIPS)
    for bad in ({"clip_low": -0.1}, {"clip_low": 1.1}, {"clip_high": math.inf}, {"clip_dual": 0.9}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            ppo_clip(x, x, x, **(CLIPS | bad))


def test_the_recipe_chooses_the_policy_loss_and_its_clips():
    log_probs = torch.tensor([0.0, math.log(2.0)])
    inputs = PolicyLossInputs(log_probs, torch.zeros(2), torch.ones(2), torch.tensor([0, 2]))
    config = ActorConfig(samples_per_mini_batch=1, clip_ratio_high=0.5)
    assert POLICY_LOSSES[config.policy_loss](inputs, config).per_token.tolist() == [-1.0, -1.5]


@quick
@given(seeds, st.integers(1, 200), st.floats(0.0, 2.0))
def test_value_loss_and_its_gradient_equal_the_cases(seed, count, clip):
    values, old, returns = normals(seed, count, count, count)
    values.requires_grad_()
    per_token, clipped = clipped_value_loss(values, old, returns, clip=clip)
    per_token.sum().backward()
    for i, (value, before, target) in enumerate(zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)):
        near = min(max(value, before - clip), before + clip) if clip else value
        plain, cut = (value - target) ** 2, (near - target) ** 2
        assert per_token[i].item() == pytest.approx(0.5 * max(plain, cut), abs=1e-12)
        assert clipped[i].item() == (cut > plain)
        assert values.grad[i].item() == pytest.approx(0.0 if cut > plain else value - target, abs=1e-9)


def test_value_loss_refuses_a_negative_clip():
    with pytest.raises(ConfigError, match="value clip"):
        clipped_value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip=-1.0)


def slow_aggregate(per_token, counts, mode):
    rows, start = [], 0
    for count in counts:
        rows.append(per_token[start : start + count])
        start += count
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(counts)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / len(rows)


@quick
@given(lengths, seeds, st.sampled_from(LOSS_AGGREGATIONS), st.randoms(use_true_random=False))
def test_the_loss_does_not_depend_on_packing(counts, seed, mode, random):
    (per_token,) = normals(seed, sum(counts))
    offsets = offsets_of(counts).tolist()
    order = list(range(len(counts)))
    random.shuffle(order)
    cuts = sorted(random.sample(range(1, len(order)), random.randint(0, len(order) - 1)))
    total = 0.0
    for start, end in zip([0, *cuts], [*cuts, len(order)], strict=True):
        rows = order[start:end]
        local = torch.tensor([counts[row] for row in rows])
        weights = token_weights(local, mode, total_tokens=sum(counts), total_samples=len(counts))
        total += (weights.double() * torch.cat([per_token[offsets[row] : offsets[row + 1]] for row in rows])).sum().item()
    assert total == pytest.approx(slow_aggregate(per_token.tolist(), counts, mode), rel=1e-5, abs=1e-5)


@quick
@given(lengths)
def test_weights_of_means_sum_to_one(counts):
    for mode in ("token-mean", "seq-mean-token-mean"):
        weights = token_weights(torch.tensor(counts), mode, total_tokens=sum(counts), total_samples=len(counts))
        assert weights.shape == (sum(counts),)
        assert weights.double().sum().item() == pytest.approx(1.0, rel=1e-5)


@quick
@given(lengths, lengths)
def test_weights_know_only_the_totals_of_others(counts, others):
    assume(len(others) > 0)
    totals = {"total_tokens": sum(counts) + sum(others), "total_samples": len(counts) + len(others)}
    for mode in LOSS_AGGREGATIONS:
        both = token_weights(torch.tensor(counts + others), mode, **totals)
        assert torch.equal(both[: sum(counts)], token_weights(torch.tensor(counts), mode, **totals))


def test_token_weights_refuse_wrong_totals_and_modes():
    with pytest.raises(DataError, match="smaller than one micro-batch"):
        token_weights(torch.tensor([2, 3]), "token-mean", total_tokens=4, total_samples=2)
    with pytest.raises(DataError, match="smaller than one micro-batch"):
        token_weights(torch.tensor([2, 3]), "token-mean", total_tokens=5, total_samples=1)
    with pytest.raises(ConfigError, match="token-mean"):
        token_weights(torch.tensor([2]), "mean", total_tokens=2, total_samples=1)
