"""The numbers of one step under verl's names. Scalars only; every mean is over the whole step, whatever it was cut into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from megarl.algo.moments import Moments
from megarl.cluster.rollout_group import SyncResult
from megarl.cluster.train_group import UpdateResult
from megarl.types import SampleInfo, Scores

if TYPE_CHECKING:
    from megarl.controller.context import Context

Infos = list[dict[str, Any]]

SYNC_STAGES = ("wake_weights", "open", "copy", "check", "process", "wake_cache")


@dataclass
class StepMetrics:
    """Collects ``values`` (metric name -> number) and ``seconds`` (phase -> seconds, as its workers measured them)."""

    values: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add_sync(self, sync: SyncResult | None) -> None:
        self.seconds["sync_weights"] = sync.seconds if sync else 0.0
        for stage in SYNC_STAGES:
            self.values[f"timing_s/sync_{stage}"] = sync.stages[stage] if sync else 0.0
        self.values["perf/sync_gb"] = sync.bytes / 1e9 if sync else 0.0

    def add_samples(self, info: SampleInfo, scores: Scores, kept: np.ndarray, max_prompt_tokens: int) -> None:
        """``info`` and ``kept``: samples that go into training; ``scores``: of all that were drawn."""
        self.values |= summary("critic/score", kept)
        self.values |= summary("prompt_length", info.prompt_length) | summary("response_length", info.response_length)
        self.values["response_length/clip_ratio"] = float(info.truncated.mean())
        self.values["prompt_length/clip_ratio"] = float((info.prompt_length >= max_prompt_tokens).mean())
        self.values["reward/failed_share"] = sum(s != "ok" for s in scores.status) / len(scores.status)
        for name, numbers in scores.extra.items():
            self.values[f"reward_extra/{name}/mean"] = float(np.nanmean(numbers))
        self.values["perf/total_num_tokens"] = float((info.prompt_length + info.response_length).sum())

    def add_log_prob_gap(self, infos: Infos) -> None:
        self.values["training/rollout_logprobs_diff_max"] = max(i["max"] for i in infos)
        self.values["training/rollout_logprobs_diff_mean"] = _total(infos, "sum") / _total(infos, "count")
        self.values["training/rollout_probs_diff_max"] = max(i["prob_max"] for i in infos)
        self.values["training/rollout_probs_diff_mean"] = _total(infos, "prob_sum") / _total(infos, "count")

    def add_kl(self, infos: Infos, coef: float) -> None:
        self.values["actor/reward_kl_penalty"] = _total(infos, "kl_sum") / _total(infos, "tokens")
        self.values["actor/reward_kl_penalty_coeff"] = coef

    def add_rewards(self, infos: Infos) -> None:
        self.values |= _merged("critic/rewards", "rewards", infos)

    def add_returns(self, infos: Infos) -> Moments:
        """Also returns the moments of the step's advantages, for whitening."""
        if "returns" in infos[0]:
            returns, residual = (Moments.merge_all(i[name] for i in infos) for name in ("returns", "residual"))
            self.values["critic/vf_explained_var"] = 1.0 - residual.m2 / returns.m2 if returns.m2 > 0 else 0.0
            self.values |= _merged("critic/values", "values", infos) | _merged("critic/returns", "return", infos)
        return Moments.merge_all(i["moments"] for i in infos)

    def add_advantages(self, infos: Infos) -> None:
        self.values |= _merged("critic/advantages", "advantages", infos)

    def add_update(self, role: str, results: Sequence[UpdateResult], lr: float) -> None:
        """Means over the optimizer steps of the PPO step."""
        if not results:
            return
        for name in results[0].sums:
            self.values[f"{role}/{name}"] = float(np.mean([r.sums[name] for r in results]))
        self.values[f"{role}/lr"] = lr
        self.values[f"{role}/grad_norm"] = float(np.mean([r.grad_norm for r in results]))
        self.seconds[f"update_{role}"] = sum(r.seconds for r in results)

    def finish(self, run: "Context", step: int, *, seconds: float, waited: float, received: int) -> None:
        self.seconds |= {"controller": seconds - waited, "step": seconds}
        for phase, spent in self.seconds.items():
            self.values[f"timing_s/{phase}"] = spent
        self.values |= {
            "training/global_step": step,
            "training/epoch": run.cursor.epoch,
            "perf/time_per_step": seconds,
            "perf/throughput": self.values["perf/total_num_tokens"] / seconds,
            "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
            "controller/bytes_received": received,
        }


def summary(name: str, x: np.ndarray) -> dict[str, float]:
    """mean, max and min of [B]."""
    return {f"{name}/mean": float(np.mean(x)), f"{name}/max": float(np.max(x)), f"{name}/min": float(np.min(x))}


def _total(infos: Infos, key: str) -> float:
    return float(sum(i[key] for i in infos))


def _merged(name: str, key: str, infos: Infos) -> dict[str, float]:
    return {
        f"{name}/mean": _total(infos, f"{key}/sum") / _total(infos, f"{key}/count"),
        f"{name}/max": max(i[f"{key}/max"] for i in infos),
        f"{name}/min": min(i[f"{key}/min"] for i in infos),
    }
