"""What can be wrong with a configuration as a whole, found before any process is started: choices, ranges, layouts, batch arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import lcm
from typing import Any

from megarl.config.load import nearest
from megarl.config.placement_checks import check_layout, check_placement
from megarl.config.profile_checks import check_profile
from megarl.config.sampling_checks import MIN_TEMPERATURE, check_sampling
from megarl.config.schedule_checks import check_schedule
from megarl.config.schema import ActorConfig, Config, CriticConfig
from megarl.errors import ConfigError, explain

# Of a list each item is one of these.
CHOICES: dict[str, tuple[str, ...]] = {
    "run.sinks": ("tensorboard", "wandb"),
    "data.truncation": ("error", "left", "right", "drop"),
    "actor.loss_aggregation": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"),
    "actor.dtype": ("float32", "bfloat16"),
    "critic.dtype": ("float32", "bfloat16"),
    "rollout.dtype": ("float32", "bfloat16"),
    "algorithm.kl.where": ("reward", "none"),
    "algorithm.kl.estimator": ("k1", "k2", "k3", "abs"),
    "algorithm.kl.controller": ("adaptive", "fixed"),
    "reward.on_failure": ("drop_group", "zero", "abort"),
    "cluster.placement": ("separate", "colocated"),
    **{f"{role}.optim.schedule": ("constant", "linear", "cosine") for role in ("actor", "critic")},
}

# Names that a plugin may add to; without plugins these are all there are.
REGISTERED: dict[str, tuple[str, ...]] = {
    "algorithm.advantage_estimator": ("gae", "grpo"),
    "actor.policy_loss": ("ppo_clip",),
}

MAX_KL_CHANGE = 0.2  # largest relative error that the adaptive KL controller follows (arXiv:1909.08593, section 2.2)
WARM_START_FIRST_MEASUREMENT = 5  # far below its stopping range the warm start measures at every fifth warm_start.eval_every_steps

Range = tuple[Callable[[Any], bool], str]
_AT_LEAST_0: Range = (lambda x: x >= 0, "0 or more")
_AT_LEAST_1: Range = (lambda x: x >= 1, "1 or more")
_POSITIVE: Range = (lambda x: x > 0, "more than 0")
_SHARE: Range = (lambda x: 0 <= x <= 1, "from 0 to 1")
_CLIP: Range = (lambda x: 0 < x < 1, "between 0 and 1")
_DECAY: Range = (lambda x: all(0 <= beta < 1 for beta in x), "each from 0 to below 1")

_LAYOUT_SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor", "data")

RANGES: dict[str, Range] = {
    "run.seed": (lambda x: 0 <= x < 2**32, "from 0 to 4294967295 = 2**32 - 1, as numpy, which vLLM seeds with it, takes"),
    "run.total_steps": _AT_LEAST_1,
    "run.save_every_steps": (lambda x: x >= -1, "-1 or more"),
    "run.keep_checkpoints": _AT_LEAST_1,
    "run.eval_every_steps": _AT_LEAST_0,
    "run.log_rollouts": _AT_LEAST_0,
    "data.val_prompts": (lambda x: x >= 2, "2 or more (one prompt has no standard error)"),
    "data.max_prompt_tokens": _AT_LEAST_1,
    **{f"{role}.layout.{size}": _AT_LEAST_1 for role in ("actor", "critic") for size in _LAYOUT_SIZES},
    **{
        f"{role}.optim.{name}": _AT_LEAST_0
        for role in ("actor", "critic")
        for name in ("lr", "lr_warmup_steps", "schedule_steps", "lr_min", "weight_decay", "clip_grad")
    },
    **{f"{role}.optim.betas": _DECAY for role in ("actor", "critic")},
    **{f"{role}.optim.eps": _POSITIVE for role in ("actor", "critic")},
    **{
        f"{role}.{name}": _AT_LEAST_1
        for role in ("actor", "critic")
        for name in ("samples_per_mini_batch", "epochs_per_step", "max_tokens_per_micro_batch")
    },
    "actor.clip_ratio_low": _CLIP,
    "actor.clip_ratio_high": _POSITIVE,
    "actor.clip_ratio_dual": (lambda x: x == 0 or x > 1, "0 (off) or more than 1"),
    "actor.entropy_coef": _AT_LEAST_0,
    "critic.value_clip": _AT_LEAST_0,
    "rollout.engines": _AT_LEAST_1,
    "rollout.tensor_parallel": _AT_LEAST_1,
    "rollout.prompts_per_step": _AT_LEAST_1,
    "rollout.responses_per_prompt": _AT_LEAST_1,
    "rollout.temperature": (
        lambda x: x >= MIN_TEMPERATURE,
        f"{MIN_TEMPERATURE} or more: 0 is greedy, which leaves nothing to learn, and vLLM changes what is between",
    ),
    "rollout.top_p": (lambda x: 0 < x <= 1, "more than 0, at most 1"),
    "rollout.top_k": (lambda x: x == -1 or x >= 2, "-1 (all tokens), or 2 or more: 1 is greedy, which leaves nothing to learn"),
    "rollout.max_response_tokens": _AT_LEAST_1,
    "rollout.kv_cache_mib": _AT_LEAST_0,
    "rollout.max_concurrent_samples": _AT_LEAST_1,
    "rollout.check_sync_every": _AT_LEAST_0,
    "algorithm.kl.coef": _AT_LEAST_0,
    "algorithm.kl.target": _POSITIVE,
    "algorithm.kl.horizon": _AT_LEAST_1,
    "algorithm.gamma": _SHARE,
    "algorithm.lam": _SHARE,
    "algorithm.critic_warmup_steps": _AT_LEAST_0,
    "reward.timeout_s": _POSITIVE,
    "reward.workers": _AT_LEAST_1,
    "reward.max_failed_share": _SHARE,
    **{f"warm_start.{name}": _AT_LEAST_1 for name in ("samples_per_step", "max_steps", "eval_every_steps")},
    "warm_start.lr": _POSITIVE,
    "cluster.cpu_share_per_process": _POSITIVE,
    **{f"cluster.{name}_deadline_s": _POSITIVE for name in ("start", "call", "save")},
}


def check_config(config: Config) -> list[str]:
    """Raise ConfigError for the first thing that can't be run; else the lines to print: batch arithmetic, then warnings."""
    _check_choices(config)
    _check_ranges(config)
    check_layout(config.actor.layout, "actor.layout")
    check_layout(config.critic.layout, "critic.layout")
    for role in _trained_roles(config):
        check_schedule(value_of(config, role).optim, f"{role}.optim")
    check_sampling(config.rollout)
    _check_algorithm(config)
    _check_kl(config)
    _check_warm_start(config)
    if config.actor.dtype != config.rollout.dtype:
        raise ConfigError(
            explain(
                "actor and engine hold the weights in different types, and they are copied bit for bit",
                where="rollout.dtype",
                got=f"actor.dtype {config.actor.dtype}, rollout.dtype {config.rollout.dtype}",
                expected="equal types",
            )
        )
    check_placement(config, with_critic="critic" in _trained_roles(config))
    check_profile(config)
    if config.run.eval_every_steps and not config.data.val_files:
        where = "run.eval_every_steps"
        raise ConfigError(explain("evaluation without held-out data", where=where, do="name data.val_files, or set it to 0"))
    return [*_batch_lines(config), *_warnings(config)]


