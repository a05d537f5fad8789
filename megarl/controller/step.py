"""One PPO step, top to bottom. Nothing reads a column that is written later.

    column              written by                     read by
    prompts, responses  rollout                        rewards, actor, reference, critic (or, under critic.retokenize, its tokenizer)
    rollout_log_probs   rollout                        the comparison with the actor's
    log_probs           actor, before its update       KL penalty, policy loss
    ref_log_probs       reference                      KL penalty
    critic_tokens       critic's tokenizer             critic, under critic.retokenize in the place of prompts and responses
    critic_predictors   critic's tokenizer             critic: which of these tokens speaks of each response token
    critic_lengths      critic's tokenizer             the controller, to balance the critic's samples
    values              critic, before its update      advantages, value loss
    last_values         critic, before its update      advantages, of truncated responses that bootstrap
    token_rewards       KL penalty                     advantages
    raw_advantages      advantages                     whitening
    returns             advantages                     value loss
    advantages          whitening                      policy loss

Groups on disjoint processes run side by side; calls to one group run in the order in which they are made.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from megarl.algo.schedules import learning_rate
from megarl.cluster.calls import METER, Pending, wait_all
from megarl.cluster.train_group import TrainGroup, UpdateResult
from megarl.config.schema import ActorConfig, CriticConfig
from megarl.controller import metrics
from megarl.controller.context import Context, sample_requests
from megarl.controller.residency import to_generation, to_training
from megarl.data.proto import DataProto
from megarl.errors import DataError, explain
from megarl.megatron.losses import PolicyLossSpec, ValueLossSpec
from megarl.rewards.policy import apply_failure_policy
from megarl.types import Scores

Metrics = dict[str, float]


def ppo_step(run: Context, step: int) -> Metrics:
    """Draw samples, score them, and update critic and actor on them."""
    METER.reset()
    began = time.monotonic()
    m = metrics.StepMetrics()

    batch = draw_samples(run, run.cursor.take(run.config.rollout.prompts_per_step), step, m)
    batch, reward = score_samples(run, batch, step, m)
    batch = add_log_probs_and_values(run, batch, m)
    batch = add_advantages(run, batch, reward, m)

    update(run, batch, step, m)
    m.finish(run, step, seconds=time.monotonic() - began, waited=METER.waited_s, received=METER.bytes_received)
    return m.values


def draw_samples(run: Context, rows: np.ndarray, step: int, m: metrics.StepMetrics) -> DataProto:
    """Responses to the prompts ``rows`` of the training data, drawn with the actor's weights as they are now."""
    rollout = run.config.rollout
    m.add_sync(to_generation(run))
    requests, prompt_of = sample_requests(rows, rollout.responses_per_prompt, seed=run.config.run.seed, step=step)
    path = str(run.paths.train_prompts)
    batch, m.seconds["gen"] = run.groups.rollout.generate_sequences(requests, prompt_of, path, run.sampling).result()
    m.seconds["sleep"] = to_training(run)
    return batch


def score_samples(run: Context, batch: DataProto, step: int, m: metrics.StepMetrics) -> tuple[DataProto, np.ndarray]:
    """Call the reward function on every sample and apply the policy for failures; returns the kept samples and their scores [B]."""
    config = run.config
    scores, m.seconds["reward"] = run.groups.rewards.score(
        batch, str(run.paths.train_prompts), log_path=str(run.paths.rollouts(step)), log_count=config.run.log_rollouts
    ).result()
    batch, reward = drop_failed(batch, scores, run)
    m.add_samples(batch.info, scores, reward, config.data.max_prompt_tokens)
    return batch, reward


def drop_failed(batch: DataProto, scores: Scores, run: Context) -> tuple[DataProto, np.ndarray]:
    """Apply the policy for failed reward calls; returns the kept samples and their scores [B].

    Raises DivergedError when more calls failed than the recipe allows: a run must not learn from the rest in silence.
    """
    reward = run.config.reward
    kept = apply_failure_policy(scores, batch.info.group, policy=reward.on_failure, max_failed_share=reward.max_failed_share)
    rows = np.flatnonzero(kept.keep)
    return batch.take(rows.tolist()), kept.score[rows]


def add_log_probs_and_values(run: Context, batch: DataProto, m: metrics.StepMetrics) -> DataProto:
    """Columns log_probs, ref_log_probs and values. The critic works while the actor's group does the other two."""
    actor, critic, reference = run.groups.actor, run.groups.critic, run.groups.reference or run.groups.actor
    temperature = run.sampling.temperature
    calls = [actor.forward("actor", batch, {"log_probs": "log_probs", "entropy": "entropy"}, temperature=temperature, phase="log-probs")]
    names = [("old_log_prob", ("log_probs",))]
    if run.config.algorithm.kl.where != "none":
        calls.append(
            reference.forward("reference", batch, {"log_probs": "ref_log_probs"}, temperature=temperature, phase="reference log-probs")
        )
        names.append(("ref", ("ref_log_probs",)))
    reading = 0.0  # seconds of the critic's tokenizer
    if critic is not None:
        batch, reading = critic.as_read("critic", batch)
        calls.append(critic.forward("critic", batch, {"values": "values", "last_values": "last_values"}, phase="values"))
        names.append(("values", ("values", "last_values")))
    for (phase, columns), (found, seconds) in zip(names, wait_all(*calls), strict=True):
        batch = batch.union(found.select(columns))
        m.seconds[phase] = seconds + (reading if phase == "values" else 0.0)
    m.add_log_prob_gap(actor.compare_log_probs(batch).result())
    return batch


