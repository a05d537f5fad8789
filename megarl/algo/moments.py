"""Mean and variance of a tensor that lies in pieces on several ranks, from three scalars a piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.ragged import check_finite
from megarl.errors import DataError, explain


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of numbers, in float64.

    Only these three scalars cross processes; merging them gives the moments of the union
    (Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances").
    """

    count: int
    mean: float
    m2: float  # sum of (x - mean)^2

    @classmethod
    def of(cls, x: Tensor) -> "Moments":
        """Moments of all values of ``x`` (any shape, possibly empty).

        Raises:
            DataError: a value is not finite.
        """
        check_finite("Moments.of", x=x.flatten())
        if x.numel() == 0:
            return cls(0, 0.0, 0.0)
        values = x.detach().double()
        mean = values.mean()
        return cls(values.numel(), float(mean), float((values - mean).square().sum()))

    def merge(self, other: "Moments") -> "Moments":
        """Moments of both sets together."""
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        return Moments(count, mean, self.m2 + other.m2 + delta * delta * self.count * other.count / count)

    @classmethod
    def merge_all(cls, parts: Iterable["Moments"]) -> "Moments":
        """Moments of the union of ``parts``, merged in their order."""
        total = cls(0, 0.0, 0.0)
        for part in parts:
            total = total.merge(part)
        return total

    @property
    def variance(self) -> float:
        """Population variance, m2 / count: whitened values then have variance exactly 1, and one value has variance 0.

        Raises:
            DataError: the set is empty.
        """
        if self.count == 0:
            raise DataError(explain("variance of no values", where="Moments", got="count 0", expected="at least one value"))
        return self.m2 / self.count


def whiten(x: Tensor, moments: Moments, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps), with the moments of the whole batch; shape and dtype of ``x``.

    Raises:
        DataError: ``x`` holds values but ``moments`` is of no values.
    """
    if x.numel() == 0:
        return x
    centred = x.double() - moments.mean
    return (centred / (moments.variance + eps) ** 0.5).to(x.dtype if x.is_floating_point() else torch.float32)
