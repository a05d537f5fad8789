"""Batches whose contents are known, cut into pieces in many ways."""

import numpy as np
from hypothesis import strategies as st

from megarl.data.proto import DataProto, Piece
from megarl.types import LocalHandle, Ragged, SampleInfo


class CountingHandle:
    """A shard that counts its fetches."""

    def __init__(self, columns):
        self.columns = columns
        self.fetches = 0

    def fetch(self):
        self.fetches += 1
        return self.columns


def info_of(ids):
    ids = np.asarray(ids, dtype=np.int64)
    return SampleInfo(ids, ids * 10, ids // 2, ids % 5 + 1, ids % 7 + 1, ids % 2 == 0)


def tokens_of(sample_id):
    """The tokens of a sample: some samples have none."""
    return np.arange(sample_id % 4) + 100 * sample_id


@st.composite
def batches(draw, first_id=0, min_size=1):
    """A batch of the samples first_id.. with a ragged and a flat column, each cut and ordered at random."""
    count = draw(st.integers(min_size, 10))
    ids = np.arange(first_id, first_id + count)
    batch = DataProto(info_of(ids), {})
    for name in ("tokens", "number"):
        order = draw(st.permutations(range(count)))
        cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=3))) if count > 1 else []
        pieces = []
        for start, end in zip([0, *cuts], [*cuts, count], strict=True):
            rows = tuple(order[start:end])
            values = {
                "tokens": Ragged.from_list([tokens_of(ids[row]) for row in rows], np.int32),
                "number": ids[list(rows)] * 0.5,
            }
            pieces.append(Piece(rows, LocalHandle(values)))
        batch = batch.with_column(name, pieces)
    return batch


def contents(batch):
    """(sample id, tokens, number) of each sample, as fetched."""
    local = batch.to_local()
    return [(int(i), local["tokens"][row].tolist(), float(local["number"][row])) for row, i in enumerate(batch.info.sample_id)]


def expected(ids):
    return [(int(i), tokens_of(int(i)).tolist(), int(i) * 0.5) for i in ids]
