"""Which samples go to which data-parallel rank, and which go through the model together."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
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
    _check_spread(sizes, parts)
    return [sorted(rows) for rows in _longest_first(sizes, parts, equal_counts=equal_counts)]


def cut_for_replicas(lengths: Sequence[int], replicas: int, max_tokens: int, *, multiple: int = 1) -> list[list[list[int]]]:
    """Give each data-parallel replica its micro-batches: equal numbers of them, token totals as equal as that allows.

    Two ways are tried. Spreading samples over replicas and cutting each replica's by itself has the more even totals, but a replica of
    few long samples can't always be cut into its neighbour's number. Cutting all samples into a multiple of ``replicas`` and dealing
    whole micro-batches has the fewest of them, and goes wrong only where samples are too few for such a multiple (three samples of
    which no two fit together, on two replicas). There the numbers of two replicas differ by one: replicas of a dense model meet only
    when gradients are reduced, so that none waits for the other in between. (The engine adds micro-batches that teach nothing where it
    does wait: for experts, and for the multiple that an interleaved pipeline takes.)

    Args:
        lengths: tokens of each sample, prompt and response, 1 or more.
        replicas: number of data-parallel replicas.
        max_tokens: token budget of one micro-batch.
        multiple: each replica's number of micro-batches is one of it, where its samples are enough for that.

    Returns:
        For each replica its micro-batches, for each micro-batch its rows, ascending; none is empty, and every row is in one of them.

    Raises:
        ConfigError: one sample alone exceeds ``max_tokens``.
        DataError: fewer samples than replicas, or a length below 1.
    """
    sizes = _check_lengths(lengths)
    _check_spread(sizes, replicas)
    _check_budget(sizes, max_tokens)

    def cost(replica_cuts: list[list[list[int]]]) -> tuple[bool, int, int]:  # unequal, micro-batches and tokens of the busiest
        counts = [len(cut) for cut in replica_cuts]
        return min(counts) < max(counts), max(counts), max(sum(sizes[row] for rows in cut for row in rows) for cut in replica_cuts)

    spread = _spread_then_cut(sizes, replicas, max_tokens, multiple)
    if spread is not None and len(spread[0]) == _up(-(-sum(sizes) // (replicas * max_tokens)), multiple):
        return spread  # as few as the total allows
    dealt = _cut_then_deal(sizes, replicas, max_tokens, multiple)
    return dealt if spread is None else min(spread, dealt, key=cost)


def micro_batches(lengths: Sequence[int], max_tokens: int, min_count: int = 1) -> list[list[int]]:
    """Cut samples into few micro-batches of at most ``max_tokens`` tokens each, with token totals as equal as possible.

    Args:
        lengths: tokens of each sample, prompt and response, 1 or more.
        max_tokens: token budget of one micro-batch.
        min_count: least number of micro-batches; where the budget asks for fewer, exactly this many.

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
    cut = _raise_count(_fewest_that_fit(sizes, max_tokens), sizes, max_tokens, min_count)
    return [sorted(rows) for rows in cut]


def _check_lengths(lengths: Sequence[int]) -> list[int]:
    sizes = [int(length) for length in lengths]
    bad = [row for row, size in enumerate(sizes) if size < 1]
    if bad:
        raise DataError(explain("samples without tokens", where="packing", got=f"rows {bad[:8]}", expected="1 token or more"))
    return sizes


def _check_spread(sizes: list[int], parts: int) -> None:
    if not 1 <= parts <= len(sizes):
        raise DataError(
            explain(
                "samples can't be spread",
                where="packing",
                got=f"{len(sizes)} samples for {parts} parts",
                expected="a sample for each part",
                do="use fewer data-parallel ranks or more samples per mini-batch",
            )
        )


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


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _spread_then_cut(sizes: list[int], replicas: int, max_tokens: int, multiple: int) -> list[list[list[int]]] | None:
    """None where a replica has fewer samples than another needs micro-batches."""
    parts = balance(sizes, replicas)
    cuts = [micro_batches([sizes[row] for row in part], max_tokens) for part in parts]
    count, fewest = max(len(cut) for cut in cuts), min(len(part) for part in parts)
    if count > fewest:
        return None
    count = _up(count, multiple) if _up(count, multiple) <= fewest else count
    raised = [_raise_count(cut, [sizes[row] for row in part], max_tokens, count) for cut, part in zip(cuts, parts, strict=True)]
    return [[sorted(part[i] for i in rows) for rows in cut] for cut, part in zip(raised, parts, strict=True)]


