"""Learning rates: where they rise, fall and stay."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algo.schedules import learning_rate
from megarl.config.schema import OptimConfig
from tests import examples


def rates(optim: OptimConfig, *steps: int) -> list[float]:
    return [learning_rate(optim, step) for step in steps]


def test_constant() -> None:
    optim = OptimConfig(lr=1e-3, lr_warmup_steps=4)
    assert rates(optim, 1, 2, 4, 5, 100) == pytest.approx([2.5e-4, 5e-4, 1e-3, 1e-3, 1e-3])
    assert rates(OptimConfig(lr=1e-3), 1, 50) == [1e-3, 1e-3]


def test_linear() -> None:
    optim = OptimConfig(lr=1e-3, lr_warmup_steps=2, schedule="linear", schedule_steps=12, lr_min=1e-4)
    assert rates(optim, 1, 2, 7, 12, 13, 99) == pytest.approx([5e-4, 1e-3, 5.5e-4, 1e-4, 1e-4, 1e-4])


def test_cosine() -> None:
    optim = OptimConfig(lr=1e-3, schedule="cosine", schedule_steps=8)
    assert rates(optim, 2, 4, 6, 8, 9) == pytest.approx([1e-3 * (0.5 + math.sqrt(0.125)), 5e-4, 1e-3 * (0.5 - math.sqrt(0.125)), 0, 0])


@settings(max_examples=examples(60), deadline=None)
@given(
    schedule=st.sampled_from(["linear", "cosine"]),
    warmup=st.integers(0, 20),
    fall=st.integers(1, 50),
    low=st.floats(0, 0.9),
)
def test_up_then_down_and_never_outside(schedule: str, warmup: int, fall: int, low: float) -> None:
    optim = OptimConfig(lr=1.0, lr_warmup_steps=warmup, schedule=schedule, schedule_steps=warmup + fall, lr_min=low)
    found = rates(optim, *range(1, warmup + fall + 5))
    top = max(warmup, 1) - 1  # index of the highest
    assert found[:top] == sorted(found[:top])
    assert found[top:] == sorted(found[top:], reverse=True)
    assert all(0 < rate <= 1.0 or rate == low for rate in found)
    assert found[-1] == pytest.approx(low)
