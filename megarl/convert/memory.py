"""Memory that one piece after the other uses: fresh pages for each would cost as much time as copying it."""

from __future__ import annotations

import os
from math import prod

import torch

# Bytes of one call. A larger one has the kernel look for larger pages of its file cache, which take it longer to find than to fill:
# measured up to five times on ext4.
WRITE_BYTES = 256 << 10
_AT_MOST = 8  # sizes that are kept: most pieces have the same one


class Memory:
    """Uninitialised tensors; the one of a size that was given before is given again, so that it must be done with by then."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous, of ``shape``."""
        size = (prod(shape), dtype)
        kept = self._kept.pop(size, None)
        if kept is None:
            kept = torch.empty(size[0], dtype=dtype)
        self._kept[size] = kept  # the newest is the last
        if len(self._kept) > _AT_MOST:
            del self._kept[next(iter(self._kept))]
        return kept.view(shape)


def start_writing(descriptor: int, first: int, length: int) -> None:
    """Have the kernel write these bytes to the disk now, while we go on: else all of it waits for fsync.

    The advice that they aren't needed does so; pages that are being written stay in memory all the same.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, first, length, os.POSIX_FADV_DONTNEED)