def _cut_then_deal(sizes: list[int], replicas: int, max_tokens: int, multiple: int) -> list[list[list[int]]]:
    cut = _fewest_that_fit(sizes, max_tokens)
    for wanted in (_up(len(cut), replicas * multiple), _up(len(cut), replicas)):
        if wanted <= len(sizes):
            cut = _raise_count(cut, sizes, max_tokens, wanted)
            break
    totals = [sum(sizes[row] for row in rows) for rows in cut]
    return [[sorted(cut[i]) for i in dealt] for dealt in balance(totals, replicas, equal_counts=True)]


def _by_length(sizes: list[int]) -> list[int]:
    """Rows, longest first; equal lengths in the order of their rows."""
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)  # reverse keeps the order of equals


def _longest_first(sizes: list[int], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """LPT. No part stays empty, since an empty one has the fewest tokens."""
    share, extra = divmod(len(sizes), parts)  # with equal counts: ``extra`` parts hold one sample more than the share
    chosen: list[list[int]] = [[] for _ in range(parts)]
    totals = [(0, part) for part in range(parts)]
    for row in _by_length(sizes):
        while equal_counts and extra == 0 and len(chosen[totals[0][1]]) == share:
            heapq.heappop(totals)  # that part is full
        total, part = totals[0]
        chosen[part].append(row)
        if equal_counts and len(chosen[part]) > share:
            extra -= 1
            heapq.heappop(totals)
        else:
            heapq.heapreplace(totals, (total + sizes[row], part))
    return chosen


def _fewest_that_fit(sizes: list[int], max_tokens: int) -> list[list[int]]:
    """Try the least count that the total allows, then best-fit decreasing's count, both evened out; else best-fit itself."""
    least = -(-sum(sizes) // max_tokens)
    packed = _best_fit_decreasing(sizes, max_tokens)
    for count in sorted({least, len(packed)}):
        evened = _longest_first(sizes, count)
        if _fits(evened, sizes, max_tokens):
            return evened
    return packed


def _best_fit_decreasing(sizes: list[int], max_tokens: int) -> list[list[int]]:
    """Asymptotically at most 11/9 of the fewest possible bins, as first fit (Johnson et al. 1974), but the bin is found by bisection."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for row in _by_length(sizes):
        place = bisect_left(rooms, (sizes[row], -1))
        if place == len(rooms):
            room, chosen = max_tokens, len(bins)
            bins.append([])
        else:
            room, chosen = rooms.pop(place)
        bins[chosen].append(row)
        insort(rooms, (room - sizes[row], chosen))
    return bins


def _fits(bins: list[list[int]], sizes: list[int], max_tokens: int) -> bool:
    return all(sum(sizes[row] for row in rows) <= max_tokens for rows in bins)


def _raise_count(bins: list[list[int]], sizes: list[int], max_tokens: int, count: int) -> list[list[int]]:
    """``bins``, which keep the budget, or ``count`` bins where those are more. At least ``count`` samples."""
    if len(bins) >= count:
        return bins
    evened = _longest_first(sizes, count)
    return evened if _fits(evened, sizes, max_tokens) else _halve_fullest(bins, sizes, count)


def _halve_fullest(bins: list[list[int]], sizes: list[int], count: int) -> list[list[int]]:
    """Halve the fullest bin that has two samples or more until there are ``count`` bins; no bin grows."""
    bins = list(bins)
    fullest = [(-sum(sizes[row] for row in rows), i) for i, rows in enumerate(bins) if len(rows) > 1]
    heapq.heapify(fullest)
    while len(bins) < count:
        _, chosen = heapq.heappop(fullest)
        rows = bins[chosen]
        first, second = ([rows[i] for i in half] for half in _longest_first([sizes[row] for row in rows], 2))
        bins[chosen] = first
        bins.append(second)
        for place, half in ((chosen, first), (len(bins) - 1, second)):
            if len(half) > 1:
                heapq.heappush(fullest, (-sum(sizes[row] for row in half), place))
    return bins
