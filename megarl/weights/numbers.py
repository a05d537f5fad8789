"""What counts as a weight: plain, finite floating-point numbers."""

from __future__ import annotations

import torch

from megarl.errors import ModelError, explain

NUMBERS = ("F64", "F32", "F16", "BF16")  # safetensors' names of dtypes


def check_finite(tensor: torch.Tensor, name: str, where: str) -> None:
    """Raise ModelError for NaN or infinity. One pass at the speed of memory."""
    if not tensor.numel():
        return
    low, high = (float(x) for x in torch.aminmax(tensor))
    if not (torch.isfinite(torch.tensor([low, high])).all()):
        raise ModelError(
            explain(
                "a weight is not finite",
                where=f"{name} in {where}",
                got=f"values from {low} to {high}",
                expected="finite numbers",
                do="the model diverged before it was saved, or the file is damaged: take an earlier or another copy",
            )
        )
