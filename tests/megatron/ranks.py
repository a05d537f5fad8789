"""Run a function on every rank of a real Megatron group: processes forked after one import, gloo between them."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.megatron import world
from megarl.types import Layout

DEADLINE_S = 90


def run_ranks(layout: Layout, work: Callable[..., Any], *args: Any) -> list[Any]:
    """``work(rank, *args)`` on ``layout.world_size`` processes; returns what each returned. A failing rank fails the test."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch:
        pipes, processes = [], []
        for rank in range(layout.world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_main, args=(rank, layout, scratch, sender, work, args))
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            results = [_receive(rank, pipe) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
    return results


def _receive(rank: int, pipe: Any) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise AssertionError(f"rank {rank} gave no result within {DEADLINE_S} s")
    ok, value = pipe.recv()
    if not ok:
        raise AssertionError(f"rank {rank} failed:\n{value}")
    return value


def _main(index: int, layout: Layout, scratch: str, sender: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        store = dist.FileStore(str(Path(scratch) / "store"), layout.world_size)
        rank = world.join(index, layout, store, timeout_s=60, seed=0)
        sender.send((True, work(rank, *args)))
        world.leave()
    except BaseException:  # noqa: BLE001 - the parent raises it again
        sender.send((False, traceback.format_exc()))
