import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.proto import DataProto, Piece, gather_rows
from megarl.errors import DataError
from megarl.types import LocalHandle, Ragged
from tests import examples

from .batches import CountingHandle, batches, contents, expected, info_of

quick = settings(max_examples=examples(25), deadline=None)


def lists_of_rows(batch):
    return st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=12)


@quick
@given(batches())
def test_to_local_gives_the_rows_in_the_order_of_the_batch(batch):
    assert contents(batch) == expected(batch.info.sample_id)


@quick
@given(batches(), st.data())
def test_take_commutes_with_to_local(batch, data):
    rows = data.draw(lists_of_rows(batch))
    taken = batch.take(rows)
    assert taken.info.sample_id.tolist() == rows
    assert contents(taken) == [contents(batch)[row] for row in rows]
    again = data.draw(lists_of_rows(taken))
    assert contents(taken.take(again)) == contents(batch.take([rows[row] for row in again]))


@quick
@given(batches(), st.data())
def test_split_then_concat_is_the_batch(batch, data):
    parts = batch.split(data.draw(st.integers(1, len(batch))))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert [row for part in parts for row in contents(part)] == contents(batch)
    assert contents(DataProto.concat(parts)) == contents(batch)


@quick
@given(batches(), batches(first_id=20))
def test_concat_commutes_with_to_local(one, other):
    assert contents(DataProto.concat([one, other])) == contents(one) + contents(other)


@quick
@given(batches())
def test_union_merges_columns_and_select_takes_them_apart(batch):
    one, other = batch.select(["tokens"]), batch.select(["number"])
    assert contents(one | other) == contents(other.union(one)) == contents(batch)
    assert (batch | one).column_names == ("tokens", "number")
    assert one.column_names == ("tokens",)
    with pytest.raises(DataError, match="no column 'number'[\\s\\S]*tokens"):
        one.to_local("number")


@quick
@given(batches(min_size=2), st.data())
def test_nothing_is_fetched_before_to_local_and_each_handle_once(batch, data):
    ids = batch.info.sample_id
    half = len(ids) // 2
    handles = [CountingHandle({"a": ids[:half], "b": ids[:half] * 2}), CountingHandle({"a": ids[half:], "b": ids[half:] * 2})]
    pieces = [Piece(tuple(range(half)), handles[0]), Piece(tuple(range(half, len(ids))), handles[1])]
    counted = DataProto(batch.info, {"a": pieces, "b": pieces})
    rows = data.draw(lists_of_rows(batch))
    mixed = DataProto.concat([counted.take(rows), *counted.split(2)]) | DataProto.concat([counted.take(rows), *counted.split(2)]).select([])
    assert [handle.fetches for handle in handles] == [0, 0]
    local = mixed.to_local()
    assert [handle.fetches for handle in handles] == [1, 1]
    assert local["b"].tolist() == [2 * x for x in local["a"].tolist()] == [2 * x for x in [*rows, *ids]]


def test_gather_rows_leaves_other_handles_alone():
    handles = [CountingHandle({"x": np.array([1.0, 2.0])}), CountingHandle({"x": np.array([3.0])})]
    pieces = [Piece((2, 0), handles[0]), Piece((1,), handles[1])]
    assert gather_rows({"x": pieces}, [0, 2, 0])["x"].tolist() == [2.0, 1.0, 2.0]
    assert [handle.fetches for handle in handles] == [1, 0]


def test_gather_rows_fetches_all_handles_in_one_call():
    calls = []

    def fetch(handles):
        calls.append(len(handles))
        return [handle.fetch() for handle in handles]

    pieces = [Piece((0,), LocalHandle({"x": np.ones(1)})), Piece((1,), LocalHandle({"x": np.zeros(1)}))]
    assert gather_rows({"x": pieces}, [1, 0], fetch)["x"].tolist() == [0.0, 1.0]
    assert calls == [2]


def test_arrays_of_more_dimensions_keep_them():
    batch = DataProto(info_of([0, 1]), {"m": [Piece((1, 0), LocalHandle({"m": np.arange(6).reshape(2, 3)}))]})
    assert batch.to_local("m")["m"].tolist() == [[3, 4, 5], [0, 1, 2]]


@quick
@given(batches())
def test_a_batch_travels(batch):
    assert contents(pickle.loads(pickle.dumps(batch))) == contents(batch)


def test_a_batch_is_immutable():
    batch = DataProto(info_of([0]), {})
    longer = batch.with_column("x", [Piece((0,), LocalHandle({"x": np.ones(1)}))])
    assert batch.column_names == ()
    assert longer.column_names == ("x",)
    with pytest.raises(AttributeError):
        batch.info = info_of([1])


def test_pieces_must_cover_the_batch_once():
    handle = LocalHandle({"x": np.ones(2)})
    for rows in ([(0,)], [(0, 1), (1,)], [(0, 2)], [(0, 0)]):
        with pytest.raises(DataError, match="do not cover the batch"):
            DataProto(info_of([0, 1]), {"x": [Piece(r, handle) for r in rows]})


def test_union_refuses_other_samples_and_other_handles():
    one, other = (DataProto(info_of([0, 1]), {"x": [Piece((0, 1), LocalHandle({"x": np.ones(2)}))]}) for _ in range(2))
    with pytest.raises(DataError, match="column 'x', and it is not the same one"):
        one.union(other)
    with pytest.raises(DataError, match="different samples[\\s\\S]*'sample_id' differs"):
        one.union(other.take([1, 0]))
    with pytest.raises(DataError, match="different columns"):
        DataProto.concat([one, other.select([])])
    with pytest.raises(DataError, match="exists"):
        one.with_column("x", other.pieces("x"))


def test_bad_rows_and_bad_shards_are_refused():
    good = DataProto(info_of([0, 1]), {"x": [Piece((0, 1), LocalHandle({"x": np.ones(2)}))]})
    for rows in ([2], [-1]):
        with pytest.raises(DataError, match="position outside the batch"):
            good.take(rows)
    with pytest.raises(DataError, match="2 samples into 3 parts"):
        good.split(3)
    with pytest.raises(DataError, match="no rows"):
        good.take([]).to_local()
    with pytest.raises(DataError, match="at least one"):
        DataProto.concat([])
    short = Ragged.from_list([[1]], np.int32)
    with pytest.raises(DataError, match="another size[\\s\\S]*1 rows[\\s\\S]*2 rows"):
        DataProto(info_of([0, 1]), {"x": [Piece((0, 1), LocalHandle({"x": short}))]}).to_local()
    with pytest.raises(DataError, match="another size"):
        DataProto(info_of([0, 1]), {"x": [Piece((0, 1), LocalHandle({"x": short}), picks=(0, 1))]}).to_local()
    with pytest.raises(DataError, match="shard without column 'x'"):
        DataProto(info_of([0]), {"x": [Piece((0,), LocalHandle({"y": short}))]}).to_local()
