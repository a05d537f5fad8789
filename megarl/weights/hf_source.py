"""Tensors of a Hugging Face directory by plain reads: mapped pages would pile up in the memory of the process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path

import torch

from megarl.config.safetensors_header import Entry
from megarl.errors import ModelError, explain
from megarl.weights import fp8
from megarl.weights.hf_headers import unreadable
from megarl.weights.regions import Box, Region, box_shape

CODES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, fp8.STORED: torch.float8_e4m3fn}
CODE_OF = {dtype: code for code, dtype in CODES.items()}


class Files:
    """Reads of the tensors of a scanned directory; a context manager, which closes the files."""

    def __init__(self, directory: Path, entries: Mapping[str, Entry]):
        self.directory, self.entries = directory, entries
        self._files = ExitStack()
        self._open: dict[str, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        """Fill ``out``, of the region's shape and the file's dtype."""
        entry = self.entries[region.name]
        for part, first, count in runs(region.box, entry.shape):
            into = out[part]
            if into.is_contiguous():
                self._read(entry, first, into)
            else:
                block = torch.empty(count, dtype=out.dtype)
                self._read(entry, first, block)
                into.copy_(block.view(into.shape))

    def blocks(self, name: str, most: int) -> Iterator[torch.Tensor]:
        """The elements of a tensor in order, flat, in blocks of at most ``most`` elements."""
        entry = self.entries[name]
        total = prod(entry.shape)
        for first in range(0, total, most):
            block = torch.empty(min(most, total - first), dtype=CODES[entry.code])
            self._read(entry, first, block)
            yield block

    def _read(self, entry: Entry, first: int, into: torch.Tensor) -> None:
        """Read elements from ``first`` on, as many as the contiguous ``into`` takes."""
        view = memoryview(as_bytes(into))
        at, done = entry.offset + first * into.element_size(), 0
        while done < len(view):
            got = os.preadv(self._descriptor(entry.file), [view[done:]], at + done)
            if got == 0:
                raise ModelError(
                    explain(
                        "a weight file ends before a tensor does",
                        where=str(self.directory / entry.file),
                        got="it became shorter while it was read",
                        do="copy the model directory again",
                    )
                )
            done += got

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            try:
                self._open[file] = os.open(self.directory / file, os.O_RDONLY)
            except OSError as error:
                raise unreadable(self.directory / file, error) from error
            self._files.callback(os.close, self._open[file])
        return self._open[file]


def as_bytes(tensor: torch.Tensor):
    """The memory of a contiguous tensor as a numpy array of bytes; [] for no elements."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[tuple[slice | int, ...], int, int]]:
    """The parts of ``box`` that lie in one piece in a row-major tensor of ``shape``.

    Gives (index of the part in a tensor of the box alone, number of its first element in the whole tensor, elements).
    """
    sizes = box_shape(box)
    free = len(shape)  # the dimensions from here on are whole; the one before may be a range
    while free and sizes[free - 1] == shape[free - 1]:
        free -= 1
    outer = max(free - 1, 0)
    count = prod(sizes[outer:])
    if count == 0 or 0 in sizes:
        return
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    base = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    for flat in range(prod(sizes[:outer])):
        index, rest = [], flat
        for size in reversed(sizes[:outer]):
            index.append(rest % size)
            rest //= size
        index.reverse()
        yield tuple(index), base + sum(i * s for i, s in zip(index, strides, strict=False)), count
