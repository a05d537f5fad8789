"""From the trainer's arguments to an ordinary frozen configuration, checked as a recipe's is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import lcm, prod
from pathlib import Path
from typing import Any

from megarl.compat.pools import RayResourcePool
from megarl.compat.sources import data_keys, reward_keys
from megarl.config.checks import check_config
from megarl.config.load import config_from_tree, nearest
from megarl.config.placement_checks import check_layout
from megarl.config.schema import Config, LayoutConfig
from megarl.errors import ConfigError, explain
from megarl.types import Layout

MODEL = "model_name_or_path"
_LEAST_PROMPTS = 8  # of a step, where the user names no number
_OPEN_END = 1_000_000  # run.total_steps: by hand nobody knows
# Keys of what `megarl train` does around its steps; in a loop by hand they would do nothing.
_OF_RUNS = (
    *("warm_start.", "run.total_steps", "run.save_every_steps", "run.keep_checkpoints", "run.eval_every_steps", "run.export_hf"),
    *("run.sinks", "run.wandb_project", "algorithm.critic_warmup_steps", "algorithm.whiten_advantages"),
    *("algorithm.kl.coef", "algorithm.kl.controller", "algorithm.kl.target", "algorithm.kl.horizon", "algorithm.kl.estimator"),
)


@dataclass(frozen=True)
class Roles:
    """One configuration and one pool a role, as the trainer was given them; None: the role isn't there."""

    actor: Mapping[str, Any]
    critic: Mapping[str, Any] | None
    reference: Mapping[str, Any] | None
    actor_pool: RayResourcePool
    critic_pool: RayResourcePool | None
    reference_pool: RayResourcePool | None

    @property
    def colocated(self) -> bool:
        """Whether actor, critic and engines share devices."""
        return self.critic_pool is self.actor_pool

    @property
    def pools(self) -> list[RayResourcePool]:
        return [p for p in (self.actor_pool, self.critic_pool, self.reference_pool) if p is not None]


@dataclass(frozen=True)
class TrainerSettings:
    """What the trainer runs."""

    config: Config
    reference_layout: LayoutConfig | None  # of processes of its own; None: the reference lives in the actor's, or there is none
    notes: tuple[str, ...]  # batch arithmetic and warnings


def trainer_settings(
    roles: Roles, train_dataset: Any, val_dataset: Any, reward_fn: Any, overrides: Sequence[str], run_dir: Path
) -> TrainerSettings:
    """The configuration of a trainer. Raises ConfigError for the first thing that can't be run as it was asked for."""
    _refuse_keys_of_runs(overrides)
    check_pools(roles)
    tree = role_keys(roles)
    data, longest = data_keys(train_dataset, val_dataset)
    tree["rollout"] = {"max_response_tokens": longest} | tree["rollout"]
    tree |= {"data": data, "reward": reward_keys(reward_fn), "run": {"dir": str(run_dir), "total_steps": _OPEN_END}}
    if roles.colocated:
        tree["cluster"] = {"placement": "colocated"}
        tree["rollout"] = {"engines": roles.actor_pool.world_size} | tree["rollout"]
    kl = {"controller": "fixed"} if roles.reference is not None else {"where": "none", "coef": 0.0}
    tree["algorithm"] = {"kl": kl}
    config = config_from_tree(tree, ORIGINS, overrides)
    _check_ranks("actor", config.actor.layout, roles.actor_pool)
    if roles.critic_pool:
        _check_ranks("critic", config.critic.layout, roles.critic_pool)
    own = _reference_layout(roles, tree)
    return TrainerSettings(config, own, tuple(check_config(config)))


ORIGINS = {
    "model": "actor_rollout_config",
    "actor": "actor_rollout_config",
    "rollout": "actor_rollout_config['rollout']",
    "critic": "critic_config",
    "reference": "ref_policy_config",
    "data": "train_dataset",
    "reward": "reward_fn",
    "run": "run_dir",
}


def role_keys(roles: Roles) -> dict[str, Any]:
    """The keys ``model``, ``actor``, ``rollout``, ``critic`` and ``reference`` of a configuration, with sizes for what was left open."""
    actor, model = _split(roles.actor, "actor_rollout_config")
    critic, critic_model = _split(roles.critic or {}, "critic_config", required=False)
    rollout = _mapping(actor.pop("rollout", {}), "actor_rollout_config['rollout']")
    actor["layout"] = fill_layout(actor.get("layout", {}), roles.actor_pool, "actor_rollout_config['layout']")
    if roles.critic_pool:
        given = critic.get("layout", actor["layout"] if roles.colocated else {})
        critic["layout"] = fill_layout(given, roles.critic_pool, "critic_config['layout']")
    _fill_batch_sizes(actor, critic, rollout)
    tree: dict[str, Any] = {"model": model, "actor": actor, "rollout": rollout, "critic": critic}
    if critic_model is not None:
        tree["critic"]["model"] = critic_model
    if roles.reference is not None:
        own, reference = _split(roles.reference, "ref_policy_config", required=False)
        tree["reference"] = reference
        _refuse_reference_keys(own, shared=roles.reference_pool is roles.actor_pool)
    return tree


def fill_layout(given: Any, pool: RayResourcePool, where: str) -> dict[str, Any]:
    """The layout with as many data-parallel replicas as the pool has room for, where it names no number. Raises ConfigError."""
    layout = _mapping(given, where)
    sizes = [layout.get(name, 1) for name in ("tensor", "pipeline", "context")]
    if "data" in layout or not all(isinstance(n, int) and n > 0 for n in sizes):
        return layout  # compared with the pool once its types are known
    replicas, left = divmod(pool.world_size, prod(sizes))
    if left or not replicas:
        got = f"{' x '.join(str(n) for n in sizes)} = {prod(sizes)} ranks a replica, {pool.world_size} processes"
        do = "change the layout, or the pool's process_on_nodes"
        raise ConfigError(explain("a layout that doesn't fill its pool", where=where, got=got, expected="whole replicas", do=do))
    return layout | {"data": replicas}


