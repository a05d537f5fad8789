import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.cursor import PromptCursor
from megarl.data.packing import balance, micro_batches
from megarl.errors import CheckpointError, ConfigError, DataError

quick = settings(max_examples=40, deadline=None)
usual, hostile = st.integers(1, 500), st.sampled_from([1, 300, 301, 499, 500])
lengths = st.lists(usual, min_size=1, max_size=80) | st.lists(hostile, min_size=1, max_size=80)


def totals(parts, sizes):
    return [sum(sizes[row] for row in rows) for rows in parts]


def is_partition(parts, sizes):
    return sorted(row for rows in parts for row in rows) == list(range(len(sizes)))


@quick
@given(lengths, st.integers(1, 9), st.booleans())
def test_balance_is_a_partition_within_the_longest_sample(sizes, parts, equal_counts):
    if parts > len(sizes):
        with pytest.raises(DataError, match="can't be spread"):
            balance(sizes, parts, equal_counts=equal_counts)
        return
    chosen = balance(sizes, parts, equal_counts=equal_counts)
    assert len(chosen) == parts
    assert is_partition(chosen, sizes)
    assert all(rows == sorted(rows) for rows in chosen)
    counts = [len(rows) for rows in chosen]
    assert min(counts) >= 1
    if not equal_counts:
        assert max(totals(chosen, sizes)) - min(totals(chosen, sizes)) <= max(sizes)
    else:
        assert max(counts) - min(counts) == (1 if len(sizes) % parts else 0)


def test_balance_of_a_usual_batch_is_nearly_even():
    sizes = np.random.default_rng(0).lognormal(5, 1, 512).astype(int) + 1
    for equal_counts in (False, True):
        found = totals(balance(sizes, 8, equal_counts=equal_counts), sizes)
        assert max(found) / (sum(found) / 8) < 1.01


@quick
@given(lengths, st.integers(500, 2000))
def test_micro_batches_keep_the_budget(sizes, budget):
    cut = micro_batches(sizes, budget)
    assert is_partition(cut, sizes)
    assert all(0 < total <= budget for total in totals(cut, sizes))
    assert len(cut) <= 11 / 9 * (2 * sum(sizes) / budget + 1) + 1  # no more than twice the least: two neighbours exceed the budget


@quick
@given(lengths, st.integers(500, 2000), st.integers(0, 10))
def test_a_demanded_count_is_met_exactly(sizes, budget, more):
    demanded = min(len(micro_batches(sizes, budget)) + more, len(sizes))
    cut = micro_batches(sizes, budget, min_count=demanded)
    assert len(cut) == demanded
    assert is_partition(cut, sizes)
    assert all(0 < total <= budget for total in totals(cut, sizes))


def test_micro_batches_are_even():
    assert sorted(totals(micro_batches([60, 50, 40, 30, 20], 110), [60, 50, 40, 30, 20])) == [90, 110]
    assert sorted(totals(micro_batches([60, 40, 30, 30], 120), [60, 40, 30, 30])) == [70, 90]


def test_packing_refuses_what_can_not_be_packed():
    with pytest.raises(ConfigError, match="sample 1 has 11 tokens, 11 > 10"):
        micro_batches([3, 11], 10)
    with pytest.raises(DataError, match="2 samples for 3"):
        micro_batches([3, 4], 10, min_count=3)
    with pytest.raises(DataError, match="without tokens"):
        balance([3, 0], 1)


@quick
@given(st.integers(1, 30), st.booleans(), st.integers(0, 2**40), st.lists(st.integers(0, 70), max_size=8))
def test_epochs_are_permutations_however_they_are_taken(rows, shuffle, seed, takes):
    cursor, whole = PromptCursor(rows, shuffle, seed), PromptCursor(rows, shuffle, seed)
    taken = np.concatenate([np.empty(0, dtype=np.int64), *(cursor.take(n) for n in takes)])
    assert np.array_equal(taken, whole.take(sum(takes)))
    for start in range(0, len(taken) - rows + 1, rows):
        assert sorted(taken[start : start + rows]) == list(range(rows))


def test_orders_differ_between_epochs_and_seeds():
    first = PromptCursor(100, True, 1)
    epochs = [first.take(100).tolist(), first.take(100).tolist()]
    assert epochs[0] != epochs[1] != PromptCursor(100, True, 2).take(100).tolist()
    assert PromptCursor(100, False, 1).take(100).tolist() == list(range(100))


@quick
@given(st.integers(1, 20), st.integers(0, 60))
def test_a_resumed_cursor_goes_on(rows, before):
    cursor = PromptCursor(rows, True, 7)
    cursor.take(before)
    resumed = PromptCursor(rows, True, 7)
    resumed.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    assert np.array_equal(resumed.take(50), cursor.take(50))


def test_a_cursor_refuses_another_data_set():
    state = PromptCursor(10, True, 7).state_dict()
    with pytest.raises(DataError, match="11 prompts[\\s\\S]*10 prompts"):
        PromptCursor(11, True, 7).load_state_dict(state)
    with pytest.raises(ConfigError, match="seed"):
        PromptCursor(10, True, 8).load_state_dict(state)
    with pytest.raises(CheckpointError):
        PromptCursor(10, True, 7).load_state_dict(state | {"position": 10})
    with pytest.raises(DataError, match="no prompts"):
        PromptCursor(0, True, 7)
    with pytest.raises(ConfigError, match="seed"):
        PromptCursor(1, True, -1)
