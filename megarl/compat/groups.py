"""Worker groups of a loop by hand: which call goes to which processes. Each call waits for its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megarl.algo.schedules import learning_rate
from megarl.cluster.calls import wait_all
from megarl.cluster.train_group import TrainGroup, UpdateResult
from megarl.compat.batch import Life, PromptBatch, TrainerBatch, check_batch, check_trainable, numbered
from megarl.compat.functions import mean_kl
from megarl.config.schema import Config
from megarl.controller.context import Context
from megarl.controller.metrics import StepMetrics
from megarl.controller.step import actor_steps, critic_steps, draw_samples, score_samples
from megarl.errors import ConfigError, DataError, explain

_SAMPLES = ("prompts", "responses")


class ActorRolloutGroup:
    """The actor's processes and, in a trainer, the generation engines that draw with its weights."""

    def __init__(self, config: Config, group: TrainGroup, run: Context | None = None, life: Life | None = None):
        self.config, self.group, self.run, self.life = config, group, run, life or Life()

    @property
    def world_size(self) -> int:
        """Megatron ranks, one process each."""
        return self.group.layout.world_size

    def generate_sequences(self, prompts: PromptBatch) -> TrainerBatch:
        """Draw responses with the actor's weights as they are now, and score them where the trainer has a reward function.

        Samples whose reward call failed are treated as the configuration says (``reward.on_failure``). Each call is a step: it decides
        the samples' seeds and the learning rates of the updates that follow.

        Returns:
            Columns prompts, responses (together: sequences), rollout_log_probs (of the engine) and log_probs (of the actor, which the
            update compares with); scores and metrics.
        """
        run = self._run_of(prompts)
        step, m = run.step + 1, StepMetrics()
        proto, scores = draw_samples(run, prompts.rows, step, m), None
        drawn = len(proto)
        if run.groups.rewards is not None:
            proto, scores = score_samples(run, proto, step, m)
        batch = TrainerBatch(numbered(proto, step), run, step, drawn, scores, life=self.life)
        batch = batch.union(self.compute_log_prob(batch))
        m.add_log_prob_gap(self.group.compare_log_probs(batch.proto).result())
        run.step = step
        return replace(batch, metrics=dict(m.values))

    def compute_log_prob(self, batch: TrainerBatch) -> TrainerBatch:
        """Column log_probs: of the responses' tokens under the actor as it is now."""
        check_batch(batch, "compute_log_prob", self.run)
        return _forward(self.group, "actor", batch, {"log_probs": "log_probs"}, self.config, "log-probs")

    def update_actor(self, batch: TrainerBatch) -> dict[str, float]:
        """The optimizer steps of one PPO step on the batch.

        Returns:
            loss (pg_loss), pg_clipfrac, ppo_kl, entropy, grad_norm, lr; with a reference kl_divergence: mean over response tokens of
            log_probs - ref_log_probs of the policy that drew the samples, nats.
        """
        check_batch(batch, "update_actor", self.run).require("advantages", "log_probs", by="update_actor")
        check_trainable(batch, "update_actor")
        metrics = {}
        if self.config.algorithm.kl.where != "none":
            batch.require("ref_log_probs", by="update_actor (kl_divergence)")
        if "ref_log_probs" in batch.column_names:
            metrics["kl_divergence"] = mean_kl(batch)
        part = self.config.actor
        steps = actor_steps(self.group, batch.proto, part, batch.step, self.config.rollout.temperature, drawn=batch.drawn)
        if self.run is not None:
            self.run.version += 1  # the engines' weights are old from here on, even where the update fails half-way
        results = _learn(batch, "actor", steps)
        return {"loss": _mean(results, "pg_loss")} | _update_metrics("actor", results, learning_rate(part.optim, batch.step)) | metrics

    def _run_of(self, prompts: PromptBatch) -> Context:
        if self.run is None:
            do = "build a RayPPOTrainer, which has data, engines and a reward function, and use its actor_rollout_wg"
            raise ConfigError(explain("this group stands alone and can't generate", where="generate_sequences", do=do))
        if self.life.closed:
            do = "make another RayPPOTrainer"
            raise ConfigError(explain("the worker groups don't run", where="generate_sequences", got="the trainer is closed", do=do))
        if not isinstance(prompts, PromptBatch) or not len(prompts):
            got = "no prompts" if isinstance(prompts, PromptBatch) else type(prompts).__name__
            raise DataError(
                explain("no batch of prompts", where="generate_sequences", got=got, do="pass a batch of trainer.train_dataloader")
            )
        if prompts.path != str(self.run.paths.train_prompts):
            got, expected = prompts.path, self.run.paths.train_prompts
            raise DataError(explain("prompts of another trainer", where="generate_sequences", got=got, expected=expected))
        return self.run


