"""From one floating-point dtype to another: exact where the target can hold a number, and never an infinity that wasn't one."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megarl.errors import ModelError, explain
from megarl.weights.dtypes import DTYPE_NAMES


class _Bits(NamedTuple):
    """IEEE 754: one bit of sign, the exponent, then ``fraction`` bits."""

    integer: torch.dtype
    all: int
    fraction: int


_BITS = {
    torch.float16: _Bits(torch.int16, 16, 10),
    torch.bfloat16: _Bits(torch.int16, 16, 7),
    torch.float32: _Bits(torch.int32, 32, 23),
    torch.float64: _Bits(torch.int64, 64, 52),
}


def cast(numbers: torch.Tensor, dtype: torch.dtype, where: str) -> torch.Tensor:
    """``numbers`` in ``dtype``, rounded to the nearest, a NaN with its payload: what was widened comes back bit for bit.

    Raises ModelError, which names ``where``, for a finite number that ``dtype`` has no room for: it would become infinite.
    """
    if numbers.dtype is dtype or numbers.dtype not in _BITS or dtype not in _BITS:
        return numbers.to(dtype)
    found = numbers.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(numbers.dtype).max and bool((infinite := torch.isinf(found)).any()):
        _check_infinite(numbers, dtype, infinite, where)
    if bool((nan := torch.isnan(numbers)).any()):
        # As integers: a single number is put by way of a double, which changes a NaN.
        found.view(_BITS[dtype].integer)[nan] = _nan(numbers[nan], dtype)
    return found


def _check_infinite(numbers: torch.Tensor, dtype: torch.dtype, infinite: torch.Tensor, where: str) -> None:
    lost = infinite & torch.isfinite(numbers)
    if bool(lost.any()):
        raise ModelError(
            explain(
                f"a number has no room in {DTYPE_NAMES[dtype]}",
                where=where,
                got=f"{float(numbers[lost][0]):g}" + (f" and {more} more in this part of it" if (more := int(lost.sum()) - 1) else ""),
                expected=f"at most {torch.finfo(dtype).max:g}",
                do="choose another dtype: bfloat16 has the range of float32",
            )
        )


def _nan(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of NaNs [n] in another dtype, with as much of their payload, from its upper end, as has room: conversions change it."""
    old, new = _BITS[numbers.dtype], _BITS[dtype]
    bits = numbers.contiguous().view(old.integer).to(torch.int64)
    payload, more = bits & ((1 << old.fraction) - 1), new.fraction - old.fraction
    payload = payload << more if more >= 0 else payload >> -more
    payload = torch.where(payload == 0, 1 << (new.fraction - 1), payload)  # 0 would be an infinity
    exponent = ((1 << (new.all - 1 - new.fraction)) - 1) << new.fraction
    negative = torch.where(bits < 0, -(1 << (new.all - 1)), 0)
    return (payload + exponent + negative).to(new.integer)