def value_of(section: Any, key: str) -> Any:
    """The value at a dotted key below ``section``: the whole configuration, or a part of it."""
    return reduce(getattr, key.split("."), section)


def _check_choices(config: Config) -> None:
    open_names = {} if config.plugins else REGISTERED
    for key, choices in (CHOICES | open_names).items():
        value = value_of(config, key)
        for got in value if isinstance(value, tuple) else (value,):
            if got in choices:
                continue
            near = nearest(got, choices)
            do = f"did you mean {near}?" if near else "choose one of them"
            raise ConfigError(explain(f"{key} has no such choice", got=got, expected=" | ".join(choices), do=do))


def _check_ranges(config: Config) -> None:
    for key, (holds, expected) in RANGES.items():
        got = value_of(config, key)
        if not holds(got):
            raise ConfigError(explain(f"{key} is out of range", got=got, expected=expected))


def _check_algorithm(config: Config) -> None:
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.advantage_estimator == "grpo" and rollout.responses_per_prompt < 2:
        raise ConfigError(
            explain(
                "grpo compares the responses to one prompt, and there is only one",
                where="rollout.responses_per_prompt",
                got=rollout.responses_per_prompt,
                expected="2 or more",
                do="raise it (and lower rollout.prompts_per_step to keep the number of samples), or use gae",
            )
        )
    if algorithm.advantage_estimator == "grpo" and algorithm.critic_warmup_steps:
        where = "algorithm.critic_warmup_steps"
        raise ConfigError(explain("grpo has no critic to warm up", where=where, got=algorithm.critic_warmup_steps, expected=0))
    if algorithm.critic_warmup_steps >= config.run.total_steps:
        raise ConfigError(
            explain(
                "the actor would never learn: the critic's warm-up takes the whole run",
                where="algorithm.critic_warmup_steps",
                got=algorithm.critic_warmup_steps,
                expected=f"less than {config.run.total_steps} = run.total_steps",
            )
        )
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    for role in _trained_roles(config):
        room = value_of(config, role).max_tokens_per_micro_batch
        if room < longest:
            raise ConfigError(
                explain(
                    "a micro-batch can't hold the longest sample",
                    where=f"{role}.max_tokens_per_micro_batch",
                    got=room,
                    expected=f"at least {longest} = data.max_prompt_tokens + rollout.max_response_tokens",
                )
            )


