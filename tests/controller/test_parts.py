"""The controller's small decisions: who is in which mini-batch, learning rate, seeds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.schema import WarmStartConfig
from megarl.controller.context import sample_requests
from megarl.controller.evaluate import Evaluation
from megarl.controller.step import mini_batches
from megarl.controller.warm_start import Pace, _pace
from megarl.errors import DataError


@given(kept=st.integers(1, 300), count=st.integers(1, 8), size=st.integers(1, 64), epochs=st.integers(1, 3))
def test_mini_batches_hold_every_kept_sample_once_an_epoch(kept: int, count: int, size: int, epochs: int) -> None:
    parts = mini_batches(kept, drawn=count * size, samples_per_mini_batch=size, epochs=epochs)
    assert len(parts) == epochs * min(count, kept)
    per_epoch = len(parts) // epochs
    for epoch in range(epochs):
        mine = parts[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert [row for part in mine for row in part] == list(range(kept))
        assert max(map(len, mine)) - min(map(len, mine)) <= 1


def test_dropped_samples_change_no_number_of_optimizer_steps() -> None:
    assert [len(part) for part in mini_batches(kept=97, drawn=128, samples_per_mini_batch=64, epochs=1)] == [49, 48]


def test_every_mini_batch_has_a_sample_for_each_replica() -> None:
    assert [len(part) for part in mini_batches(kept=5, drawn=16, samples_per_mini_batch=4, epochs=1, replicas=2)] == [3, 2]
    with pytest.raises(DataError, match="too few samples left"):
        mini_batches(kept=1, drawn=16, samples_per_mini_batch=4, epochs=1, replicas=2)


def test_a_sample_keeps_its_seed_whatever_else_is_drawn() -> None:
    few, _ = sample_requests(np.arange(4), 2, seed=3, step=7)
    many, groups = sample_requests(np.arange(50), 2, seed=3, step=7)
    assert few == many[:8]
    assert groups.tolist() == [i // 2 for i in range(100)]


def test_seeds_of_runs_steps_and_samples_are_all_different() -> None:
    seeds = {r.seed for seed in range(5) for step in range(40) for r in sample_requests(np.arange(20), 1, seed=seed, step=step)[0]}
    assert len(seeds) == 5 * 40 * 20
    assert all(0 <= s < 2**63 for s in seeds)


def test_warm_start_slows_down_before_its_range() -> None:
    config = WarmStartConfig(lr=1e-3, eval_every_steps=2, stop_reward_min=0.35)
    fast, slow = Pace(1e-3, 10), Pace(2.5e-4, 2)
    assert _pace(config, None) == fast
    assert _pace(config, Evaluation(0.05, 256, 0.01)) == fast
    assert _pace(config, Evaluation(0.1, 256, 0.01)) == slow
