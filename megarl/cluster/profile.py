"""Windows of recording over worker groups: who takes part, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.cluster.calls import start_call
from megarl.config.schema import ProfileConfig
from megarl.errors import WorkerError
from megarl.profiling import Recorded, Window
from megarl.types import Rank

if TYPE_CHECKING:
    from megarl.cluster.rollout_group import RolloutGroup
    from megarl.cluster.train_group import TrainGroup


def profiled_ranks(group: TrainGroup | RolloutGroup, ranks: Sequence[int]) -> list[int]:
    """Those of ``ranks`` that the group has; when none are named, the first that returns results."""
    if ranks:
        return [rank for rank in ranks if rank < len(group.workers)]
    layout = getattr(group, "layout", None)  # engines have none: each returns its own results
    return [next((rank for rank in range(len(group.workers)) if layout and Rank(rank, layout).reports), 0)]


def start_profile(groups: Sequence[TrainGroup | RolloutGroup], config: ProfileConfig, directory: str) -> list[str]:
    """Begin a window in every chosen process; returns what failed. No failure of a recorder is an error: see :mod:`megarl.profiling`."""
    failures = []
    for group in groups:
        ranks = profiled_ranks(group, config.ranks)
        windows = [Window(directory, group.names[r].replace(" ", "_"), config.with_stack, config.memory) for r in ranks]
        refs = [group.workers[r].start_profile.remote(window) for r, window in zip(ranks, windows, strict=True)]
        try:
            start_call("start of a profile", [group.names[r] for r in ranks], refs, group.settings.call_deadline_s).wait()
        except WorkerError as error:  # a dead worker is named again by the next call that needs it
            failures.append(str(error))
    return failures


def stop_profile(groups: Sequence[TrainGroup | RolloutGroup], config: ProfileConfig) -> Recorded:
    """End the window; all processes write at once."""
    calls = []
    for group in groups:
        ranks = profiled_ranks(group, config.ranks)
        refs = [group.workers[r].stop_profile.remote() for r in ranks]
        calls.append(start_call("end of a profile", [group.names[r] for r in ranks], refs, group.settings.call_deadline_s))
    total = Recorded()
    for call in calls:
        try:
            found: list[Recorded] = call.wait()
        except WorkerError as error:
            total.failures.append(str(error))
            continue
        for one in found:
            total.files += one.files
            total.failures += one.failures
    return total
