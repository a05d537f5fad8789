"""Checks and small operations that all functions on ragged tensors share."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.errors import DataError, explain


def check_offsets(where: str, offsets: Tensor, tokens: int) -> None:
    """Raise DataError unless ``offsets`` [B + 1] int64 rises from 0 to ``tokens``."""
    sound = (
        offsets.dim() == 1
        and offsets.numel() >= 1
        and offsets.dtype == torch.int64
        and int(offsets[0]) == 0
        and int(offsets[-1]) == tokens
        and bool((offsets.diff() >= 0).all())
    )
    if not sound:
        raise DataError(
            explain(
                "offsets do not cut the tokens into samples",
                where=where,
                got=f"{offsets.dtype} {list(offsets.shape)}, ends {offsets.flatten()[[0, -1]].tolist() if offsets.numel() else []}",
                expected=f"int64 [B + 1], rising from 0 to {tokens}",
            )
        )


def check_same_shape(where: str, **tensors: Tensor) -> None:
    """Raise DataError unless all ``tensors`` are 1-d and equally long: broadcasting would hide a mix-up."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
        raise DataError(explain("tensors of unequal shape", where=where, got=shapes, expected="1-d tensors of one length"))


def check_finite(where: str, **tensors: Tensor) -> None:
    """Raise DataError when one of ``tensors`` holds NaN or infinity; names the tensor and the first such position."""
    for name, tensor in tensors.items():
        bad = ~torch.isfinite(tensor)
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            raise DataError(
                explain(
                    f"{name} is not finite",
                    where=where,
                    got=f"{float(tensor[first])} at position {first}; {int(bad.sum())} of {tensor.numel()} values",
                    expected="finite numbers",
                )
            )


def sample_of_token(offsets: Tensor) -> Tensor:
    """The sample that each token belongs to: [N] int64."""
    return torch.repeat_interleave(torch.arange(offsets.numel() - 1, device=offsets.device), offsets.diff())


def sum_per_sample(values: Tensor, offsets: Tensor) -> Tensor:
    """Sums [B] float64 of ``values`` [N] over each sample; a sample's sum does not depend on its neighbours."""
    return torch.segment_reduce(values.double(), "sum", offsets=offsets, initial=0.0)