def _check_kl(config: Config) -> None:
    """What would leave an adaptive coefficient where it is for ever, or turn it negative (see algo.kl.AdaptiveKLController)."""
    kl, rollout = config.algorithm.kl, config.rollout
    if kl.where != "reward" or kl.controller != "adaptive":
        return
    if kl.coef == 0:
        raise ConfigError(
            explain(
                "an adaptive KL coefficient of 0 stays 0: it is changed by factors",
                where="algorithm.kl.coef",
                got=0,
                expected="more than 0",
                do="raise it, set algorithm.kl.controller to fixed, or set algorithm.kl.where to none",
            )
        )
    samples = rollout.prompts_per_step * rollout.responses_per_prompt
    if MAX_KL_CHANGE * samples >= kl.horizon:
        raise ConfigError(
            explain(
                "one step could turn the KL coefficient to 0 or below",
                where="algorithm.kl.horizon",
                got=f"{kl.horizon}; {MAX_KL_CHANGE} x {samples} samples a step / {kl.horizon} = {MAX_KL_CHANGE * samples / kl.horizon:g}",
                expected=f"more than {MAX_KL_CHANGE} x {samples} = {MAX_KL_CHANGE * samples:g}",
                do="raise algorithm.kl.horizon, or draw fewer samples a step",
            )
        )


def _check_warm_start(config: Config) -> None:
    warm = config.warm_start
    if not warm.enabled:
        return
    if not warm.train_files:
        raise ConfigError(explain("a warm start without data", where="warm_start.train_files", do="name parquet files, or disable it"))
    if not config.data.val_files:
        raise ConfigError(explain("a warm start without held-out data to stop by", where="data.val_files", do="name parquet files"))
    if not warm.stop_reward_min <= warm.stop_reward_max:
        got = f"min {warm.stop_reward_min}, max {warm.stop_reward_max}"
        raise ConfigError(explain("an empty stopping range", where="warm_start", got=got, expected="stop_reward_min <= stop_reward_max"))
    first = WARM_START_FIRST_MEASUREMENT * warm.eval_every_steps
    if warm.max_steps < first:
        raise ConfigError(
            explain(
                "the warm start would end before its first measurement",
                where="warm_start.max_steps",
                got=warm.max_steps,
                expected=f"at least {first} = {WARM_START_FIRST_MEASUREMENT} x {warm.eval_every_steps} (warm_start.eval_every_steps)",
            )
        )


