"""Which samples go to which data-parallel rank, and which go through the model together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megarl.errors import ConfigError, DataError, explain


def balance(lengths: Sequence[int], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Spread samples over ``parts`` with token totals as equal as possible.

    The longest sample left goes to the part with the fewest tokens (longest processing time first, Graham 1969): the totals of
    two parts differ by no more than the longest sample. With ``equal_counts`` full parts drop out on the way.

    Args:
        lengths: tokens of each sample, 1 or more.
        parts: number of parts.
        equal_counts: every part gets the same number of samples; numbers differ by one where B is no multiple of ``parts``.

    Returns:
        For each part its rows, ascending. The same input gives the same output on every rank.

    Raises:
        DataError: fewer samples than parts, or a length below 1.
    """
    sizes = _check_lengths(lengths)
    if not 1 <= parts <= len(sizes):
        raise DataError(
            explain(
                "samples can't be spread", where="balance", got=f"{len(sizes)} samples for {parts} parts", expected="a sample for each part"
            )
        )
    return [sorted(rows) for rows in _longest_first(sizes, parts, equal_counts=equal_counts)]


def micro_batches(lengths: Sequence[int], max_tokens: int, min_count: int = 1) -> list[list[int]]:
    """Cut samples into few micro-batches of at most ``max_tokens`` tokens each, with token totals as equal as possible.

    Ranks that must run equal counts call this once, agree on the largest count, and call it again with that ``min_count``:
    whatever the first call gave, the second gives exactly ``min_count``.

    Args:
        lengths: tokens of each sample, prompt and response, 1 or more.
        max_tokens: token budget of one micro-batch.
        min_count: least number of micro-batches.

    Returns:
        For each micro-batch its rows, ascending; none is empty.

    Raises:
        ConfigError: one sample alone exceeds ``max_tokens``.
        DataError: fewer samples than ``min_count``, or a length below 1.
    """
    sizes = _check_lengths(lengths)
    if not 1 <= min_count <= len(sizes):
        raise DataError(
            explain(
                "too few samples for the micro-batches demanded",
                where="micro_batches",
                got=f"{len(sizes)} samples for {min_count} micro-batches",
                expected="at least one sample each",
                do="use fewer data-parallel ranks or more samples per mini-batch",
            )
        )
    _check_budget(sizes, max_tokens)
    fewest = _fewest_that_fit(sizes, max_tokens)
    if len(fewest) < min_count:
        evened = _longest_first(sizes, min_count)
        fewest = evened if _fits(evened, sizes, max_tokens) else _cut_to_count(fewest, sizes, min_count)
    return [sorted(rows) for rows in fewest]


def _check_lengths(lengths: Sequence[int]) -> list[int]:
    sizes = [int(length) for length in lengths]
    bad = [row for row, size in enumerate(sizes) if size < 1]
    if bad:
        raise DataError(explain("samples without tokens", where="packing", got=f"rows {bad[:8]}", expected="1 token or more"))
    return sizes


def _check_budget(sizes: list[int], max_tokens: int) -> None:
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[longest] > max_tokens:
        raise ConfigError(
            explain(
                "one sample is longer than a micro-batch may be",
                where="max_tokens_per_micro_batch",
                got=f"sample {longest} has {sizes[longest]} tokens, {sizes[longest]} > {max_tokens}",
                expected="max_tokens_per_micro_batch >= max_prompt_tokens + max_response_tokens",
                do="raise max_tokens_per_micro_batch, or shorten prompts or responses",
            )
        )


def _by_length(sizes: list[int]) -> list[int]:
    """Rows, longest first; equal lengths in the order of their rows."""
    return sorted(range(len(sizes)), key=lambda row: (-sizes[row], row))


def _longest_first(sizes: list[int], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """LPT. No part stays empty, since an empty one has the fewest tokens."""
    share, extra = divmod(len(sizes), parts)  # with equal counts: ``extra`` parts hold one sample more than the share
    chosen: list[list[int]] = [[] for _ in range(parts)]
    totals = [(0, part) for part in range(parts)]
    for row in _by_length(sizes):
        total, part = heapq.heappop(totals)
        while equal_counts and len(chosen[part]) == share and extra == 0:
            total, part = heapq.heappop(totals)  # that part is full: it stays off the heap
        chosen[part].append(row)
        full = equal_counts and len(chosen[part]) > share
        extra -= full
        if not full:
            heapq.heappush(totals, (total + sizes[row], part))
    return chosen


def _fewest_that_fit(sizes: list[int], max_tokens: int) -> list[list[int]]:
    """Try the least count that the total allows, then first-fit decreasing's count, both evened out; else first-fit itself."""
    least = -(-sum(sizes) // max_tokens)
    packed = _first_fit_decreasing(sizes, max_tokens)
    for count in sorted({least, len(packed)}):
        evened = _longest_first(sizes, count)
        if _fits(evened, sizes, max_tokens):
            return evened
    return packed


def _first_fit_decreasing(sizes: list[int], max_tokens: int) -> list[list[int]]:
    """At most 11/9 of the fewest possible bins, plus one (Johnson 1973)."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in _by_length(sizes):
        place = next((i for i, free in enumerate(room) if free >= sizes[row]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[place].append(row)
        room[place] -= sizes[row]
    return bins


def _fits(bins: list[list[int]], sizes: list[int], max_tokens: int) -> bool:
    return all(sum(sizes[row] for row in rows) <= max_tokens for rows in bins)


def _cut_to_count(bins: list[list[int]], sizes: list[int], count: int) -> list[list[int]]:
    """Halve the fullest bin that has two samples or more until there are ``count`` bins."""
    bins = list(bins)
    while len(bins) < count:
        fullest = max((i for i, rows in enumerate(bins) if len(rows) > 1), key=lambda i: sum(sizes[row] for row in bins[i]))
        rows = bins.pop(fullest)
        bins += [[rows[i] for i in half] for half in _longest_first([sizes[row] for row in rows], 2)]
    return bins
