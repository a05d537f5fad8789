"""Packed sequences: the only form in which tokens enter a model, on every device.

The sequences of a micro-batch are laid end to end, never padded to each other. ``PackedTokens`` holds what the embedding, the
attention and the output head need to tell them apart.

Under context parallelism each sequence is filled up to a multiple of 2 x ranks and cut into that many pieces; rank r has the pieces r and
2 x ranks - 1 - r, so that all ranks have as much causal attention to compute (the order that Megatron and Transformer Engine expect).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.types import Ragged


@dataclass(frozen=True)
class ContextRank:
    """One of the ranks that share the tokens of a micro-batch."""

    index: int = 0
    size: int = 1


@dataclass(frozen=True)
class Rectangle:
    """Sequences of similar length, for kernels that need a rectangle: b of them, s queries and t keys each."""

    queries: torch.Tensor  # [b, s] int64, rows of this rank's tokens
    real: torch.Tensor  # [b, s] bool; the others fill the rectangle up
    keys: torch.Tensor  # [b, t] int64, rows of the keys, which all context-parallel ranks laid end to end
    mask: torch.Tensor | None  # [b or 1, 1, s, t] bool, True where a query sees a key; None: the same causal triangle for all


@dataclass
class PackedSequences(PackedSeqParams):
    """megatron-core's record of a packed batch, plus the lengths as Python integers (no device read in each layer)."""

    lengths: tuple[int, ...] = ()  # over all context-parallel ranks, filled up
    context: ContextRank = ContextRank()
    computed: dict[Any, Any] = field(default_factory=dict)  # what a layer computes once a micro-batch, for those after it

    @cached_property
    def positions(self) -> torch.Tensor:
        """[T] int64: place of each token of this rank in its sequence, from 0."""
        return self._tensor(np.concatenate([held_positions(length, self.context) for length in self.lengths]))

    def rectangles(self, window: int | None = None) -> list[Rectangle]:
        """All sequences, by lengths of one multiple of 16: at most 15 positions of each are filled up, behind what a query sees.

        ``window``: a query sees that many of the newest tokens, its own among them; None: all before it.
        """
        if window is not None and window >= max(self.lengths):
            window = None
        key = ("rectangles", window)
        if key not in self.computed:
            self.computed[key] = self._rectangles(window)
        return self.computed[key]

    def _rectangles(self, window: int | None) -> list[Rectangle]:
        buckets: dict[int, list[int]] = {}
        for i, length in enumerate(self.lengths):
            if length:
                buckets.setdefault(-(-length // 16), []).append(i)
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        make = self._causal if self.context.size == 1 else self._masked
        return [make(np.array([self.lengths[i] for i in rows]), offsets[rows], window) for rows in buckets.values()]

    def _causal(self, lengths: np.ndarray, starts: np.ndarray, window: int | None) -> Rectangle:
        index, real = _rows(lengths, starts)
        queries = self._tensor(index)
        longest = int(lengths.max())
        if window is None or window >= longest:  # the triangle alone, for which kernels are faster than for a mask
            return Rectangle(queries, self._tensor(real), queries, None)
        band = _sees(np.arange(longest), longest, window)[None, None]
        return Rectangle(queries, self._tensor(real), queries, self._tensor(band))

    def _masked(self, lengths: np.ndarray, starts: np.ndarray, window: int | None) -> Rectangle:
        """This rank's queries of each sequence are two runs of it, and see other keys than their neighbours in the rectangle do."""
        size = self.context.size
        queries, real = _rows(lengths // size, starts // size)
        keys, key_real = _rows(lengths, starts)
        own = [held_positions(int(length), self.context) for length in lengths]
        place = np.zeros(queries.shape, dtype=np.int64)  # of each query in its sequence
        for row, positions in zip(place, own, strict=True):
            row[: len(positions)] = positions
        mask = _sees(place, keys.shape[1], window) & key_real[:, None, :]
        return Rectangle(self._tensor(queries), self._tensor(real), self._tensor(self._gathered[keys]), self._tensor(mask[:, None]))

    @cached_property
    def _gathered(self) -> np.ndarray:
        """Position in the whole packed batch -> row among all ranks' tokens, laid end to end."""
        ranks = [held_tokens(self.lengths, ContextRank(r, self.context.size)) for r in range(self.context.size)]
        return np.argsort(np.concatenate(ranks))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.cu_seqlens_q.device)


@dataclass(frozen=True)
class PackedTokens:
    """One micro-batch on its way through a model. T tokens on this rank, B sequences, R response tokens on all ranks together."""

    tokens: torch.Tensor  # [1, T] int64, tokens that fill up included
    sequences: PackedSequences
    positions: torch.Tensor  # [1, T] int64, from 0 in each sequence
    predictors: torch.Tensor  # [R'] int64: row whose output speaks of a response token (the one before it), where it is on this rank
    picks: torch.Tensor  # [R'] int64: of which of the R response tokens
    targets: torch.Tensor  # [R'] int64: those response tokens; [0] where ``pack`` was given predictors
    finals: torch.Tensor  # [B'] int64: row of the last token of a sequence, where it is on this rank
    final_picks: torch.Tensor  # [B'] int64: of which of the B sequences
    samples: int  # B
    responses: int  # R


def held_positions(length: int, context: ContextRank) -> np.ndarray:
    """Which positions of a sequence of ``length`` (a multiple of 2 x ranks) this rank has, in the order in which it has them."""
    pieces = np.arange(length).reshape(2 * context.size, -1) if context.size > 1 else np.arange(length)[None]
    return np.concatenate([pieces[context.index], pieces[2 * context.size - 1 - context.index]]) if context.size > 1 else pieces[0]


def held_tokens(lengths: tuple[int, ...], context: ContextRank) -> np.ndarray:
    """Which positions of the whole packed batch this rank has."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return np.concatenate([start + held_positions(length, context) for start, length in zip(starts, lengths, strict=False)])


def pack(
    prompts: Ragged,
    responses: Ragged,
    *,
    align: int,
    device: torch.device,
    context: ContextRank = ContextRank(),
    predictors: Ragged | None = None,
) -> PackedTokens:
    """Lay ``prompts[i] + responses[i]`` end to end, and mark the response tokens.

    Every prompt has at least one token, since the first response token is predicted from the last prompt token. ``align``: this rank's
    tokens are filled up to a multiple of it (sequence parallelism cuts them evenly) by a last sequence that nothing reads.

    ``predictors``: for response tokens of another vocabulary than the tokens packed, the place in sequence i whose output speaks of each
    of them; several may share one. Raises ValueError for a place outside its sequence.
    """
    prompt_lengths, response_lengths = prompts.lengths, responses.lengths
    if (prompt_lengths < 1).any():
        raise ValueError(f"row {int(np.argmin(prompt_lengths))}: a prompt without tokens can't predict a response")
    real = prompt_lengths + response_lengths
    lengths = _filled_up(real, align, context)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens, positions = np.zeros(starts[-1], dtype=np.int64), np.zeros(starts[-1], dtype=np.int64)
    for start, length in zip(starts, lengths, strict=False):
        positions[start : start + length] = np.arange(length)
    for i in range(len(prompts)):
        middle, end = starts[i] + prompt_lengths[i], starts[i] + real[i]
        tokens[starts[i] : middle] = prompts[i]
        tokens[middle:end] = responses[i]
    places = _before_each(prompt_lengths, responses) if predictors is None else predictors
    _check_places(places, real)
    finals = starts[: len(real)] + real - 1
    held = held_tokens(lengths, context)
    predictor_rows, picks = _here(places.values + np.repeat(starts[: len(real)], places.lengths), held)
    final_rows, final_picks = _here(finals, held)
    put = _Put(device)
    return PackedTokens(
        tokens=put(tokens[held])[None],
        positions=put(positions[held])[None],
        sequences=_sequences(lengths, context, device),
        predictors=put(predictor_rows),
        picks=put(picks),
        targets=put(responses.values.astype(np.int64)[picks] if predictors is None else np.empty(0, dtype=np.int64)),
        finals=put(final_rows),
        final_picks=put(final_picks),
        samples=len(real),
        responses=len(places.values),
    )


@dataclass(frozen=True)
class _Put:
    device: torch.device

    def __call__(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _before_each(prompt_lengths: np.ndarray, responses: Ragged) -> Ragged:
    """The place of the token before each response token, from 0 in each sequence."""
    within = np.arange(len(responses.values)) - np.repeat(responses.offsets[:-1], responses.lengths)
    return Ragged(within + np.repeat(prompt_lengths - 1, responses.lengths), responses.offsets)


def _check_places(places: Ragged, real: np.ndarray) -> None:
    outside = (places.values < 0) | (places.values >= np.repeat(real, places.lengths))
    if outside.any():
        got = int(places.values[np.argmax(outside)])
        row = int(np.searchsorted(places.offsets, np.argmax(outside), side="right")) - 1
        raise ValueError(f"row {row}: place {got} of a predictor is not one of its {int(real[row])} tokens")


def _filled_up(real: np.ndarray, align: int, context: ContextRank) -> tuple[int, ...]:
    """Lengths as they are packed, a last sequence that fills up among them where it is needed."""
    piece = 2 * context.size if context.size > 1 else 1
    lengths = -(-real // piece) * piece
    tail = -int(lengths.sum()) % lcm(piece, align * context.size)
    return tuple(int(n) for n in lengths) + ((tail,) if tail else ())


def _here(wanted: np.ndarray, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of positions of the whole packed batch those on this rank: their rows here, and which of ``wanted`` they are."""
    order = np.argsort(held)
    found = np.searchsorted(held, wanted, sorter=order)
    rows = order[np.minimum(found, len(held) - 1)]
    picks = np.flatnonzero(held[rows] == wanted)
    return rows[picks], picks


def _rows(lengths: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([b, longest] indices, which of them are real): sequence i is the rows from ``starts[i]``; its first row fills it up."""
    steps = np.arange(lengths.max())
    real = steps[None, :] < lengths[:, None]
    return starts[:, None] + np.where(real, steps[None, :], 0), real


def _sees(places: np.ndarray, keys: int, window: int | None) -> np.ndarray:
    """[..., s] places of queries -> [..., s, keys] bool: which of the keys at 0, 1, ... each of them sees."""
    behind = places[..., None] - np.arange(keys)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def _sequences(lengths: tuple[int, ...], context: ContextRank, device: torch.device) -> PackedSequences:
    offsets = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=device)
    longest = max(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
        context=context,
    )
