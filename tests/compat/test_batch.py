"""Batches as values: what union, split and concat keep, and what they refuse. Columns lie in this process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.compat.batch import Estimate, Penalty, TrainerBatch, check_batch, numbered
from megarl.data.proto import DataProto, Piece
from megarl.errors import DataError
from megarl.types import LocalHandle, Ragged, SampleInfo


def batch(count: int = 4, step: int = 1, columns: tuple[str, ...] = ("prompts", "responses")) -> TrainerBatch:
    """Two samples a group; token values tell where they come from."""
    ids = np.arange(count)
    lengths = np.full(count, 2)
    info = SampleInfo(ids, ids, ids // 2, lengths, lengths, np.zeros(count, dtype=bool))
    proto = DataProto(info, {})
    for i, name in enumerate(columns):
        rows = [[100 * i + 10 * row, 100 * i + 10 * row + 1] for row in range(count)]
        proto = proto.with_column(name, [Piece(tuple(range(count)), LocalHandle({name: Ragged.from_list(rows, np.int32)}))])
    return TrainerBatch(numbered(proto, step), None, step, count, np.arange(count, dtype=float))


def local(found: TrainerBatch, name: str) -> list[list[int]]:
    column = found.proto.to_local(name)[name]
    return [column[i].tolist() for i in range(len(found))]


def test_split_and_concat_give_the_batch_back() -> None:
    whole = batch(5)
    joined = TrainerBatch.concat(whole.split(2))
    assert local(joined, "responses") == local(whole, "responses")
    assert np.array_equal(joined.info.group, whole.info.group) and np.array_equal(joined.scores, whole.scores)
    assert (joined.drawn, joined.step, len(joined)) == (5, 1, 5)
    assert [len(part) for part in whole.split(2)] == [3, 2]


def test_groups_of_different_draws_stay_apart() -> None:
    joined = TrainerBatch.concat([batch(4, step=1), batch(4, step=2)])
    assert len(set(joined.info.group.tolist())) == 4 and len(set(joined.info.sample_id.tolist())) == 8
    assert joined.step == 2 and joined.drawn == 8


def test_sequences_are_a_column_where_their_parts_are() -> None:
    found = batch()
    assert found.column_names == ("prompts", "responses", "sequences")
    assert found.select(["responses", "sequences"]).column_names == ("responses",)
    with pytest.raises(DataError, match=r"expected: \['responses'\]"):
        found.select("responses")


def test_union_merges_columns_of_the_same_samples_alone() -> None:
    whole = batch(4, columns=("prompts", "responses", "values"))
    left, right = whole.select(["prompts"]), whole.select(["values"])
    assert (left | right).column_names == ("prompts", "values")
    with pytest.raises(DataError, match="different samples"):
        left.union(right.take([0, 1, 3, 2]))
    with pytest.raises(DataError, match="has a column|have a column"):
        left.union(replace(batch(4), run=None))
    with pytest.raises(DataError, match="their own scores"):
        left.union(right.with_scores([1, 1, 1, 1]))
    with pytest.raises(DataError, match=r"TrainerBatch.union\)\n +got: +DataProto"):
        left.union(right.proto)


def test_rewards_computed_apart_are_not_joined() -> None:
    one, two = batch(4, step=1), batch(4, step=2)
    mine, others = Estimate(1.0, 1.0, True, {}), Estimate(1.0, 1.0, True, {})
    with pytest.raises(DataError, match="computed apart(.|\n)*concat first"):
        TrainerBatch.concat([replace(one, estimate=mine), replace(two, estimate=others)])
    with pytest.raises(DataError, match="computed apart"):
        TrainerBatch.concat([replace(one, penalty=Penalty(0.1, 0.2, "k1")), two])
    with pytest.raises(DataError, match="computed apart"):
        TrainerBatch.concat([replace(one, scores=None), two])
    with pytest.raises(DataError, match="their own estimate"):
        replace(one, estimate=mine).union(replace(one, estimate=others))
    assert replace(one, estimate=mine).union(one).estimate is mine
    assert TrainerBatch.concat(replace(one, estimate=mine).split(2)).estimate is mine


def test_scores_by_hand() -> None:
    found = replace(batch(), scores=None).with_scores([1, 2, 3, 4])
    assert found.scores.tolist() == [1.0, 2.0, 3.0, 4.0]
    for scores in ([1, 2, 3], [[1, 2, 3, 4]], [1, 2, 3, float("nan")]):
        with pytest.raises(DataError, match="don't fit"):
            found.with_scores(scores)
    with pytest.raises(DataError, match="computed already"):
        replace(found, estimate=Estimate(1.0, 1.0, True, {})).with_scores([1, 2, 3, 4])


def test_missing_columns_name_the_call() -> None:
    with pytest.raises(DataError, match=r"no column 'ref_log_probs'(.|\n)*call ref_policy_wg.compute_ref_log_prob before"):
        batch().require("prompts", "ref_log_probs", by="apply_kl_penalty")
    with pytest.raises(DataError, match="what generate_sequences gave"):
        check_batch({"prompts": []}, "update_actor")
