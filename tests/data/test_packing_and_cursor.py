import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.cursor import PromptCursor
from megarl.data.packing import balance, cut_for_replicas, micro_batches
from megarl.errors import CheckpointError, ConfigError, DataError
from tests import examples

quick = settings(max_examples=examples(40), deadline=None)
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


def check_cut(sizes, replicas, budget):
    """What every cut keeps. Returns the numbers of micro-batches and the token totals of the replicas."""
    cut = cut_for_replicas(sizes, replicas, budget)
    assert len(cut) == replicas
    together = [rows for micro in cut for rows in micro]
    assert is_partition(together, sizes)
    assert all(0 < total <= budget for total in totals(together, sizes))
    counts = [len(micro) for micro in cut]
    assert min(counts) >= 1
    if len(sizes) % replicas == 0:
        assert min(counts) == max(counts)
    if min(counts) != max(counts):  # only where fewer micro-batches break the budget and more would be empty
        assert max(counts) - min(counts) == 1
        assert max(counts) * replicas > len(sizes)
        assert sum(counts) == len(micro_batches(sizes, budget))
    return counts, [sum(totals(micro, sizes)) for micro in cut]


@quick
@given(lengths, st.integers(1, 9), st.integers(500, 2000))
def test_replicas_get_equal_numbers_of_micro_batches(sizes, replicas, budget):
    if replicas > len(sizes):
        with pytest.raises(DataError, match="can't be spread"):
            cut_for_replicas(sizes, replicas, budget)
        return
    check_cut(sizes, replicas, budget)


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("seed", range(20))
def test_long_tails_are_cut_for_any_number_of_replicas(replicas, seed):
    sizes = np.minimum(np.random.default_rng(seed).lognormal(6.5, 1.2, 4 * replicas).astype(int) + 1, 4096)
    counts, tokens = check_cut(sizes, replicas, 4096)
    assert len(set(counts)) == 1
    assert max(tokens) - min(tokens) <= 4096


@quick
@given(lengths, st.integers(500, 2000), st.integers(2, 4))
def test_a_multiple_is_met_where_the_samples_are_enough(sizes, budget, multiple):
    (cut,) = cut_for_replicas(sizes, 1, budget, multiple=multiple)
    assert is_partition(cut, sizes)
    assert all(0 < total <= budget for total in totals(cut, sizes))
    fewest = len(micro_batches(sizes, budget))
    wanted = -(-fewest // multiple) * multiple
    assert len(cut) == (wanted if wanted <= len(sizes) else fewest)


def test_a_long_sample_beside_short_ones():
    assert check_cut([4096, 2100, 2100, 100], 2, 4096)[0] == [2, 2]  # the long one's replica takes a short one besides
    assert check_cut([4096, 2000, 2000], 2, 4096)[0] == [1, 1]
    assert sorted(check_cut([4096, 2100, 2100], 2, 4096)[0]) == [1, 2]  # three that exclude each other: equal numbers don't exist
    with pytest.raises(ConfigError, match="sample 1 has 4097 tokens"):
        cut_for_replicas([1, 4097], 2, 4096)


def test_a_mini_batch_of_uneven_samples_is_spread_evenly():
    rng = np.random.default_rng(0)
    unevenness = []
    for _ in range(50):
        sizes = np.minimum(rng.lognormal(6.5, 1.2, 32).astype(int) + 1, 4096)
        _, tokens = check_cut(sizes, 4, 4096)
        unevenness.append(max(tokens) / (sum(tokens) / 4))
    assert np.mean(unevenness) < 1.02  # dealing whole micro-batches alone gives 1.04


def test_one_replica_gets_what_micro_batches_gives():
    sizes = np.random.default_rng(1).integers(1, 500, 60)
    assert sorted(cut_for_replicas(sizes, 1, 1000)[0]) == sorted(micro_batches(sizes, 1000))


def test_a_large_batch_is_cut_at_once_and_evenly():
    sizes = np.minimum(np.random.default_rng(0).lognormal(6.5, 1, 16384).astype(int) + 1, 4096)
    began = time.process_time()
    _, tokens = check_cut(sizes, 64, 4096)
    assert time.process_time() - began < 2  # 0.1 s as a rule; a search that grows with the square of the batch takes several
    assert max(tokens) / (sum(tokens) / 64) < 1.02


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