class CriticGroup:
    """The critic's processes."""

    def __init__(self, config: Config, group: TrainGroup, run: Context | None = None):
        self.config, self.group, self.run = config, group, run

    @property
    def world_size(self) -> int:
        """Megatron ranks, one process each."""
        return self.group.layout.world_size

    def compute_values(self, batch: TrainerBatch) -> TrainerBatch:
        """Columns values (of the state before each response token) and last_values (after the last)."""
        check_batch(batch, "compute_values", self.run)
        return _forward(self.group, "critic", batch, {"values": "values", "last_values": "last_values"}, self.config, "values")

    def update_critic(self, batch: TrainerBatch) -> dict[str, float]:
        """The optimizer steps of one PPO step on the batch.

        Returns:
            loss (vf_loss), vf_clipfrac, vpred_mean, grad_norm, lr, and vf_explained_var of the values that the advantages came from.
        """
        check_batch(batch, "update_critic", self.run).require("values", "returns", by="update_critic")
        check_trainable(batch, "update_critic")
        part = self.config.critic
        results = _learn(batch, "critic", critic_steps(self.group, batch.proto, part, batch.step, drawn=batch.drawn))
        metrics = {"loss": _mean(results, "vf_loss")} | _update_metrics("critic", results, learning_rate(part.optim, batch.step))
        known = batch.estimate.metrics if batch.estimate else {}
        return metrics | {name.rpartition("/")[2]: known[name] for name in ("critic/vf_explained_var",) if name in known}


class RefPolicyGroup:
    """The frozen reference, in processes of its own or in the actor's."""

    def __init__(self, config: Config, group: TrainGroup, run: Context | None = None):
        self.config, self.group, self.run = config, group, run

    @property
    def world_size(self) -> int:
        """Megatron ranks, one process each."""
        return self.group.layout.world_size

    def compute_ref_log_prob(self, batch: TrainerBatch) -> TrainerBatch:
        """Column ref_log_probs: of the responses' tokens under the reference."""
        check_batch(batch, "compute_ref_log_prob", self.run)
        return _forward(self.group, "reference", batch, {"log_probs": "ref_log_probs"}, self.config, "reference log-probs")


def _forward(group: TrainGroup, role: str, batch: TrainerBatch, renames: dict[str, str], config: Config, phase: str) -> TrainerBatch:
    """The columns that ``role`` computes of the batch's sequences, and no others; ``union`` merges them."""
    batch.require(*_SAMPLES, by=phase)
    temperature = config.rollout.temperature
    found, _ = group.forward(role, batch.proto.select(_SAMPLES), renames, temperature=temperature, phase=phase).result()
    # A critic with a tokenizer of its own also leaves what it read, so that its update needn't read again.
    return replace(batch, proto=found.select([name for name in found.column_names if name not in _SAMPLES]))


def _learn(batch: TrainerBatch, role: str, steps: list[Any]) -> Sequence[UpdateResult]:
    if batch.estimate is not None and role not in batch.estimate.trained:
        batch.estimate.trained.append(role)  # before the first step ends: a failure may leave some applied
    return wait_all(*steps)


def _update_metrics(role: str, results: Sequence[UpdateResult], lr: float) -> dict[str, float]:
    m = StepMetrics()
    m.add_update(role, results, lr)
    return {name.removeprefix(f"{role}/"): value for name, value in m.values.items()}


def _mean(results: Sequence[UpdateResult], name: str) -> float:
    return sum(r.sums[name] for r in results) / len(results)
