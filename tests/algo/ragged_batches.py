"""Ragged batches for hypothesis: usual ones, and hostile ones (many of length 1, one huge among them)."""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from tests import examples

# No deadline: the first call pays for torch's start, and the machine may be busy.
quick = settings(max_examples=examples(25), deadline=None)

usual = st.lists(st.integers(1, 40), min_size=1, max_size=12)
many_ones_one_huge = st.tuples(st.integers(1, 40), st.integers(100, 700), st.integers(0, 40)).map(
    lambda t: [1] * t[0] + [t[1]] + [1] * t[2]
)
lengths = usual | many_ones_one_huge
seeds = st.integers(0, 2**32 - 1)


def offsets_of(counts):
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int64)


def normals(seed, *sizes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def rows_of(offsets):
    bounds = offsets.tolist()
    return list(zip(bounds[:-1], bounds[1:], strict=True))
