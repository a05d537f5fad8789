"""A generation engine as a Ray actor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from megarl.cluster.worker import open_log, process_facts, timed
from megarl.config.schema import RolloutConfig
from megarl.data.prompts import PreparedPrompts
from megarl.profiling import Profiler, Recorded, Window, phase
from megarl.rollout.engine import RolloutEngine
from megarl.types import GenerationRequest, SamplingSettings
from megarl.weights.plan import GenerationRank


class RolloutWorker:
    """One vLLM engine. It reads prompts by row from the prepared file and returns responses as columns."""

    def __init__(
        self, index: int, model_dir: str, config: RolloutConfig, max_prompt_tokens: int, seed: int, log_dir: str, shares_device: bool
    ):
        open_log(log_dir, f"rollout engine {index}")
        self.profiler = Profiler()
        self.engine = RolloutEngine(model_dir, config, max_prompt_tokens, seed, shares_device=shares_device)
        self.prompts: dict[str, PreparedPrompts] = {}
        self.started = process_facts()

    def layout(self) -> tuple[list[GenerationRank], dict[str, Any]]:
        """What each rank of this engine holds, recorded from vLLM's own loader; and the facts of its start."""
        return self.engine.layout(), self.started

    def facts(self) -> dict[str, Any]:
        """Process id and memory."""
        return process_facts()

    def start_profile(self, window: Window) -> None:
        """Begin to record this process and, where the engine has several ranks, theirs."""
        self.profiler.start(window)
        self.engine.start_profile(window)

    def stop_profile(self) -> Recorded:
        """Write what was recorded."""
        own, ranks = self.profiler.stop(), self.engine.stop_profile()
        return Recorded(own.files + ranks.files, own.failures + ranks.failures)

    @phase("sleep")
    def sleep(self) -> float:
        """Give the device's memory back to those who share it; a sync wakes the engine. Returns seconds."""
        return self.engine.sleep()

    @phase("sync weights")
    def sync(self, plan: Any, manifests: dict[int, dict[str, Any]], version: int, check: bool) -> Any:
        """Take over the training side's weights as ``version``."""
        return self.engine.sync(plan, manifests, version, check)

    @phase("generate")
    @ray.method(num_returns=2)
    def generate(
        self, requests: Sequence[GenerationRequest], prompts_path: str, sampling: SamplingSettings
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draw one response a request.

        Returns columns prompts, responses, rollout_log_probs in request order, then scalars: lengths, truncation, seconds.
        """
        with timed() as record:
            source = self.prompts.setdefault(prompts_path, PreparedPrompts.open(prompts_path))
            prompts = source.tokens([r.row for r in requests])
            drawn = self.engine.generate(requests, prompts, sampling)
        columns = {"prompts": prompts, "responses": drawn.responses, "rollout_log_probs": drawn.log_probs}
        info = {
            "prompt_length": prompts.lengths,
            "response_length": drawn.responses.lengths,
            "truncated": np.asarray(drawn.truncated, dtype=bool),
        }
        return columns, info | record
