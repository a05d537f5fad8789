"""Weights as DeepSeek-V3 stores them: 8-bit floats (e4m3) in blocks, each block with one factor (arXiv:2412.19437, section 3.3.2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megarl.weights.regions import Box, Region

STORED = "F8_E4M3"  # safetensors' name
SCALES = "_scale_inv"  # behind the weight's name; despite it, the factor itself


def block_size(hf_config: Mapping) -> tuple[int, int] | None:
    """Rows and columns of a block; None: the model isn't stored so."""
    how = hf_config.get("quantization_config")
    size = how.get("weight_block_size") if isinstance(how, Mapping) else None
    return (int(size[0]), int(size[1])) if size else None


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks of a weight of ``shape``; those at the lower and right edge may be smaller."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def scales_region(region: Region, block: tuple[int, int]) -> Region:
    """The factors of the blocks that ``region`` of a weight touches."""
    (top, bottom), (left, right) = region.box
    box: Box = ((top // block[0], -(-bottom // block[0])), (left // block[1], -(-right // block[1])))
    return Region(region.name + SCALES, box)


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, box: Box, block: tuple[int, int]) -> torch.Tensor:
    """``numbers`` [r, c] of e4m3, which are ``box`` of a weight, times the factor of each one's block; float32.

    ``scales``: those of :func:`scales_region`.
    """
    (top, bottom), (left, right) = box
    rows = torch.arange(top, bottom) // block[0] - top // block[0]
    columns = torch.arange(left, right) // block[1] - left // block[1]
    return numbers.float() * scales.float()[rows][:, columns]
