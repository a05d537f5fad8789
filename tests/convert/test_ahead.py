"""Reading ahead: order, errors at their turn, and never a third result while two are in use."""

from __future__ import annotations

import threading

import pytest

from megarl.convert.ahead import read_ahead


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_each_in_order(count: int) -> None:
    assert list(read_ahead(range(count), lambda item: item * item)) == [(item, item * item) for item in range(count)]


def test_memory_of_two_is_enough() -> None:
    memories, begun = [[None], [None]], []

    def read(item: int) -> list:
        memory = memories[len(begun) % 2]
        begun.append(item)
        memory[0] = item
        return memory

    for item, memory in read_ahead(range(50), read):
        assert memory == [item] and len(begun) <= item + 2


def test_the_next_is_read_while_one_is_in_use() -> None:
    begun = [threading.Event() for _ in range(3)]
    for item, _ in read_ahead(range(3), lambda item: begun[item].set()):
        assert item == 2 or begun[item + 1].wait(timeout=20)


def test_an_error_comes_at_its_turn() -> None:
    def read(item: int) -> int:
        if item == 2:
            raise OSError("damaged")
        return item

    seen = []
    with pytest.raises(OSError, match="damaged"):
        for item, _ in read_ahead(range(5), read):
            seen.append(item)
    assert seen == [0, 1]


def test_leaving_early_ends_the_thread() -> None:
    def stop() -> None:
        for _ in read_ahead(range(5), lambda item: item):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    for thread in threading.enumerate():
        if thread.name.startswith("read-ahead"):
            thread.join(timeout=20)
            assert not thread.is_alive()
