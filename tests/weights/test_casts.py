"""Casts of weights: every bit pattern of 16 bits goes to each wider dtype and back, and no finite number becomes infinite."""

from __future__ import annotations

import pytest
import torch

from megarl.errors import ModelError
from megarl.weights.casts import cast

EVERY = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)  # bit patterns


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_comes_back(narrow: torch.dtype, wide: torch.dtype) -> None:
    there = cast(EVERY.view(narrow), wide, "x")
    assert torch.equal(cast(there, narrow, "x").view(torch.int16), EVERY)
    plain = EVERY.view(narrow).to(wide)
    number = ~torch.isnan(plain)
    assert torch.equal(there[number], plain[number]), "what is a number is what torch makes of it"
    assert bool(torch.isnan(there[~number]).all())


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_nan_stays_nan_when_its_payload_has_no_room(wide: torch.dtype) -> None:
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[wide]
    smallest = torch.tensor([float("inf")], dtype=wide).view(integer) + 1
    assert bool(torch.isnan(cast(smallest.view(wide), torch.bfloat16, "x")).all())


@pytest.mark.parametrize(
    ("dtype", "number", "to"),
    [
        (torch.float32, 70000.0, torch.float16),
        (torch.bfloat16, -1e38, torch.float16),
        (torch.float64, 1e300, torch.float32),
        (torch.float32, 3.4e38, torch.bfloat16),  # rounds up to what has no room
    ],
    ids=str,
)
def test_a_number_without_room_is_named(dtype: torch.dtype, number: float, to: torch.dtype) -> None:
    with pytest.raises(ModelError, match=rf"no room in {str(to).removeprefix('torch.')} \(in a\.weight"):
        cast(torch.tensor([1.0, number, float("inf")], dtype=dtype), to, "a.weight")


def test_infinities_and_roundings_pass() -> None:
    numbers = torch.tensor([float("inf"), -float("inf"), 65519.0, 1e-9, -0.0])  # 65519 rounds down to the largest
    assert torch.equal(cast(numbers, torch.float16, "x"), numbers.half())


def test_one_nan_alone_keeps_its_payload() -> None:
    signalling = torch.tensor([0x7F81], dtype=torch.int16)
    there = cast(signalling.view(torch.bfloat16), torch.float32, "x")
    assert torch.equal(cast(there, torch.bfloat16, "x").view(torch.int16), signalling)