def add_advantages(run: Context, batch: DataProto, reward: np.ndarray, m: metrics.StepMetrics) -> DataProto:
    """Columns token_rewards, returns and advantages; two scalar reductions are all that the controller sees."""
    algorithm, scribe = run.config.algorithm, run.groups.scribe
    began = time.monotonic()
    batch, infos = scribe.apply_kl_penalty(batch, reward, coef=run.kl.value, estimator=algorithm.kl.estimator).result()
    if "ref_log_probs" in batch.column_names:
        m.add_kl(infos, run.kl.value)
        run.kl.update(m.values["actor/reward_kl_penalty"], len(batch))
    m.add_rewards(infos)

    batch, infos = scribe.compute_advantage(batch, reward, algorithm).result()
    moments = m.add_returns(infos)
    whitening = moments if run.groups.critic is not None and algorithm.whiten_advantages else None
    batch, infos = scribe.whiten(batch, whitening).result()
    m.add_advantages(infos)
    m.seconds["adv"] = time.monotonic() - began
    return batch


def update(run: Context, batch: DataProto, step: int, m: metrics.StepMetrics) -> None:
    """Optimizer steps of critic and actor, side by side where they have their own processes."""
    actor, critic, groups = run.config.actor, run.config.critic, run.groups
    actor_step = step - run.config.algorithm.critic_warmup_steps  # the actor's own count, for its learning rate
    calls: list[Pending[UpdateResult]] = []
    if groups.critic is not None:
        calls += critic_steps(groups.critic, batch, critic, step, drawn=run.samples_per_step)
    critic_calls = len(calls)
    if actor_step > 0:
        calls += actor_steps(groups.actor, batch, actor, actor_step, run.sampling.temperature, drawn=run.samples_per_step)
        run.version += 1
    results = wait_all(*calls)
    m.add_update("critic", results[:critic_calls], learning_rate(critic.optim, step))
    m.add_update("actor", results[critic_calls:], learning_rate(actor.optim, actor_step))


def critic_steps(group: TrainGroup, batch: DataProto, part: CriticConfig, step: int, *, drawn: int) -> list[Pending[UpdateResult]]:
    """The critic's optimizer steps on a batch; ``drawn``: samples before any were dropped."""
    batch, _ = group.as_read("critic", batch)  # once, where the batch doesn't have it from the values
    train = partial(group.train_step, "critic", batch, loss=ValueLossSpec(clip=part.value_clip), phase="update critic")
    rate = learning_rate(part.optim, step)
    return [train(rows, lr=rate) for rows in _rows_of_steps(batch, part, group, drawn)]


def actor_steps(
    group: TrainGroup, batch: DataProto, part: ActorConfig, step: int, temperature: float, *, drawn: int
) -> list[Pending[UpdateResult]]:
    """The actor's optimizer steps on a batch; ``drawn``: samples before any were dropped."""
    train = partial(group.train_step, "actor", batch, loss=PolicyLossSpec(part), phase="update actor")
    rate = learning_rate(part.optim, step)
    return [train(rows, lr=rate, temperature=temperature) for rows in _rows_of_steps(batch, part, group, drawn)]


def _rows_of_steps(batch: DataProto, part: ActorConfig | CriticConfig, group: TrainGroup, drawn: int) -> list[list[int]]:
    return mini_batches(len(batch), drawn, part.samples_per_mini_batch, part.epochs_per_step, group.layout.data)


def mini_batches(kept: int, drawn: int, samples_per_mini_batch: int, epochs: int, replicas: int = 1) -> list[list[int]]:
    """Rows of each optimizer step.

    The number of optimizer steps is that of the recipe (samples drawn / samples per mini-batch) whatever was dropped; the kept samples,
    in order, are dealt to them as evenly as possible. Only where that left one with fewer samples than ``replicas`` are there fewer.
    Raises DataError where all kept samples are too few for one step.
    """
    if kept < replicas:
        raise DataError(explain("too few samples left for one optimizer step", got=kept, expected=f"at least {replicas}, one a replica"))
    count = min(kept // replicas, max(1, drawn // samples_per_mini_batch))
    return [part.tolist() for _ in range(epochs) for part in np.array_split(np.arange(kept), count)]
