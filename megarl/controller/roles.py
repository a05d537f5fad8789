"""Which worker groups a recipe asks for, and which model each of their roles holds."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ray.util.placement_group import PlacementGroup, remove_placement_group

from megarl.algo.advantages import needs_values
from megarl.cluster.calls import wait_all
from megarl.cluster.placement import Slots, check_capacity, cluster_has_gpus, reserve, shared_by
from megarl.cluster.reward_worker import RewardGroup, RewardSettings
from megarl.cluster.rollout_group import RolloutGroup, RolloutSettings
from megarl.cluster.train_group import GroupSettings, TrainGroup
from megarl.config.schema import ActorConfig, Config, CriticConfig, LayoutConfig, OptimConfig
from megarl.controller.context import Groups, RunPaths
from megarl.errors import PlacementError, explain
from megarl.megatron.model import Role
from megarl.megatron.optimizer import OptimizerSettings
from megarl.types import Layout
from megarl.weights.families import read_hf_config


def start_groups(
    config: Config, paths: RunPaths, *, reference: LayoutConfig | None = None, with_rewards: bool = True
) -> tuple[Groups, dict[str, Any]]:
    """Place and start every worker group; returns them, and what they said at the start. A failure stops what was started.

    ``reference``: the layout of processes of its own for the reference; without one it lives in the actor's.
    Raises PlacementError before anything is started when the cluster has too few slots.
    """
    if cluster_has_gpus():
        check_weights_can_reach(config)
    colocated = config.cluster.placement == "colocated"
    devices = (0.5 if colocated else 1.0) if cluster_has_gpus() else 0.0  # of a GPU, for each process
    actor = train_settings("actor", config.actor, config, paths, devices)
    critic = train_settings("critic", config.critic, config, paths, devices) if needs_critic(config) and not colocated else None
    rollout = RolloutSettings(
        model_dir=config.model,
        config=config.rollout,
        max_prompt_tokens=config.data.max_prompt_tokens,
        cpus_per_process=config.cluster.cpu_share_per_process,
        gpus_per_process=devices,
        log_dir=str(paths.logs),
        start_deadline_s=config.cluster.start_deadline_s,
        call_deadline_s=config.cluster.call_deadline_s,
        seed=config.run.seed,
        shares_devices=colocated,
    )
    rewards = RewardSettings(
        tokenizer_dir=config.model,
        config=config.reward,
        cpus_per_process=config.cluster.cpu_share_per_process,
        log_dir=str(paths.logs),
        start_deadline_s=config.cluster.start_deadline_s,
        call_deadline_s=config.cluster.call_deadline_s,
    )
    own = replace(config.actor, layout=reference) if reference else None
    frozen = train_settings("reference", own, config, paths, devices) if own else None
    models = [TrainGroup.slots(s) for s in (actor, critic) if s] + [RolloutGroup.slots(rollout)]
    models = [shared_by(models)] if colocated else models
    others = ([TrainGroup.slots(frozen)] if frozen else []) + ([RewardGroup.slots(rewards)] if with_rewards else [])
    warnings = check_capacity([*models, *others])
    with ExitStack() as undo:
        placements: list[PlacementGroup] = []

        def start(cls: type, settings: Any, shared: PlacementGroup | None = None) -> Any:
            placement = shared or take(cls.slots(settings))
            group = cls(settings, placement)
            undo.callback(group.stop)
            return group

        def take(slots: Slots) -> PlacementGroup:
            placements.append(reserve(slots, config.cluster.start_deadline_s))
            undo.callback(remove_placement_group, placements[-1])
            return placements[-1]

        pool = take(models[0]) if colocated else None
        # The engine takes longest to start, so it goes first.
        engines_group, actor_group = start(RolloutGroup, rollout, pool), start(TrainGroup, actor, pool)
        critic_group = actor_group if colocated and needs_critic(config) else start(TrainGroup, critic) if critic else None
        rewards_group = start(RewardGroup, rewards) if with_rewards else None
        reference_group = start(TrainGroup, frozen) if frozen else None
        groups = Groups(actor_group, critic_group, engines_group, rewards_group, reference_group, tuple(placements))
        facts = _connect(groups, config)
        undo.pop_all()
    warnings += sorted({f["warning"] for f in facts.values() if f.get("warning")})
    return groups, {"warnings": warnings, "start_by_component_s": {name: f["age_s"] for name, f in facts.items()}}


def _connect(groups: Groups, config: Config) -> dict[str, dict[str, Any]]:
    """Wait until all processes are up, and plan the way of the weights; returns worker name -> what it said at the start."""
    trainers, rewards = groups.trainers(), [groups.rewards] if groups.rewards else []
    engines, *said = wait_all(*[g.start() for g in (groups.rollout, *rewards, *trainers)])
    groups.rollout.connect(groups.actor, read_hf_config(config.model), [layout for layout, _ in engines], config.actor.dtype)
    groups.rollout.sleep()  # where devices are shared, the trainers come first
    names = [*groups.rollout.names, *("reward" for _ in rewards), *(n for g in trainers for n in g.names)]
    return dict(zip(names, [*(f for _, f in engines), *(f for group in said for f in group)], strict=True))


def check_weights_can_reach(config: Config) -> None:
    """On GPUs every engine must find all weights on its own GPU: none go from one GPU to another yet. Raises PlacementError."""
    layout = config.actor.layout
    do = "the first version that moves weights between GPUs will lift this"
    if config.cluster.placement != "colocated":
        raise PlacementError(
            explain(
                "weights can't reach an engine on another GPU yet",
                where="cluster.placement",
                got=config.cluster.placement,
                expected="colocated",
                do=f"set it to colocated; {do}",
            )
        )
    if layout.tensor * layout.pipeline * layout.expert * layout.expert_tensor > 1:
        raise PlacementError(
            explain(
                "weights that are cut over GPUs can't reach an engine on one of them yet",
                where="actor.layout",
                got=f"tensor {layout.tensor}, pipeline {layout.pipeline}, expert {layout.expert}, expert_tensor {layout.expert_tensor}",
                expected="1 in all of them",
                do=f"use data-parallel ranks on GPUs; {do}",
            )
        )


def needs_critic(config: Config) -> bool:
    """True for the estimators that use a value function."""
    return needs_values(config.algorithm.advantage_estimator)


def load_actor(groups: Groups, config: Config, model: str, *, lr: float | None = None) -> None:
    """Give the actor's group a fresh actor (new optimizer) from a Hugging Face directory."""
    role = Role(head="lm", trainable=True, dtype=config.actor.dtype, longest=longest_sample(config))
    groups.actor.load("actor", model, role, optimizer_settings(config.actor.optim, lr), share=True).result()


