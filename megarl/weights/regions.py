"""Boxes of tensors and the copies between them: the arithmetic that every other file of this room is built on.

A copy map is a list of :class:`Copy`: each says that one box of a source tensor equals one box, of the same shape, of a
target tensor. Two maps out of one space (Hugging Face tensors) are joined into a map from one target to the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

Box = tuple[tuple[int, int], ...]  # (start, stop) per dimension; () is the box of a scalar


class Region(NamedTuple):
    """A box of the tensor ``name``."""

    name: str
    box: Box

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(f'{start}:{stop}' for start, stop in self.box)}]"


class Copy(NamedTuple):
    """``target`` holds what ``source`` holds; both boxes have one shape."""

    source: Region
    target: Region

    def inverted(self) -> "Copy":
        """The same fact, read the other way."""
        return Copy(self.target, self.source)


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements of a tensor of ``shape``."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Elements along each dimension."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Elements in the box."""
    return prod(stop - start for start, stop in box)


def as_slices(box: Box) -> tuple[slice, ...]:
    """The index that selects the box from a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The common elements, or None when there are none (boxes of one number of dimensions)."""
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def carry(box: Box, origin: Box, destination: Box) -> Box:
    """``box``, a part of ``origin``, moved to where it lies in ``destination``."""
    return tuple((s - o[0] + d[0], e - o[0] + d[0]) for (s, e), o, d in zip(box, origin, destination, strict=True))


def cut_target(copies: Iterable[Copy], name: str, box: Box) -> list[Copy]:
    """The parts of ``copies`` that land in ``box``, as copies into a tensor ``name`` that is that box alone."""
    here = whole(box_shape(box))
    parts = []
    for source, target in copies:
        common = intersect(target.box, box)
        if common is not None:
            parts.append(Copy(Region(source.name, carry(common, target.box, source.box)), Region(name, carry(common, box, here))))
    return parts


def join(to_a: Copy, to_b: Copy) -> Copy | None:
    """The copy from a's target to b's target that follows from two copies out of one tensor, or None where they don't meet."""
    common = intersect(to_a.source.box, to_b.source.box)
    if common is None:
        return None
    return Copy(
        Region(to_a.target.name, carry(common, to_a.source.box, to_a.target.box)),
        Region(to_b.target.name, carry(common, to_b.source.box, to_b.target.box)),
    )


def merge(copies: Iterable[Copy]) -> list[Copy]:
    """Join neighbours (next to each other in the source and in the target) into boxes that can't grow, in a stable order."""
    merged = list(copies)
    before = 0
    while len(merged) != before:
        before = len(merged)
        for axis in range(max((len(c.source.box) for c in merged), default=0)):
            merged = _merge_along(merged, axis)
    return merged


def _merge_along(copies: list[Copy], axis: int) -> list[Copy]:
    """Join neighbours along one dimension."""
    rows: dict[tuple, list[Copy]] = defaultdict(list)
    for copy in copies:
        source, target = copy
        if axis >= len(source.box):
            rows[(source.name, target.name, copy)].append(copy)
            continue
        shift = target.box[axis][0] - source.box[axis][0]
        others = (source.box[:axis] + source.box[axis + 1 :], target.box[:axis] + target.box[axis + 1 :])
        rows[(source.name, target.name, shift, others)].append(copy)
    out: list[Copy] = []
    for row in rows.values():
        row.sort(key=lambda c: c.source.box[axis : axis + 1])
        out.append(row[0])
        for copy in row[1:]:
            last = out[-1]
            if last.source.box[axis][1] == copy.source.box[axis][0]:
                out[-1] = Copy(_grown(last.source, copy.source, axis), _grown(last.target, copy.target, axis))
            else:
                out.append(copy)
    return out


def _grown(first: Region, second: Region, axis: int) -> Region:
    span = ((first.box[axis][0], second.box[axis][1]),)
    return Region(first.name, first.box[:axis] + span + first.box[axis + 1 :])


def overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes that share elements, or None. A sweep along the first dimension, so that disjoint shards cost n log n."""
    order = sorted(range(len(boxes)), key=lambda i: boxes[i])
    active: list[int] = []
    for i in order:
        if not boxes[i]:  # scalars: all the same element
            if active:
                return active[0], i
            active.append(i)
            continue
        active = [j for j in active if boxes[j][0][1] > boxes[i][0][0]]
        for j in active:
            if intersect(boxes[i], boxes[j]) is not None:
                return j, i
        active.append(i)
    return None
