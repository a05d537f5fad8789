"""Boxes and copies against tensors of distinct numbers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weights.regions import Copy, Region, as_slices, box_shape, cut_target, intersect, join, merge, overlap, volume, whole
from tests import examples

SHAPE = (5, 4, 3)


def boxes(shape: tuple[int, ...] = SHAPE) -> st.SearchStrategy:
    def span(size: int) -> st.SearchStrategy:
        return st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(lambda p: (p[0], max(p[1], p[0] + 1)))

    return st.tuples(*[span(size) for size in shape])


def mask(box: tuple) -> torch.Tensor:
    marked = torch.zeros(SHAPE, dtype=torch.bool)
    marked[as_slices(box)] = True
    return marked


@given(boxes(), boxes())
def test_intersection_is_the_common_elements(a: tuple, b: tuple) -> None:
    common = intersect(a, b)
    both = mask(a) & mask(b)
    assert both.any().item() == (common is not None)
    if common is not None:
        assert torch.equal(mask(common), both)
        assert volume(common) == both.sum()


@given(boxes(), boxes())
@settings(max_examples=examples(60))
def test_cutting_then_joining_moves_the_right_elements(a: tuple, b: tuple) -> None:
    space = torch.arange(60).view(SHAPE)
    full = [Copy(Region("s", whole(SHAPE)), Region("", whole(SHAPE)))]
    (to_a,), (to_b,) = cut_target(full, "a", a), cut_target(full, "b", b)
    held_a, expected_b = space[as_slices(a)], space[as_slices(b)]
    joined = join(to_a, to_b)
    assert (joined is None) == (intersect(a, b) is None)
    if joined is not None:
        assert torch.equal(held_a[as_slices(joined.source.box)], expected_b[as_slices(joined.target.box)])
        assert box_shape(joined.source.box) == box_shape(joined.target.box)


@given(st.lists(st.integers(1, 4), max_size=2), st.lists(st.integers(1, 3), max_size=2), st.randoms())
def test_merging_a_cut_tensor_gives_it_back_whole(row_cuts: list[int], column_cuts: list[int], rng: object) -> None:
    def spans(cuts: list[int], size: int) -> list[tuple[int, int]]:
        edges = sorted({0, size, *cuts})
        return list(zip(edges, edges[1:], strict=False))

    shift = 7  # the target lies 7 rows further down
    parts = [(r, c) for r in spans(row_cuts, 5) for c in spans(column_cuts, 4)]
    copies = [Copy(Region("a", (r, c)), Region("b", ((r[0] + shift, r[1] + shift), c))) for r, c in parts]
    rng.shuffle(copies)
    assert merge(copies) == [Copy(Region("a", ((0, 5), (0, 4))), Region("b", ((7, 12), (0, 4))))]


def test_merge_keeps_apart_what_lies_elsewhere_in_the_target() -> None:
    swapped = [Copy(Region("a", ((0, 2),)), Region("b", ((2, 4),))), Copy(Region("a", ((2, 4),)), Region("b", ((0, 2),)))]
    assert sorted(merge(swapped)) == sorted(swapped)


@given(st.lists(boxes(), max_size=5))
def test_overlap_is_found_when_and_only_when_an_element_is_in_two_boxes(parts: list[tuple]) -> None:
    count = sum((mask(box).int() for box in parts), torch.zeros(SHAPE, dtype=torch.int32))
    assert (overlap(parts) is not None) == bool((count > 1).any())
