"""``DataProto``: what the controller holds of a batch - scalars of each sample, and handles of the columns.

The tokens stay where they were made. ``select``, ``take``, ``split``, ``concat`` and ``union`` only rearrange positions;
a worker assembles the rows that it wants with :func:`gather_rows`; ``to_local`` is the only fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megarl.errors import DataError, explain
from megarl.types import Handle, Ragged, SampleInfo

Column = Ragged | np.ndarray  # of B samples: Ragged [N] or array [B, ...]
FetchAll = Callable[[Sequence[Handle]], Sequence[Mapping[str, Any]]]


def fetch_each(handles: Sequence[Handle]) -> list[Mapping[str, Any]]:
    """Fetch handles one after another; the cluster passes a function that fetches them in one call."""
    return [handle.fetch() for handle in handles]


@dataclass(frozen=True)
class Piece:
    """Some rows of a column, and the shard that holds them."""

    rows: tuple[int, ...]  # positions in the batch
    handle: Handle
    picks: tuple[int, ...] | None = None  # row i of the piece is row picks[i] of the shard; None: the shard has exactly these rows

    def pick(self, i: int) -> int:
        """The row of the shard that serves the piece's row ``i``."""
        return i if self.picks is None else self.picks[i]


@dataclass(frozen=True)
class DataProto:
    """An immutable batch of B samples: scalars, and columns of handles.

    Raises:
        DataError: a column whose pieces do not hold each of the B positions exactly once.
    """

    info: SampleInfo
    columns: Mapping[str, tuple[Piece, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", {name: tuple(pieces) for name, pieces in self.columns.items()})
        for name, pieces in self.columns.items():
            held = sorted(row for piece in pieces for row in piece.rows)
            if held != list(range(len(self))):
                raise DataError(
                    explain(
                        f"pieces of column '{name}' do not cover the batch",
                        got=f"{len(held)} rows, {len(set(held))} different, from {held[:1]} to {held[-1:]}",
                        expected=f"each of the positions 0 to {len(self) - 1} once",
                    )
                )
            for piece in pieces:
                if piece.picks is not None and len(piece.picks) != len(piece.rows):
                    raise DataError(explain(f"piece of column '{name}'", got=f"{len(piece.picks)} picks", expected=len(piece.rows)))

    def __len__(self) -> int:
        return len(self.info.sample_id)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the columns, in the order in which they were added."""
        return tuple(self.columns)

    def pieces(self, column: str) -> tuple[Piece, ...]:
        """The pieces of one column.

        Raises:
            DataError: no such column.
        """
        if column not in self.columns:
            raise DataError(
                explain(
                    f"no column '{column}'",
                    where="DataProto",
                    got=", ".join(self.columns) or "no columns",
                    do="run the stage that writes this column before the one that reads it",
                )
            )
        return self.columns[column]

    def with_column(self, name: str, pieces: Iterable[Piece]) -> DataProto:
        """This batch and one more column.

        Raises:
            DataError: the column exists, or the pieces do not cover the batch.
        """
        if name in self.columns:
            raise DataError(explain(f"column '{name}' exists", where="DataProto.with_column", expected="a new name"))
        return DataProto(self.info, {**self.columns, name: tuple(pieces)})

    def select(self, columns: Iterable[str]) -> DataProto:
        """This batch with only ``columns``."""
        return DataProto(self.info, {name: self.pieces(name) for name in columns})

    def union(self, other: DataProto) -> DataProto:
        """The columns of both batches, which hold the same samples in the same order.

        Raises:
            DataError: other samples, or a column that both have but with other handles.
        """
        for name in (f.name for f in fields(SampleInfo)):
            if not np.array_equal(getattr(self.info, name), getattr(other.info, name)):
                raise DataError(
                    explain(
                        "union of batches of different samples",
                        where="DataProto.union",
                        got=f"'{name}' differs ({len(self)} and {len(other)} samples)",
                        expected="the same samples in the same order",
                    )
                )
        for name in self.columns.keys() & other.columns.keys():
            if not _same_pieces(self.columns[name], other.columns[name]):
                raise DataError(
                    explain(
                        f"both batches have a column '{name}', and it is not the same one",
                        where="DataProto.union",
                        do="select the columns of one side first",
                    )
                )
        return DataProto(self.info, {**self.columns, **other.columns})

    __or__ = union

    def take(self, rows: Sequence[int]) -> DataProto:
        """The samples at the positions ``rows``, in that order (a position may repeat). Nothing is fetched.

        Raises:
            DataError: a position outside the batch.
        """
        index = np.asarray(rows, dtype=np.int64).reshape(-1)
        if len(index) and not (index.min() >= 0 and index.max() < len(self)):
            raise DataError(
                explain("position outside the batch", where="DataProto.take", got=index.tolist()[:8], expected=f"0 to {len(self) - 1}")
            )
        places: list[list[int]] = [[] for _ in range(len(self))]  # old position -> new positions
        for new, old in enumerate(index.tolist()):
            places[old].append(new)
        columns = {name: tuple(_retake(pieces, places)) for name, pieces in self.columns.items()}
        return DataProto(self.info.take(index), columns)

    def split(self, n: int) -> list[DataProto]:
        """``n`` batches of consecutive samples; sizes differ by at most one.

        Raises:
            DataError: fewer samples than parts.
        """
        if not 1 <= n <= len(self):
            raise DataError(
                explain("batch can't be split", where="DataProto.split", got=f"{len(self)} samples into {n} parts", expected="1 to B parts")
            )
        return [self.take(rows) for rows in np.array_split(np.arange(len(self)), n)]

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """The samples of all ``parts`` in order.

        Raises:
            DataError: no parts, or parts with different columns.
        """
        if not parts:
            raise DataError(explain("concat of no batches", where="DataProto.concat", expected="at least one"))
        names = parts[0].column_names
        for number, part in enumerate(parts):
            if set(part.columns) != set(names):
                raise DataError(
                    explain(
                        "batches with different columns",
                        where="DataProto.concat",
                        got=f"part {number}: {sorted(part.columns)}",
                        expected=sorted(names),
                        do="select the common columns first",
                    )
                )
        starts = np.cumsum([0, *(len(part) for part in parts)]).tolist()
        columns = {
            name: tuple(
                Piece(tuple(start + row for row in piece.rows), piece.handle, piece.picks)
                for start, part in zip(starts, parts, strict=False)
                for piece in part.columns[name]
            )
            for name in names
        }
        info = SampleInfo(*(np.concatenate([getattr(part.info, f.name) for part in parts]) for f in fields(SampleInfo)))
        return DataProto(info, columns)

    def to_local(self, *columns: str, fetch: FetchAll = fetch_each) -> dict[str, Column]:
        """Fetch ``columns`` (all of them when none is named), rows in the order of the batch.

        Raises:
            DataError: no such column, no rows, or a shard of another size than announced.
        """
        wanted = {name: self.pieces(name) for name in columns or self.column_names}
        return gather_rows(wanted, range(len(self)), fetch)


def gather_rows(columns: Mapping[str, Sequence[Piece]], rows: Sequence[int], fetch: FetchAll = fetch_each) -> dict[str, Column]:
    """Assemble the positions ``rows`` of some columns; each handle that is needed is fetched once, others are not.

    Args:
        columns: column name -> its pieces.
        rows: positions in the batch, in the order wanted; may repeat.
        fetch: brings many handles at once.

    Raises:
        DataError: no rows (an empty column has no type), a position that no piece holds, a column that a shard lacks, or a shard
            of another size than its piece says.
    """
    if not len(rows):
        raise DataError(explain("no rows to gather", where="gather_rows", expected="at least one row"))
    plans = {name: _plan(name, pieces, rows) for name, pieces in columns.items()}
    needed = {id(piece.handle): piece.handle for plan in plans.values() for piece, _ in plan}
    shards = dict(zip(needed, fetch(list(needed.values())), strict=True))
    result = {}
    for name, plan in plans.items():
        for piece in {id(piece): piece for piece, _ in plan}.values():
            _check_shard(name, piece, shards[id(piece.handle)])
        result[name] = _join([(shards[id(piece.handle)][name], piece.pick(i)) for piece, i in plan])
    return result


def _plan(name: str, pieces: Sequence[Piece], rows: Sequence[int]) -> list[tuple[Piece, int]]:
    """For each wanted row, the piece that holds it and its place in the piece."""
    held = {row: (piece, i) for piece in pieces for i, row in enumerate(piece.rows)}
    missing = [int(row) for row in rows if int(row) not in held]
    if missing:
        raise DataError(explain(f"rows that no piece of column '{name}' holds", where="gather_rows", got=missing[:8]))
    return [held[int(row)] for row in rows]


def _check_shard(name: str, piece: Piece, shard: Mapping[str, Any]) -> None:
    if name not in shard:
        raise DataError(explain(f"shard without column '{name}'", where="gather_rows", got=sorted(shard)))
    got = len(shard[name])
    enough = got == len(piece.rows) if piece.picks is None else got > max(piece.picks, default=-1)
    if not enough:
        expected = f"{len(piece.rows)} rows" if piece.picks is None else f"more than {max(piece.picks)} rows"
        raise DataError(
            explain(f"shard of column '{name}' has another size than its piece", where="gather_rows", got=f"{got} rows", expected=expected)
        )


def _join(sources: Sequence[tuple[Column, int]]) -> Column:
    """One column from (shard's column, row in it) pairs."""
    first = sources[0][0]
    if isinstance(first, Ragged):
        return Ragged.from_list([column[row] for column, row in sources], first.values.dtype)
    return np.stack([column[row] for column, row in sources])


def _retake(pieces: Sequence[Piece], places: Sequence[Sequence[int]]) -> Iterable[Piece]:
    """``pieces`` after each old position went to ``places[old]``; pieces left without rows go."""
    for piece in pieces:
        moved = [(new, piece.pick(i)) for i, old in enumerate(piece.rows) for new in places[old]]
        if moved:
            rows, picks = zip(*moved, strict=True)
            whole = piece.picks is None and picks == tuple(range(len(piece.rows)))
            yield Piece(rows, piece.handle, None if whole else picks)


def _same_pieces(a: Sequence[Piece], b: Sequence[Piece]) -> bool:
    return len(a) == len(b) and all(x.rows == y.rows and x.handle is y.handle and x.picks == y.picks for x, y in zip(a, b, strict=True))