def _trained_roles(config: Config) -> tuple[str, ...]:
    return ("actor", "critic") if config.algorithm.advantage_estimator == "gae" else ("actor",)


def _batch_lines(config: Config) -> list[str]:
    """The arithmetic from prompts to optimizer steps, one line a trained role."""
    prompts, responses = config.rollout.prompts_per_step, config.rollout.responses_per_prompt
    drawn = f"{_count(prompts, 'prompt')} x {_count(responses, 'response')} = {_count(prompts * responses, 'sample')}"
    return [_role_line(role, value_of(config, role), drawn, prompts * responses, responses) for role in _trained_roles(config)]


def _role_line(role: str, settings: ActorConfig | CriticConfig, drawn: str, samples: int, responses: int) -> str:
    size, ranks = settings.samples_per_mini_batch, settings.layout.data
    if samples % size or size % ranks:
        sizes = [n for n in range(ranks, samples + 1, ranks) if samples % n == 0]
        unit = lcm(size, responses)  # the least number of samples that is whole mini-batches and whole prompts
        prompts = sorted({max(1, samples // unit) * unit // responses, (samples // unit + 1) * unit // responses})
        do = f"set {role}.samples_per_mini_batch to {_either(_closest(size, sizes))}" if sizes else ""
        if size % ranks == 0:
            do += f"{', or ' if do else 'set '}rollout.prompts_per_step to {_either(prompts)}"
        per_rank = f"; {size} / {ranks} data-parallel ranks = {size / ranks:g} samples a rank" if ranks > 1 else ""
        raise ConfigError(
            explain(
                f"the samples of a step do not divide into the {role}'s mini-batches",
                where=f"{role}.samples_per_mini_batch",
                got=f"{drawn}; {samples} / {size} = {samples / size:g} mini-batches{per_rank}",
                expected="whole numbers",
                do=do or f"make rollout.prompts_per_step a multiple of {ranks}",
            )
        )
    epochs = f" x {settings.epochs_per_step} epochs" if settings.epochs_per_step > 1 else ""
    share = f" ({size // ranks} on each of {ranks} data-parallel ranks)" if ranks > 1 else ""
    return f"{role}: {drawn} = {_count(samples // size, 'optimizer step')} of {size}{share}{epochs}"


def _warnings(config: Config) -> list[str]:
    rollout, lines = config.rollout, []
    if rollout.top_p < 1 or rollout.top_k != -1:
        lines.append(
            f"warning: top_p {rollout.top_p:g}, top_k {rollout.top_k}: tokens are drawn from a cut distribution and trained under the full "
            "one, so that the policy gradient is biased; the log-prob difference of the two sides holds the log of what was cut off"
        )
    if config.algorithm.kl.where == "none" and config.algorithm.kl.coef > 0:
        lines.append("warning: algorithm.kl.coef has no effect, since algorithm.kl.where is none")
    if config.algorithm.advantage_estimator == "grpo" and config.critic.model:
        lines.append("warning: critic.model has no effect, since grpo has no critic")
    for key, built_in in REGISTERED.items():
        got = value_of(config, key)
        near = nearest(got, built_in)
        if near and got not in built_in:
            lines.append(f"warning: {key}: {got} is left to the plugins; the built-in {near} has nearly the same name")
    return lines


def _closest(size: int, sizes: Sequence[int]) -> list[int]:
    """The nearest of ``sizes`` at or below, and above."""
    return [*[n for n in sizes if n <= size][-1:], *[n for n in sizes if n > size][:1]]


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(str(n) for n in numbers)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