def check_pools(roles: Roles) -> None:
    """Every role has a pool, and shares it only with whom it can. Raises ConfigError."""
    if roles.actor_pool is None:
        do = "pass RayResourcePool(process_on_nodes=[1])"
        raise ConfigError(explain("the actor has no pool", where="actor_rollout_resource_pool", got="None", do=do))
    for name, config, pool in (
        ("critic", roles.critic, roles.critic_pool),
        ("ref_policy", roles.reference, roles.reference_pool),
    ):
        if (config is None) != (pool is None):
            missing = f"{name}_resource_pool" if pool is None else f"{name}_config"
            do = f"pass {missing}, or leave both out"
            raise ConfigError(explain("a role has a configuration and a pool, or neither", where=missing, got="None", do=do))
    if roles.reference_pool is not None and roles.reference_pool is roles.critic_pool and not roles.colocated:
        do = "give the reference a RayResourcePool of its own, or the actor's"
        raise ConfigError(explain("critic and reference can't share a pool", where="ref_policy_resource_pool", got="the critic's", do=do))
    for pool in roles.pools:
        if not isinstance(pool, RayResourcePool):
            raise ConfigError(explain("a resource pool of another kind", got=repr(pool), expected="a RayResourcePool"))


def _reference_layout(roles: Roles, tree: dict[str, Any]) -> LayoutConfig | None:
    if roles.reference is None or roles.reference_pool is None or roles.reference_pool is roles.actor_pool:
        return None
    where = "ref_policy_config['layout']"
    given = fill_layout(roles.reference.get("layout", {}), roles.reference_pool, where)
    layout = config_from_tree(tree | {"actor": tree["actor"] | {"layout": given}}, ORIGINS | {"actor": where}).actor.layout
    check_layout(layout, where)
    _check_ranks("ref_policy", layout, roles.reference_pool)
    return layout


def _check_ranks(role: str, layout: LayoutConfig, pool: RayResourcePool) -> None:
    ranks = Layout(**asdict(layout)).world_size
    if ranks != pool.world_size:
        do = "change the layout, or the pool's process_on_nodes"
        raise ConfigError(explain(f"{role}: a layout of another size than its pool", got=f"{ranks} ranks", expected=pool.world_size, do=do))


def _fill_batch_sizes(actor: dict[str, Any], critic: dict[str, Any], rollout: dict[str, Any]) -> None:
    """A step draws at least eight prompts, a multiple of the replicas, and is one optimizer step, unless the user says otherwise."""
    replicas = [part.get("layout", {}).get("data", 1) for part in (actor, critic)]
    unit = lcm(*(n for n in replicas if isinstance(n, int) and n > 0))
    prompts = rollout.setdefault("prompts_per_step", -(-_LEAST_PROMPTS // unit) * unit)
    responses = rollout.get("responses_per_prompt", 1)
    if isinstance(prompts, int) and isinstance(responses, int):
        actor.setdefault("samples_per_mini_batch", prompts * responses)
        critic.setdefault("samples_per_mini_batch", prompts * responses)


def _split(config: Mapping[str, Any], where: str, *, required: bool = True) -> tuple[dict[str, Any], str | None]:
    """A role's own keys, and its model."""
    keys = _mapping(config, where)
    model = keys.pop(MODEL, None)
    if model is None and required:
        do = f"pass {where}={{'{MODEL}': a Hugging Face directory}}"
        raise ConfigError(explain("no model", where=f"{where}['{MODEL}']", got=sorted(keys), do=do))
    return keys, model if model is None else str(model)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(explain("not a mapping of keys", where=where, got=repr(value), expected="as in {'optim': {'lr': 1e-6}}"))
    return {key: _plain(item) for key, item in value.items()}


def _plain(value: Any) -> Any:
    """Mappings, tuples and paths as YAML would have them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _refuse_reference_keys(own: Mapping[str, Any], *, shared: bool) -> None:
    known = () if shared else ("layout",)
    for key in own:
        if key not in known:
            why = "shares the actor's processes" if shared and key == "layout" else "is frozen, and computes as the actor does"
            near = nearest(key, [MODEL, *known])
            do = f"did you mean {near}?" if near else "set it in actor_rollout_config"
            expected = ", ".join([MODEL, *known])
            raise ConfigError(explain(f"the reference {why}", where="ref_policy_config", got=key, expected=expected, do=do))


def _refuse_keys_of_runs(overrides: Sequence[str]) -> None:
    if isinstance(overrides, str):
        raise ConfigError(explain("overrides are a list", where="overrides", got=repr(overrides), expected=f"[{overrides!r}]"))
    for override in overrides:
        key = override.partition("=")[0]
        if key.startswith(_OF_RUNS):
            do = "run it as a recipe by `megarl train`, or do it by hand in your loop"
            raise ConfigError(explain(f"{key} has no effect in a loop by hand", where="overrides", got=override, do=do))


def with_reference_layout(config: Config, layout: LayoutConfig) -> Config:
    """The configuration as the reference's own processes see it, without a critic: for the checks that the actor's model goes through."""
    return replace(
        config,
        model=config.reference or config.model,
        reference=None,
        actor=replace(config.actor, layout=layout),
        algorithm=replace(config.algorithm, advantage_estimator="grpo"),
    )
