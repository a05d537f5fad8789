"""Reward functions as a Ray actor: it decodes responses, scores them in killable processes, and keeps the sample rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.util.placement_group import PlacementGroup

from megarl.cluster.calls import Pending, fetch_together, start_call
from megarl.cluster.placement import Slots, reserve, spawn
from megarl.cluster.worker import open_log, process_facts, timed
from megarl.config.schema import RewardConfig
from megarl.data.prompts import PreparedPrompts
from megarl.data.proto import DataProto, Piece, gather_rows
from megarl.rewards.pool import RewardPool
from megarl.types import Scores


class RewardWorker:
    """Scores samples with the user's function. Texts stay here; the controller sees one number a sample."""

    def __init__(self, tokenizer_dir: str, config: RewardConfig, log_dir: str):
        open_log(log_dir, "reward")
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
        self.pool = RewardPool(config.path, config.name, config.workers, config.timeout_s)
        self.prompts: dict[str, PreparedPrompts] = {}

    def facts(self) -> dict[str, Any]:
        """Process id and memory."""
        return process_facts()

    def score(
        self, pieces: Mapping[str, tuple[Piece, ...]], rows: list[int], prompts_path: str, log_path: str | None, log_count: int
    ) -> tuple[Scores, dict[str, float]]:
        """Score every sample of a batch; ``rows[i]`` is the prompt of sample i. Writes the first ``log_count`` rollouts to ``log_path``."""
        with timed() as record:
            source = self.prompts.setdefault(prompts_path, PreparedPrompts.open(prompts_path))
            responses = gather_rows(pieces, range(len(rows)), fetch_together)["responses"]
            texts = self.tokenizer.batch_decode([r.tolist() for r in responses], skip_special_tokens=True)
            items = [inputs | {"solution_str": text} for inputs, text in zip(source.reward_inputs(rows), texts, strict=True)]
            scores = self.pool.score(items)
            if log_path is not None:
                self._write_log(Path(log_path), source, rows[:log_count], texts[:log_count], scores)
        return scores, record

    def _write_log(self, path: Path, source: PreparedPrompts, rows: list[int], texts: list[str], scores: Scores) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        count = len(rows)
        table = pa.table(
            {
                "prompt": [source.text(row) for row in rows],
                "response": texts,
                "score": scores.score[:count],
                "status": list(scores.status[:count]),
                "ground_truth": [str(item["ground_truth"]) for item in source.reward_inputs(rows)],
            }
        )
        pq.write_table(table, path)


@dataclass(frozen=True)
class RewardSettings:
    """How the reward worker is placed."""

    tokenizer_dir: str
    config: RewardConfig
    cpus_per_process: float
    log_dir: str
    start_deadline_s: float
    call_deadline_s: float


class RewardGroup:
    """The reward functions, as the controller sees them."""

    def __init__(self, settings: RewardSettings, placement: PlacementGroup | None = None):
        """Start the process, in ``placement`` or in a slot of its own."""
        self.settings = settings
        slots = self.slots(settings)
        placement = placement or reserve(slots, settings.start_deadline_s)
        self.worker = spawn(RewardWorker, slots, placement, 0, settings.tokenizer_dir, settings.config, settings.log_dir)

    @staticmethod
    def slots(settings: RewardSettings) -> Slots:
        """What the group will ask of the cluster."""
        return Slots("reward", 1, settings.cpus_per_process)

    def start(self) -> Pending[list[dict[str, Any]]]:
        """Wait until the worker is up."""
        return Pending(start_call("start", ("reward",), [self.worker.facts.remote()], self.settings.start_deadline_s), list)

    def score(
        self, batch: DataProto, prompts_path: str, *, log_path: str | None = None, log_count: int = 0
    ) -> Pending[tuple[Scores, float]]:
        """Score every sample of the batch."""
        pieces = {"responses": tuple(batch.pieces("responses"))}
        ref = self.worker.score.remote(pieces, batch.info.row.tolist(), prompts_path, log_path, log_count)
        # Every call may take its whole time limit, and that is no hang of the worker.
        longest = self.settings.config.timeout_s * len(batch) / self.settings.config.workers
        call = start_call("reward", ("reward",), [ref], self.settings.call_deadline_s + longest)
        return Pending(call, lambda r: (r[0][0], r[0][1]["seconds"]))

    def facts(self) -> dict[str, dict[str, Any]]:
        """Worker name -> process id and memory."""
        return {"reward": start_call("facts", ("reward",), [self.worker.facts.remote()], self.settings.call_deadline_s).wait()[0]}

    def stop(self) -> None:
        """End the process."""
        ray.kill(self.worker)
