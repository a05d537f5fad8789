"""Run a function as the one rank of a Megatron group on the GPU, in a process of its own."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

DEADLINE_S = 240


def on_one_rank(work: Callable[..., Any], *args: Any) -> Any:
    """``work(rank, *args)``; a failure there fails the test. Spawned, since CUDA can't be forked."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(sender, work, args))
    process.start()
    sender.close()
    try:
        if not receiver.poll(DEADLINE_S):
            raise AssertionError(f"no result within {DEADLINE_S} s")
        ok, value = receiver.recv()
    except EOFError:
        raise AssertionError("the process died") from None
    finally:
        process.join(timeout=20)
        if process.is_alive():
            process.kill()
    assert ok, value
    return value


def _main(sender: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        import torch.distributed as dist

        from megarl.megatron import world
        from megarl.types import Layout

        rank = world.join(0, Layout(), dist.HashStore(), timeout_s=120, seed=0)
        sender.send((True, work(rank, *args)))
        world.leave()
    except BaseException:  # noqa: BLE001 - the parent raises it again
        sender.send((False, traceback.format_exc()))
