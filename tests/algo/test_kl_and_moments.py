import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    kl_controller,
    kl_estimate,
    kl_penalised_rewards,
)
from megarl.algo.moments import Moments, whiten
from megarl.config.schema import KlConfig
from megarl.errors import CheckpointError, ConfigError, DataError, DivergedError

from .ragged_batches import lengths, normals, offsets_of, quick, rows_of, seeds

SLOW_KL = {
    "k1": lambda p, q: p - q,
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "k3": lambda p, q: math.exp(q - p) - 1 - (q - p),
    "abs": lambda p, q: abs(p - q),
}


@quick
@given(lengths, seeds, st.sampled_from(KL_ESTIMATORS), st.floats(0, 2))
def test_penalised_rewards_equal_the_definition(counts, seed, estimator, coef):
    offsets = offsets_of(counts)
    scores, log_probs, ref = normals(seed, len(counts), sum(counts), sum(counts))
    rewards, kl_sums = kl_penalised_rewards(scores, log_probs, ref, offsets, coef=coef, estimator=estimator)
    for sample, (start, end) in enumerate(rows_of(offsets)):
        kl = [SLOW_KL[estimator](log_probs[t].item(), ref[t].item()) for t in range(start, end)]
        expected = [-coef * k for k in kl]
        expected[-1] += scores[sample].item()
        assert rewards[start:end].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert kl_sums[sample].item() == pytest.approx(math.fsum(kl), rel=1e-9, abs=1e-9)


def test_estimators_agree_with_the_kl_of_a_distribution():
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for unbiased in ("k1", "k3"):
        torch.testing.assert_close((p * kl_estimate(p.log(), q.log(), unbiased)).sum(), exact)


def test_k3_keeps_its_digits_near_zero():
    d = torch.tensor([1e-3], dtype=torch.float32)
    assert kl_estimate(d, torch.zeros(1), "k3").item() == pytest.approx(0.5e-6, rel=1e-2)


def test_kl_refuses_bad_input():
    x, offsets = torch.zeros(2), torch.tensor([0, 2])
    with pytest.raises(ConfigError, match="k1 | k2"):
        kl_estimate(x, x, "k4")
    with pytest.raises(DataError, match="without a token"):
        kl_penalised_rewards(torch.zeros(2), x, x, torch.tensor([0, 2, 2]), coef=0.1, estimator="k1")
    with pytest.raises(DataError, match="scores is not finite"):
        kl_penalised_rewards(torch.tensor([math.nan]), x, x, offsets, coef=0.1, estimator="k1")
    with pytest.raises(DataError, match="ref_log_probs is not finite"):
        kl_penalised_rewards(torch.zeros(1), x, torch.tensor([0.0, -math.inf]), offsets, coef=0.1, estimator="k1")
    with pytest.raises(DivergedError, match="too far apart"):
        kl_penalised_rewards(torch.zeros(1), torch.tensor([-2000.0, 0.0]), x, offsets, coef=0.1, estimator="k3")


@pytest.mark.parametrize(("kl", "factor"), [(0.1, 1.0), (0.11, 1.01), (5.0, 1.02), (0.0, 0.98)])
def test_adaptive_controller_follows_the_clipped_error(kl, factor):
    controller = AdaptiveKLController(0.5, target=0.1, horizon=10000)
    controller.update(kl, n_steps=1000)
    assert controller.value == pytest.approx(0.5 * factor)


def test_controllers_resume_and_refuse():
    controller = AdaptiveKLController(0.5, target=0.1, horizon=1000)
    controller.update(1.0, 100)
    resumed = kl_controller(KlConfig(controller="adaptive", coef=0.7))
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value == pytest.approx(0.51)
    with pytest.raises(DivergedError):
        controller.update(math.nan, 1)
    with pytest.raises(ConfigError, match="negative"):
        controller.update(0.1, 5000)
    with pytest.raises(CheckpointError):
        controller.load_state_dict({"value": -1.0})
    with pytest.raises(ConfigError):
        AdaptiveKLController(0.5, target=0.0, horizon=1)
    with pytest.raises(ConfigError, match="adaptive | fixed"):
        kl_controller(KlConfig(controller="pid"))


def test_fixed_controller_stays_and_still_notices_divergence():
    controller = kl_controller(KlConfig(controller="fixed", coef=0.25))
    assert isinstance(controller, FixedKLController)
    controller.update(9.0, 1000)
    assert controller.value == 0.25
    with pytest.raises(DivergedError):
        controller.update(math.inf, 1)


@quick
@given(seeds, st.lists(st.integers(0, 50), min_size=1, max_size=8), st.sampled_from([0.0, 1e6]))
def test_moments_of_pieces_are_those_of_the_whole(seed, sizes, shift):
    pieces = [x + shift for x in normals(seed, *sizes)]
    whole = torch.cat(pieces)
    merged = Moments.merge_all(Moments.of(piece) for piece in pieces)
    assert merged.count == whole.numel()
    if merged.count:
        assert merged.mean == pytest.approx(np.mean(whole.numpy()), rel=1e-12, abs=1e-12)
        assert merged.variance == pytest.approx(np.var(whole.numpy()), rel=1e-6, abs=1e-12)


@quick
@given(seeds, st.lists(st.integers(0, 50), min_size=2, max_size=8).filter(lambda sizes: sum(sizes) > 1))
def test_whitening_of_shards_equals_whitening_of_the_batch(seed, sizes):
    shards = normals(seed, *sizes)
    moments = Moments.merge_all(map(Moments.of, shards))
    white = torch.cat([whiten(shard, moments) for shard in shards])
    whole = torch.cat(shards)
    torch.testing.assert_close(white, (whole - whole.mean()) / (whole.var(correction=0) + 1e-8).sqrt(), rtol=1e-9, atol=1e-9)
    assert white.mean().abs() < 1e-9
    assert white.var(correction=0).item() == pytest.approx(1.0, rel=1e-3)


def test_moments_of_nothing_and_of_nan():
    assert whiten(torch.tensor([3.0]), Moments.of(torch.tensor([3.0]))).item() == 0.0
    with pytest.raises(DataError, match="no values"):
        whiten(torch.ones(1), Moments(0, 0.0, 0.0))
    with pytest.raises(DataError, match="not finite"):
        Moments.of(torch.tensor([1.0, math.inf]))
