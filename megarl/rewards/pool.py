"""The reward pool: a user's function over many samples, with a wall-clock limit per call.

An exception, a hang, a death or a NaN is a status of the sample, never a score; ``policy`` decides what the step does with it.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from megarl.errors import ConfigError, WorkerError, explain
from megarl.rewards.child import Outcome, RewardProcess, check_arguments
from megarl.rewards.loader import ARGUMENTS
from megarl.types import Scores

MESSAGES_KEPT = 8


class RewardPool:
    """``workers`` processes that run the function ``name`` of the file ``path``.

    Args:
        path: Python file of the reward function, ``compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)``.
        name: the function in it; sync or async.
        workers: processes, and so calls at the same time.
        timeout_s: wall clock of one call, seconds; the process is killed after it.

    Raises:
        ConfigError: no such file or function, a file that can't be imported, another signature, or a setting out of range.
    """

    def __init__(self, path: str, name: str, workers: int, timeout_s: float):
        if workers < 1 or not 0 < timeout_s < float("inf"):
            raise ConfigError(
                explain("reward pool out of range", got=f"workers={workers}, timeout_s={timeout_s}", expected="1 or more; above 0")
            )
        self._closed = False
        self._processes = [RewardProcess(path, name, timeout_s)]  # the first alone: a broken file is told once
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        try:
            self._processes += self._threads.map(lambda _: RewardProcess(path, name, timeout_s), range(workers - 1))
        except BaseException:
            self.close()
            raise
        self._free: queue.SimpleQueue[RewardProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._free.put(process)

    def score(self, items: Sequence[dict[str, Any]]) -> Scores:
        """Score ``items``, each a dict with data_source, solution_str, ground_truth and, when it likes, extra_info.

        May be called from several threads. The order of the result is that of ``items``.

        Raises:
            DataError: an item with other keys.
            WorkerError: the pool is closed.
        """
        if self._closed:
            raise WorkerError(explain("the reward pool is closed", where="RewardPool.score"))
        calls = [check_arguments(item, number, ARGUMENTS) for number, item in enumerate(items)]
        return _to_scores(list(self._threads.map(self._call, calls)))

    def close(self) -> None:
        """Wait for calls that run (no longer than their limit), then kill all processes. Calling it again does nothing."""
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.kill()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, arguments: dict[str, Any]) -> Outcome:
        process = self._free.get()
        try:
            return process.call(arguments)
        finally:
            self._free.put(process)


def _to_scores(outcomes: list[Outcome]) -> Scores:
    names = sorted({name for outcome in outcomes for name in outcome.extra})
    failed = [f"item {i}, {o.status}: {o.message}" for i, o in enumerate(outcomes) if o.status != "ok"]
    return Scores(
        score=np.array([outcome.score for outcome in outcomes], dtype=np.float64),
        status=tuple(outcome.status for outcome in outcomes),
        extra={name: np.array([outcome.extra.get(name, np.nan) for outcome in outcomes]) for name in names},
        message=tuple(failed[:MESSAGES_KEPT]),
    )
