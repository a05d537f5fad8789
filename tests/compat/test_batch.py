"""Batches as values: what union, split and concat keep, and what they refuse. Columns lie in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.compat.batch import Estimate, Life, Penalty, TrainerBatch, check_batch, check_trainable, check_whole_groups, numbered
from megarl.compat.functions import apply_kl_penalty, compute_advantage
from megarl.compat.pools import RayResourcePool
from megarl.compat.settings import Roles, trainer_settings
from megarl.controller.context import Context, RunPaths
from megarl.data.proto import DataProto, Piece
from megarl.errors import ConfigError, DataError
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
    for scores in ("abc", ["a"] * 4, [None, {}, 1, 2], [[1], [2, 3], 4, 5]):
        with pytest.raises(DataError, match=r"no numbers \(in with_scores\)(.|\n)*4 finite numbers"):
            found.with_scores(scores)
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


def of_a_run(whole: TrainerBatch, name: str = "run", *overrides: str) -> TrainerBatch:
    """The batch as a GRPO trainer with two responses a prompt would give it; there are no processes."""
    model, pool = {"model_name_or_path": "m"}, RayResourcePool([1])
    grpo = ["algorithm.advantage_estimator=grpo", "rollout.responses_per_prompt=2", *overrides]
    config = trainer_settings(Roles(model, None, None, pool, None, None), "a.parquet", None, None, grpo, Path(name)).config
    return replace(whole, run=Context(config, RunPaths(Path(name)), None, None, None, None))


def test_a_mask_takes_where_it_is_true() -> None:
    whole = batch(8)
    for mask in (np.array([True] * 4 + [False] * 4), [True] * 4 + [False] * 4):
        found = whole.take(mask)
        assert (found.scores.tolist(), found.drawn) == ([0, 1, 2, 3], 4) and local(found, "prompts") == local(whole, "prompts")[:4]
    assert whole.take(np.array([5, 2])).scores.tolist() == [5, 2]


@pytest.mark.parametrize(
    "rows, said",
    [
        ([99], r"outside the batch(.|\n)*\[99\]"),
        ([-1], "outside the batch"),
        ([], "no sample"),
        ([False] * 4, "no sample"),
        ([True] * 3, "mask of 4"),
        ([True] * 5, "mask of 4"),
        ([0.5], "no positions"),
        ("ab", "no positions"),
        (1, "no positions"),
        ([[0], [1, 2]], "no positions"),
        ([[0, 1]], "no positions"),
        ([0, 0, 1], r"taken twice(.|\n)*\[0\]"),
    ],
)
def test_positions_that_are_none_are_refused(rows: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        batch(4).take(rows)


def test_a_sample_is_joined_once() -> None:
    whole = batch(4)
    for parts in ([whole, whole], [whole, whole.take([3])]):
        with pytest.raises(DataError, match="in the parts twice"):
            TrainerBatch.concat(parts)
    with pytest.raises(DataError, match="what generate_sequences gave"):
        TrainerBatch.concat([{"prompts": []}])
    with pytest.raises(DataError, match="different trainers"):
        TrainerBatch.concat([of_a_run(batch(4, step=1)), of_a_run(batch(4, step=2))])


def test_advantages_that_a_penalty_replaced_are_not_trained_on() -> None:
    drawn = batch(4)
    old = replace(drawn, estimate=Estimate(1.0, 1.0, True, {}))
    parts = [old, old.take([0, 1]), old.select(["prompts"])]
    for part in parts:
        check_trainable(part, "update_critic")
    old.estimate.superseded = True
    for part in parts:
        with pytest.raises(
            DataError, match=r"applied to these samples afterwards \(in update_critic\)(.|\n)*train on what apply_kl_penalty"
        ):
            check_trainable(part, "update_critic")
    check_trainable(drawn, "update_critic")


def test_groups_are_compared_whole() -> None:
    whole = of_a_run(batch(8))
    for good in (whole, whole.take([5, 0, 4, 1]), *whole.split(4)):
        check_whole_groups(good, "compute_advantage")
    for cut in (whole.take([0, 2, 4, 6]), whole.take([0, 1, 2]), whole.split(3)[0]):
        with pytest.raises(DataError, match=r"grpo compares the samples(.|\n)*2 samples of each(.|\n)*split after compute_advantage"):
            compute_advantage(replace(cut, proto=cut.proto.with_column("log_probs", cut.proto.pieces("prompts"))))


def test_numbers_out_of_range_are_refused_before_anything_is_computed() -> None:
    for value, said in ((-0.1, "out of range"), (float("nan"), "out of range"), (float("inf"), "out of range"), ("a", "is no number")):
        controller = SimpleNamespace(value=value, update=None)
        controller.update = lambda *_: pytest.fail("the controller was told of a KL")
        with pytest.raises(ConfigError, match=rf"kl_ctrl.value {said}"):
            apply_kl_penalty(batch(4), controller)
    with pytest.raises(ConfigError, match="no KL controller"):
        apply_kl_penalty(batch(4), 0.1)
    for name in ("gamma", "lam"):
        for value in ("a", [1.0], float("nan"), -0.1, 1.5):
            with pytest.raises(ConfigError, match=rf"{name} (is no number|out of range) \(in compute_advantage\)"):
                compute_advantage(of_a_run(batch(4)), **{name: value})


@pytest.mark.slow
def test_batches_end_with_their_trainer() -> None:
    life = Life()
    whole = replace(of_a_run(batch(4)), life=life)
    parts = [whole, whole.take([0, 1]), whole.select(["prompts"])]
    life.closed = True
    for part in parts:
        for call in (TrainerBatch.to_local, compute_advantage, lambda b: apply_kl_penalty(b, SimpleNamespace())):
            with pytest.raises(DataError, match="closed, and their columns are gone"):
                call(part)
    mine = of_a_run(batch(4))
    assert check_batch(mine, "update_actor", mine.run) is mine
    with pytest.raises(DataError, match=r"samples of another trainer \(in update_actor\)(.|\n)*got: +theirs(.|\n)*expected: +run"):
        check_batch(of_a_run(batch(4), "theirs"), "update_actor", mine.run)
