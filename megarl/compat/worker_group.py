"""``RayWorkerGroup``: one role's processes by themselves, outside a trainer."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import ray
from ray.util.placement_group import remove_placement_group

from megarl.cluster.calls import wait_all
from megarl.cluster.placement import check_capacity, cluster_has_gpus, reserve, start_cluster
from megarl.cluster.train_group import TrainGroup
from megarl.compat.checks import check_devices
from megarl.compat.groups import ActorRolloutGroup, CriticGroup, RefPolicyGroup
from megarl.compat.pools import ActorRolloutWorker, CriticWorker, RayClassWithInitArgs, RayResourcePool, RefPolicyWorker, Role
from megarl.compat.settings import MODEL, Roles, trainer_settings
from megarl.config.schema import Config
from megarl.controller.context import RunPaths
from megarl.controller.prepare import check_models
from megarl.controller.roles import optimizer_settings, train_settings
from megarl.errors import ConfigError, explain
from megarl.megatron import model

SpawnedGroup = ActorRolloutGroup | CriticGroup | RefPolicyGroup


class RayWorkerGroup:
    """A role and the processes that it will run in. Nothing is started before :meth:`spawn`.

    A group of its own computes on the batches of any trainer of the same cluster, whose sequences must fit into its model's positions; it
    has no generation engines.
    """

    def __init__(self, resource_pool: RayResourcePool, ray_cls_with_init: RayClassWithInitArgs, log_dir: str | Path | None = None):
        """``log_dir``: one file a process; None: a temporary directory."""
        self.resource_pool, self.role = resource_pool, ray_cls_with_init.role()
        self.log_dir = log_dir
        self._undo: ExitStack | None = None

    @property
    def world_size(self) -> int:
        """Processes that it has, or will have."""
        return self.resource_pool.world_size

    def spawn(self) -> SpawnedGroup:
        """Start the processes, load the model into them, and return the group with the role's methods.

        It uses the Ray cluster that this process has joined, or else starts one. A failure stops what was started.

        Raises:
            ConfigError: spawned twice, or a role without a model; ModelError, PlacementError: as at the start of a trainer.
        """
        if self._undo is not None:
            raise ConfigError(explain("a worker group is spawned once", where="RayWorkerGroup.spawn", do="make another RayWorkerGroup"))
        config = _config(self.role, self.resource_pool, Path(self.log_dir or "."))
        check_models(config)
        if self.log_dir is None:
            config = replace(config, run=replace(config.run, dir=tempfile.mkdtemp(prefix="megarl-")))
        with ExitStack() as undo:
            if not ray.is_initialized():
                undo.callback(start_cluster(None))
            check_devices([self.resource_pool])
            group = _start(self.role, config, undo)
            self._undo = undo.pop_all()
        return group

    def shutdown(self) -> None:
        """End the processes, and the Ray cluster if they were what started it."""
        if self._undo is not None:
            self._undo.close()


def _start(role: Role, config: Config, undo: ExitStack) -> SpawnedGroup:
    """The role's processes with its model. ``undo`` learns how to end them."""
    name, part = ("critic", config.critic) if isinstance(role, CriticWorker) else ("actor", config.actor)
    name = "reference" if isinstance(role, RefPolicyWorker) else name
    settings = train_settings(name, part, config, RunPaths(Path(config.run.dir)), 1.0 if cluster_has_gpus() else 0.0)
    slots = TrainGroup.slots(settings)
    check_capacity([slots])
    placement = reserve(slots, settings.start_deadline_s)
    undo.callback(remove_placement_group, placement)
    group = TrainGroup(settings, placement)
    undo.callback(group.stop)
    wait_all(group.start())
    trainable = name != "reference"
    loaded = model.Role(head="value" if name == "critic" else "lm", trainable=trainable, dtype=part.dtype)
    group.load(name, config.critic.model or config.model, loaded, optimizer_settings(part.optim) if trainable else None).result()
    if isinstance(role, ActorRolloutWorker):
        return ActorRolloutGroup(config, group)
    return CriticGroup(config, group) if isinstance(role, CriticWorker) else RefPolicyGroup(config, group)


def _config(role: Role, pool: RayResourcePool, directory: Path) -> Config:
    """The configuration of a trainer that has this role and no other."""
    if MODEL not in role.config:
        do = f"RayClassWithInitArgs({type(role).__name__}, config={{'{MODEL}': a Hugging Face directory}})"
        raise ConfigError(explain("a worker group without a model", where="RayWorkerGroup.spawn", got=dict(role.config), do=do))
    if "retokenize" in role.config:
        do = "make the critic in a RayPPOTrainer, which knows the actor's tokenizer"
        raise ConfigError(explain("a critic by itself has no actor to read", where="RayWorkerGroup.spawn", got="retokenize", do=do))
    other = {MODEL: role.config[MODEL]}
    is_critic = isinstance(role, CriticWorker)
    actor = other if is_critic else role.config
    roles = Roles(
        actor, role.config if is_critic else None, None, RayResourcePool([1]) if is_critic else pool, pool if is_critic else None, None
    )
    overrides = ["data.max_prompt_tokens=1", "rollout.max_response_tokens=1"]  # lengths are those of the batches that it will be given
    if not is_critic:
        overrides += ["algorithm.advantage_estimator=grpo", "rollout.responses_per_prompt=2"]
    return trainer_settings(roles, None, None, None, overrides, directory).config
