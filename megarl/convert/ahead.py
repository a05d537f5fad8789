"""Reading the next piece while one is written: each keeps a processor and a disk busy, and neither holds Python's lock meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(items: Iterable[Item], read: Callable[[Item], Result]) -> Iterator[tuple[Item, Result]]:
    """Each item with ``read(item)``, in order; at most two results are in use. Raises what ``read`` raises, at that item's turn."""
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as pool:
        waiting: tuple[Item, Future[Result]] | None = None
        for item in items:
            following = (item, pool.submit(read, item))
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = following
        if waiting is not None:
            yield waiting[0], waiting[1].result()
