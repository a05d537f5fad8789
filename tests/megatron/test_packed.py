"""Packing over context-parallel ranks: nothing is lost, nothing is there twice, and every query sees exactly its own past."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.megatron.packed import ContextRank, PackedTokens, pack
from megarl.types import Ragged

samples = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=7)


def packed_on(lengths: list[tuple[int, int]], size: int, align: int) -> tuple[list[PackedTokens], Ragged, Ragged]:
    """Every token has a number of its own."""
    numbers = iter(range(1, 10_000))
    prompts = Ragged.from_list([[next(numbers) for _ in range(p)] for p, _ in lengths], np.int32)
    responses = Ragged.from_list([[next(numbers) for _ in range(r)] for _, r in lengths], np.int32)
    ranks = [pack(prompts, responses, align=align, device=torch.device("cpu"), context=ContextRank(r, size)) for r in range(size)]
    return ranks, prompts, responses


@settings(deadline=None, max_examples=60)
@given(samples, st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_each_token_is_on_one_rank_at_its_position(lengths: list[tuple[int, int]], size: int, align: int) -> None:
    ranks, prompts, responses = packed_on(lengths, size, align)
    expected = {}
    for i in range(len(lengths)):
        expected |= {int(token): place for place, token in enumerate([*prompts[i], *responses[i]])}
    found = [(t, p) for r in ranks for t, p in zip(r.tokens[0].tolist(), r.positions[0].tolist(), strict=True) if t]
    assert len(found) == len(expected)
    assert dict(found) == expected
    assert all(torch.equal(r.sequences.positions, r.positions[0]) for r in ranks)
    assert len({r.tokens.shape for r in ranks}) == 1, "ranks have equally many"
    assert ranks[0].tokens.shape[1] % align == 0
    assert sum(ranks[0].sequences.lengths) == size * ranks[0].tokens.shape[1]


@settings(deadline=None, max_examples=60)
@given(samples, st.integers(1, 4), st.sampled_from([1, 2]))
def test_predictors_are_the_tokens_before_the_responses(lengths: list[tuple[int, int]], size: int, align: int) -> None:
    ranks, prompts, responses = packed_on(lengths, size, align)
    before, last = [], []
    for i in range(len(lengths)):
        whole = [*prompts[i], *responses[i]]
        before += whole[len(prompts[i]) - 1 : -1] if len(responses[i]) else []
        last.append(whole[-1])
    for what, picks, wanted in (("predictors", "picks", before), ("finals", "final_picks", last)):
        got = {}
        for rank in ranks:
            for row, pick in zip(getattr(rank, what).tolist(), getattr(rank, picks).tolist(), strict=True):
                assert pick not in got
                got[pick] = int(rank.tokens[0, row])
        assert [got[i] for i in range(len(wanted))] == [int(token) for token in wanted]
    for rank in ranks:
        assert rank.targets.tolist() == responses.values[rank.picks.numpy()].tolist()
        assert (rank.samples, rank.responses) == (len(lengths), len(responses.values))


@settings(deadline=None, max_examples=60)
@given(samples, st.integers(1, 4), st.sampled_from([1, 2]), st.sampled_from([None, 1, 2, 5, 16, 17, 50]))
def test_each_query_sees_exactly_the_past_of_its_sequence(
    lengths: list[tuple[int, int]], size: int, align: int, window: int | None
) -> None:
    """And of the past no more than a window, where there is one."""
    ranks, _, _ = packed_on(lengths, size, align)
    everything = np.concatenate([rank.tokens[0].numpy() for rank in ranks])  # as attention gathers keys
    positions = np.concatenate([rank.positions[0].numpy() for rank in ranks])
    for rank in ranks:
        seen: dict[int, list[int]] = {}
        for part in rank.sequences.rectangles(window):
            for row in range(part.queries.shape[0]):
                mask = (
                    part.mask.expand(len(part.queries), -1, -1, -1)[row, 0]
                    if part.mask is not None
                    else torch.ones(part.queries.shape[1], part.keys.shape[1]).tril().bool()
                )
                for q in np.flatnonzero(part.real[row]):
                    assert int(part.queries[row, q]) not in seen
                    seen[int(part.queries[row, q])] = sorted(part.keys[row][mask[q]].tolist())
        assert sorted(seen) == list(range(rank.tokens.shape[1])), "every token asks once"
        for query, keys in seen.items():
            token, place = int(rank.tokens[0, query]), int(rank.positions[0, query])
            assert sorted(positions[keys]) == list(range(0 if window is None else max(0, place + 1 - window), place + 1))
            if token:  # tokens of one sequence have consecutive numbers in prompt and response
                assert token in everything[keys]


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1"):
        pack(Ragged.from_list([[1], []], np.int32), Ragged.from_list([[1], [2]], np.int32), align=1, device=torch.device("cpu"))


def test_no_mask_is_made_where_no_sequence_is_longer_than_the_window() -> None:
    (rank,), _, _ = packed_on([(3, 4), (20, 10)], 1, 1)
    masks = {window: [part.mask is None for part in rank.sequences.rectangles(window)] for window in (None, 30, 29, 6)}
    assert masks == {None: [True, True], 30: [True, True], 29: [True, False], 6: [False, False]}
