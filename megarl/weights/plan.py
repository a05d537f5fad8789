"""Which slice of which training rank's parameter goes where in each generation rank.

Both sides are copy maps out of Hugging Face tensors; joined over those coordinates they give the copies from one to the other, and
nothing is ever gathered. Each generation rank receives every element that it needs exactly once: the volume bound of HybridFlow
(arXiv:2409.19256, section 5.3), counted in bytes by :attr:`ReshardPlan.bytes_sent` and its kin.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megarl.errors import SyncError, explain
from megarl.weights.regions import Box, Copy, Region, join, merge, overlap, volume
from megarl.weights.table import ParameterShard


@dataclass(frozen=True)
class RankShard:
    """What one training rank holds."""

    rank: int
    device: int | str  # equal values: source and destination share memory or a device
    shards: Mapping[str, ParameterShard]


@dataclass(frozen=True)
class GenerationRank:
    """What one rank of a generation engine needs: copies from Hugging Face tensors to its own parameters."""

    rank: int
    device: int | str
    copies: Sequence[Copy]


@dataclass(frozen=True)
class Slice:
    """One box of a training rank's parameter, and where it goes in one generation rank."""

    source_rank: int
    source: Region
    target: Region


@dataclass(frozen=True)
class ReshardPlan:
    """The slices of each generation rank; bytes by rank, those between two devices (sent, received) and those inside one (local)."""

    bytes_per_element: int
    slices: dict[int, tuple[Slice, ...]]  # generation rank -> slices, by training rank
    bytes_sent: dict[int, int] = field(default_factory=dict)  # training rank ->
    bytes_received: dict[int, int] = field(default_factory=dict)  # generation rank ->
    bytes_local: dict[int, int] = field(default_factory=dict)  # generation rank ->

    def to_json(self) -> str:
        """Plain JSON; :meth:`from_json` reads it."""
        rows = {rank: [[s.source_rank, s.source, s.target] for s in slices] for rank, slices in self.slices.items()}
        counts = {"bytes_sent": self.bytes_sent, "bytes_received": self.bytes_received, "bytes_local": self.bytes_local}
        return json.dumps({"bytes_per_element": self.bytes_per_element, "slices": rows, **counts})

    @classmethod
    def from_json(cls, text: str) -> "ReshardPlan":
        """The plan that :meth:`to_json` wrote."""
        plain = json.loads(text)
        slices = {int(rank): tuple(Slice(r, _region(s), _region(t)) for r, s, t in rows) for rank, rows in plain["slices"].items()}
        counts = [{int(rank): n for rank, n in plain[key].items()} for key in ("bytes_sent", "bytes_received", "bytes_local")]
        return cls(plain["bytes_per_element"], slices, *counts)


@dataclass(frozen=True)
class _Piece:
    """One part of a Hugging Face tensor and the training ranks that hold it (replicas of each other)."""

    holders: tuple[tuple[int, int | str, Copy], ...]  # (rank, device, Hugging Face -> parameter)


def plan_reshard(training: Sequence[RankShard], generation: Sequence[GenerationRank], *, bytes_per_element: int) -> ReshardPlan:
    """Plan the way from the training ranks' parameters to the generation ranks'.

    Of several ranks that hold an element, one on the destination's device is taken, else the one that sends least so far. All
    parameters have ``bytes_per_element``. Raises SyncError when a needed element is held by nobody, or when the training ranks cut a
    tensor in two ways.
    """
    pieces = _pieces(training)
    sent = {shard.rank: 0 for shard in training}
    received, local, slices = {}, {}, {}
    for destination in generation:
        wanted = [(copy, piece) for copy in destination.copies for piece in pieces.get(copy.source.name, ())]
        found = [(joined, piece, copy) for copy, piece in wanted if (joined := join(piece.holders[0][2], copy)) is not None]
        _check_complete(destination, found)
        received[destination.rank] = local[destination.rank] = 0
        chosen: dict[int, list[Copy]] = defaultdict(list)
        # Large ones first, so that small ones can even out what each rank sends.
        for joined, piece, copy in sorted(found, key=lambda item: -volume(item[0].source.box)):
            size = volume(joined.source.box) * bytes_per_element
            rank, near, part = _choose(piece, destination.device, sent, copy)
            chosen[rank].append(part)
            if near:
                local[destination.rank] += size
            else:
                sent[rank] += size
                received[destination.rank] += size
        slices[destination.rank] = tuple(Slice(rank, *copy) for rank in sorted(chosen) for copy in merge(chosen[rank]))
    return ReshardPlan(bytes_per_element, slices, sent, received, local)


def _pieces(training: Iterable[RankShard]) -> dict[str, list[_Piece]]:
    """Hugging Face tensor -> its disjoint parts, each with all its holders."""
    holders: dict[tuple[str, Box], list[tuple[int, int | str, Copy]]] = defaultdict(list)
    for shard in training:
        for parameter in shard.shards.values():
            for copy in parameter.copies:
                holders[copy.source].append((shard.rank, shard.device, copy))
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    boxes: dict[str, list[Box]] = defaultdict(list)
    for (name, box), found in holders.items():
        pieces[name].append(_Piece(tuple(found)))
        boxes[name].append(box)
    for name, parts in boxes.items():
        if (pair := overlap(parts)) is not None:
            raise SyncError(
                explain(
                    "the training ranks cut a tensor in two ways",
                    where=name,
                    got=f"{parts[pair[0]]} and {parts[pair[1]]}",
                    expected="ranks of one layout",
                )
            )
    return pieces


def _choose(piece: _Piece, device: int | str, sent: Mapping[int, int], copy: Copy) -> tuple[int, bool, Copy]:
    """The holder that sends, whether it is on ``device``, and its copy."""
    rank, where, held = min(piece.holders, key=lambda holder: (holder[1] != device, sent[holder[0]], holder[0]))
    joined = join(held, copy)
    assert joined is not None, "holders of one piece hold the same box"
    return rank, where == device, joined


def _check_complete(destination: GenerationRank, found: Sequence[tuple[Copy, _Piece, Copy]]) -> None:
    """Every element of every copy has a source: pieces are disjoint, so that counting is enough."""
    covered: dict[Copy, int] = defaultdict(int)
    for joined, _, copy in found:
        covered[copy] += volume(joined.source.box)
    for copy in destination.copies:
        if covered[copy] != volume(copy.source.box):
            raise SyncError(
                explain(
                    "no training rank holds what a generation rank needs",
                    where=f"generation rank {destination.rank}, {copy.target}",
                    got=f"{covered[copy]} elements",
                    expected=f"{volume(copy.source.box)} elements of {copy.source}",
                    do="check that both sides were built from the same model",
                )
            )


def _region(plain: Sequence) -> Region:
    name, box = plain
    return Region(name, tuple((start, stop) for start, stop in box))
