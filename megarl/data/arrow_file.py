"""One Arrow IPC file of rows: written aside and renamed, then memory-mapped by every worker that reads rows of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.errors import DataError, explain
from megarl.types import Ragged

KIND_KEY = b"megarl.kind"


def write_rows(path: str | Path, kind: str, schema: pa.Schema, batches: Iterable[Mapping[str, list[Any]]]) -> int:
    """Write ``batches`` (column -> values) to ``path``; returns the number of rows.

    A reader sees the old file or the whole new one: when ``batches`` raises, nothing is left behind.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    marked = schema.with_metadata({KIND_KEY: kind.encode()})
    rows = 0
    try:
        with open(aside, "wb") as sink:
            with pa.ipc.new_file(sink, marked) as writer:
                for batch in batches:
                    record_batch = pa.RecordBatch.from_pydict(dict(batch), schema=marked)
                    writer.write_batch(record_batch)
                    rows += record_batch.num_rows
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return rows


class ArrowRows:
    """Rows of a file written by :func:`write_rows`, memory-mapped: only the rows asked for are read.

    Raises:
        DataError: the file is missing, is no Arrow file, or is of another kind.
    """

    def __init__(self, path: str | Path, kind: str):
        if not Path(path).is_file():
            raise DataError(explain("no such file", where=str(path), expected=kind))
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except pa.ArrowInvalid as error:
            raise DataError(explain("not an Arrow IPC file", where=str(path), got=error, expected=kind)) from error
        found = (table.schema.metadata or {}).get(KIND_KEY, b"another writer's file").decode()
        if found != kind:
            raise DataError(explain("a file of another kind", where=str(path), got=found, expected=kind))
        self.path = str(path)
        self._table = table
        self._starts = np.cumsum([0, *(len(chunk) for chunk in table.column(0).chunks)])  # first row of each record batch
        self._lists = cache(self._open_lists)

    def __len__(self) -> int:
        return self._table.num_rows

    def ragged(self, column: str, rows: Sequence[int]) -> Ragged:
        """Token ids of ``rows`` from a column of int32 lists."""
        found = []
        for chunk, row in self._places(rows):
            values, offsets = self._lists(column)[chunk]
            found.append(values[offsets[row] : offsets[row + 1]])
        return Ragged.from_list(found, np.int32)

    def values(self, column: str, rows: Sequence[int]) -> list[Any]:
        """Values of ``rows`` from any column, as Python objects."""
        chunks = self._table.column(column).chunks
        return [chunks[chunk][row].as_py() for chunk, row in self._places(rows)]

    def _open_lists(self, column: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """(values, offsets) of each record batch, views of the mapped file."""
        return [(chunk.values.to_numpy(), chunk.offsets.to_numpy()) for chunk in self._table.column(column).chunks]

    def _places(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """(record batch, row in it) of each row."""
        index = np.asarray(rows, dtype=np.int64).reshape(-1)
        outside = index[(index < 0) | (index >= len(self))]
        if len(outside):
            raise DataError(explain("row outside the file", where=self.path, got=outside[:8].tolist(), expected=f"0 to {len(self) - 1}"))
        chunks = np.searchsorted(self._starts, index, side="right") - 1
        return list(zip(chunks.tolist(), (index - self._starts[chunks]).tolist(), strict=True))