def load_roles(groups: Groups, config: Config, model: str) -> None:
    """Load actor, reference and critic of PPO. ``model``: what the actor starts from, and the others unless the recipe names theirs."""
    load_actor(groups, config, model)
    calls = []
    if config.algorithm.kl.where != "none":
        role = Role(head="lm", trainable=False, dtype=config.actor.dtype, longest=longest_sample(config))
        calls.append((groups.reference or groups.actor).load("reference", config.reference or model, role))
    if groups.critic is not None:
        role = Role(
            head="value", trainable=True, dtype=config.critic.dtype, longest=None if config.critic.retokenize else longest_sample(config)
        )
        directory, settings = config.critic.model or model, optimizer_settings(config.critic.optim)
        text_of = config.model if config.critic.retokenize else None
        calls.append(groups.critic.load("critic", directory, role, settings, text_of=text_of))
    wait_all(*calls)


def longest_sample(config: Config) -> int:
    """Tokens of the longest prompt and response: the length that the engine is built for, too."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def optimizer_settings(optim: OptimConfig, lr: float | None = None) -> OptimizerSettings:
    """The engine's form of an optimizer section."""
    settings = OptimizerSettings(optim.lr, tuple(optim.betas), optim.eps, optim.weight_decay, optim.clip_grad, optim.distributed)
    return settings if lr is None else replace(settings, lr=lr)


def train_settings(name: str, part: ActorConfig | CriticConfig, config: Config, paths: RunPaths, gpus: float) -> GroupSettings:
    """How a group of Megatron ranks is placed and batches. ``gpus``: of each process."""
    layout = Layout(**{f: getattr(part.layout, f) for f in part.layout.__dataclass_fields__})
    cluster = config.cluster
    return GroupSettings(
        name=name,
        layout=layout,
        max_tokens_per_micro_batch={
            "actor": config.actor.max_tokens_per_micro_batch,
            "reference": config.actor.max_tokens_per_micro_batch,
            "critic": config.critic.max_tokens_per_micro_batch,
        },
        cpus_per_process=cluster.cpu_share_per_process,
        gpus_per_process=gpus,
        log_dir=str(paths.logs),
        start_deadline_s=cluster.start_deadline_s,
        call_deadline_s=cluster.call_deadline_s,
        save_deadline_s=cluster.save_deadline_s,
        seed=config.run.seed,
        plugins=config.plugins,
    )
