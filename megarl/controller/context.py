"""What one run holds: its configuration, its worker groups, and the little state that a resume must restore."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ray.util.placement_group import PlacementGroup, remove_placement_group

from megarl.algo.kl import KLController
from megarl.cluster.reward_worker import RewardGroup
from megarl.cluster.rollout_group import RolloutGroup
from megarl.cluster.train_group import TrainGroup
from megarl.config.schema import Config
from megarl.data.cursor import PromptCursor
from megarl.types import GenerationRequest, SamplingSettings


@dataclass(frozen=True)
class RunPaths:
    """Where things of a run are."""

    root: Path

    @property
    def train_prompts(self) -> Path:
        return self.root / "data" / "train.arrow"

    @property
    def val_prompts(self) -> Path:
        return self.root / "data" / "val.arrow"

    @property
    def supervised(self) -> Path:
        return self.root / "data" / "warm_start.arrow"

    @property
    def warm_start_model(self) -> Path:
        return self.root / "warm_start" / "model"

    @property
    def final_model(self) -> Path:
        return self.root / "model"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def rollouts(self, step: int) -> Path:
        return self.root / "rollouts" / f"step_{step}.parquet"


@dataclass(frozen=True)
class Groups:
    """The worker groups. The reference is a second role of the actor's group; without a critic its place is empty.

    Colocated, the critic is a third role of that group, and ``critic`` is the same object as ``actor``.
    """

    actor: TrainGroup
    critic: TrainGroup | None
    rollout: RolloutGroup
    rewards: RewardGroup | None  # None: the caller scores the samples
    reference: TrainGroup | None = None  # where the reference has processes of its own
    placements: tuple[PlacementGroup, ...] = ()  # the slots of all of them

    def all(self) -> list[Any]:
        return [*self.trainers(), self.rollout, *([self.rewards] if self.rewards else [])]

    def trainers(self) -> list[TrainGroup]:
        """The groups of Megatron ranks, each once."""
        found = [self.actor] if self.critic in (None, self.actor) else [self.actor, self.critic]
        return [*found, self.reference] if self.reference else found

    def stop(self) -> None:
        """End all processes and give their slots back."""
        for group in self.all():
            group.stop()
        for placement in self.placements:
            remove_placement_group(placement)

    @property
    def scribe(self) -> TrainGroup:
        """The group on whose ranks columns are computed from columns."""
        return self.critic or self.actor


@dataclass
class Context:
    """A run between two steps. ``step`` is the last one done."""

    config: Config
    paths: RunPaths
    groups: Groups
    cursor: PromptCursor
    kl: KLController
    sampling: SamplingSettings
    step: int = 0
    version: int = 0  # of the actor's weights; a new one with each change

    @property
    def samples_per_step(self) -> int:
        return self.config.rollout.prompts_per_step * self.config.rollout.responses_per_prompt

    def state_dict(self) -> dict[str, Any]:
        """All that the controller must know to go on; plain JSON."""
        return {"step": self.step, "version": self.version, "cursor": self.cursor.state_dict(), "kl": self.kl.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.version = state["step"], state["version"]
        self.cursor.load_state_dict(state["cursor"])
        self.kl.load_state_dict(state["kl"])


def sample_requests(rows: np.ndarray, responses_per_prompt: int, *, seed: int, step: int) -> tuple[list[GenerationRequest], np.ndarray]:
    """One request a response, and the group (prompt) of each.

    A sample's seed depends on (run seed, step, sample) alone, so that its tokens don't depend on batching, engines or restarts.
    """
    count = len(rows) * responses_per_prompt
    sample = np.arange(count, dtype=np.uint64)
    seeds = _mix(_mix(_mix(np.uint64(seed)) ^ np.uint64(step & 0xFFFFFFFF)) ^ sample) >> np.uint64(1)
    groups = np.repeat(np.arange(len(rows)), responses_per_prompt)
    requests = [GenerationRequest(i, int(rows[groups[i]]), int(seeds[i])) for i in range(count)]
    return requests, groups


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014): near inputs give unrelated outputs."""
    x = np.atleast_1d(np.asarray(x, dtype=np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
