"""The generation engines, as the controller sees them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import PlacementGroup

from megarl.cluster.calls import Pending, RayHandle, names_of, start_call
from megarl.cluster.placement import Slots, reserve, spawn
from megarl.cluster.rollout_worker import RolloutWorker
from megarl.cluster.train_group import TrainGroup
from megarl.config.schema import RolloutConfig
from megarl.data.proto import DataProto, Piece
from megarl.types import GenerationRequest, SampleInfo, SamplingSettings
from megarl.weights.dtypes import DTYPES
from megarl.weights.plan import GenerationRank, ReshardPlan, plan_reshard


@dataclass(frozen=True)
class RolloutSettings:
    """How the engines are placed and started."""

    model_dir: str
    config: RolloutConfig
    max_prompt_tokens: int
    cpus_per_process: float
    gpus_per_process: float
    log_dir: str
    start_deadline_s: float
    call_deadline_s: float
    seed: int
    shares_devices: bool = False  # with training groups: between generations the engines sleep


@dataclass(frozen=True)
class SyncResult:
    """One hand-over of weights: bytes that the engines received, and seconds of the whole window."""

    version: int
    bytes: int
    seconds: float
    checked: bool
    stages: dict[str, float]  # stage -> seconds of the slowest engine


class RolloutGroup:
    """vLLM engines that draw responses with the actor's weights."""

    def __init__(self, settings: RolloutSettings, placement: PlacementGroup | None = None):
        """Start the engines, in ``placement`` or in slots of their own."""
        self.settings = settings
        self.names = names_of("rollout", settings.config.engines)
        slots = self.slots(settings)
        placement = placement or reserve(slots, settings.start_deadline_s)
        args = (settings.model_dir, settings.config, settings.max_prompt_tokens, settings.seed, settings.log_dir, settings.shares_devices)
        self.workers = [spawn(RolloutWorker, slots, placement, i, i, *args) for i in range(settings.config.engines)]
        self.version = -1  # of the weights that the engines hold; -1: none yet
        self.syncs = 0
        self._plans: list[Any] | None = None

    @staticmethod
    def slots(settings: RolloutSettings) -> Slots:
        """What the group will ask of the cluster."""
        parallel = settings.config.tensor_parallel
        return Slots("rollout", settings.config.engines, settings.cpus_per_process * parallel, settings.gpus_per_process * parallel)

    def start(self) -> Pending[list[tuple[list[GenerationRank], dict[str, Any]]]]:
        """Wait until the engines are up; the result is, for each, what its ranks hold and the facts of its start."""
        return Pending(start_call("start", self.names, [w.layout.remote() for w in self.workers], self.settings.start_deadline_s), list)

    def connect(self, actor: TrainGroup, hf_config: dict[str, Any], layouts: list[list[GenerationRank]], dtype: str) -> list[ReshardPlan]:
        """Plan the way of the weights from the actor's ranks into each engine, once for the whole run.

        ``layouts[e]``: the ranks of engine e. ``dtype``: of the actor's parameters.
        """
        shards = actor.rank_shards(hf_config, dtype)
        plans = [plan_reshard(shards, ranks, bytes_per_element=DTYPES[dtype].itemsize) for ranks in layouts]
        self._plans = [ray.put(plan) for plan in plans]
        return plans

    def sleep(self) -> float:
        """Let engines that share devices give the memory back; they hold no weights until the next sync. Returns seconds."""
        if not self.settings.shares_devices:
            return 0.0
        self.version = -1
        return max(start_call("sleep", self.names, [w.sleep.remote() for w in self.workers], self.settings.call_deadline_s).wait())

    def sync_weights(self, actor: TrainGroup, name: str, version: int) -> SyncResult | None:
        """Bring the engines to ``version`` of role ``name``; None when they hold it already."""
        if version == self.version:
            return None
        assert self._plans is not None, "connect() comes first"
        began = time.monotonic()
        every = self.settings.config.check_sync_every
        check = self.syncs == 0 or (every > 0 and self.syncs % every == 0)
        manifests = actor.manifests(name)
        refs = [w.sync.remote(plan, manifests, version, check) for w, plan in zip(self.workers, self._plans, strict=True)]
        reports = start_call("sync weights", self.names, refs, self.settings.call_deadline_s).wait()
        self.version, self.syncs = version, self.syncs + 1
        stages = {stage: max(r.stages[stage] for r in reports) for stage in reports[0].stages}
        seconds = time.monotonic() - began
        return SyncResult(version, sum(r.bytes for r in reports), seconds, check, stages)

    def generate_sequences(
        self, requests: Sequence[GenerationRequest], groups: Sequence[int], prompts_path: str, sampling: SamplingSettings
    ) -> Pending[tuple[DataProto, float]]:
        """Draw one response a request; the result holds columns prompts, responses and rollout_log_probs, in request order."""
        parts = [list(range(i, len(requests), len(self.workers))) for i in range(len(self.workers))]
        parts = [p for p in parts if p]
        pairs = [
            w.generate.remote([requests[i] for i in part], prompts_path, sampling) for w, part in zip(self.workers, parts, strict=False)
        ]
        call = start_call("generate", self.names[: len(parts)], [info for _, info in pairs], self.settings.call_deadline_s)

        def finish(infos: list[dict[str, Any]]) -> tuple[DataProto, float]:
            info = _sample_info(requests, groups, parts, infos)
            pieces = [Piece(tuple(part), RayHandle(columns)) for part, (columns, _) in zip(parts, pairs, strict=True)]
            batch = DataProto(info, {})
            for column in ("prompts", "responses", "rollout_log_probs"):
                batch = batch.with_column(column, pieces)
            return batch, max(i["seconds"] for i in infos)

        return Pending(call, finish)

    def facts(self) -> dict[str, dict[str, Any]]:
        """Worker name -> process id and memory."""
        refs = [w.facts.remote() for w in self.workers]
        return dict(zip(self.names, start_call("facts", self.names, refs, self.settings.call_deadline_s).wait(), strict=True))

    def stop(self) -> None:
        """End the processes."""
        for worker in self.workers:
            ray.kill(worker)


def _sample_info(
    requests: Sequence[GenerationRequest], groups: Sequence[int], parts: list[list[int]], infos: list[dict[str, Any]]
) -> SampleInfo:
    order = np.concatenate([np.asarray(p) for p in parts])
    back = np.argsort(order)
    joined = {k: np.concatenate([i[k] for i in infos])[back] for k in ("prompt_length", "response_length", "truncated")}
    return SampleInfo(
        sample_id=np.array([r.sample_id for r in requests], dtype=np.int64),
        row=np.array([r.row for r in requests], dtype=np.int64),
        group=np.asarray(groups, dtype=np.int64),
        **joined,
    )
