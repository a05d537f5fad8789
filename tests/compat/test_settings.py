"""From arguments to a configuration: what is filled in, and what is refused and how. Nothing is read or started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.compat.pools import RayResourcePool
from megarl.compat.settings import Roles, TrainerSettings, fill_layout, trainer_settings
from megarl.compat.sources import reward_keys
from megarl.errors import ConfigError, DataError
from tests.compat.easy_reward import compute_score

MODEL = {"model_name_or_path": "models/a"}


def settings(**changes: Any) -> TrainerSettings:
    """Of a trainer with the tutorial's pools: 4, 2 and 2 processes."""
    roles = {
        "actor": MODEL,
        "critic": {"model_name_or_path": Path("models/c")},
        "reference": MODEL,
        "actor_pool": RayResourcePool([4]),
        "critic_pool": RayResourcePool([2]),
        "reference_pool": RayResourcePool([2]),
    }
    roles |= {name: changes.pop(name) for name in tuple(changes) if name in roles}
    others = {"train_dataset": "a.parquet", "val_dataset": None, "reward_fn": "r.py", "overrides": (), "run_dir": Path("/run")} | changes
    return trainer_settings(Roles(**roles), **others)


def refused(kind: type[Exception] = ConfigError, **changes: Any) -> str:
    with pytest.raises(kind) as error:
        settings(**changes)
    return str(error.value)


def test_everything_but_the_models_has_a_default() -> None:
    found = settings()
    config = found.config
    assert (config.model, config.reference, config.critic.model) == ("models/a", "models/a", "models/c")
    assert (config.actor.layout.data, config.critic.layout.data, found.reference_layout.data) == (4, 2, 2)
    assert config.rollout.prompts_per_step == 8 and config.actor.samples_per_mini_batch == config.critic.samples_per_mini_batch == 8
    assert config.data.train_files == ("a.parquet",) and config.run.dir == "/run" and config.reward.path == "r.py"
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (512, 256)
    assert config.cluster.placement == "separate" and config.algorithm.kl.where == "reward"
    assert found.notes[0].startswith("actor: 8 prompts x 1 response = 8 samples = 1 optimizer step of 8 (2 on each of 4")


def test_prompts_divide_over_the_replicas_of_both() -> None:
    config = settings(actor_pool=RayResourcePool([3]), critic_pool=RayResourcePool([5])).config
    assert config.rollout.prompts_per_step == 15


def test_keys_of_roles_and_overrides_arrive() -> None:
    actor = MODEL | {"optim": {"lr": 1e-4, "betas": (0.9, 0.99)}, "layout": {"tensor": 2}, "rollout": {"prompts_per_step": 16}}
    config = settings(actor=actor, critic=MODEL | {"value_clip": 0.5}, overrides=["run.seed=3", "actor.optim.lr=0.001"]).config
    assert config.actor.optim.lr == 0.001 and config.actor.optim.betas == (0.9, 0.99)
    assert (config.actor.layout.tensor, config.actor.layout.data) == (2, 2)
    assert config.rollout.prompts_per_step == config.actor.samples_per_mini_batch == 16
    assert config.critic.value_clip == 0.5 and config.run.seed == 3


def test_one_pool_object_shares_processes_and_devices() -> None:
    pool = RayResourcePool([2])
    shared = settings(actor=MODEL | {"layout": {"tensor": 2}}, actor_pool=pool, critic_pool=pool, reference_pool=pool)
    assert shared.config.cluster.placement == "colocated" and shared.config.rollout.engines == 2
    assert shared.config.critic.layout == shared.config.actor.layout and shared.reference_layout is None
    assert settings(reference_pool=(own := RayResourcePool([4])), actor_pool=own).reference_layout is None
    assert "can't share a pool" in refused(critic_pool=pool, reference_pool=pool)


def test_without_a_reference_there_is_no_kl() -> None:
    kl = settings(reference=None, reference_pool=None).config.algorithm.kl
    assert (kl.where, kl.coef) == ("none", 0.0)


def test_a_role_has_both_a_configuration_and_a_pool() -> None:
    assert "pass ref_policy_resource_pool" in refused(reference_pool=None)
    assert "pass critic_config" in refused(critic=None)
    assert "another kind" in refused(actor_pool=4)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"actor": {}}, r"no model \(in actor_rollout_config\['model_name_or_path'\]\)"),
        ({"actor": MODEL | {"optm": {}}}, r"unknown key actor.optm \(in actor_rollout_config\)\n.*did you mean actor.optim"),
        ({"actor": MODEL | {"rollout": {"temprature": 1}}}, r"rollout.temprature \(in actor_rollout_config\['rollout'\]\)"),
        ({"critic": {"value_clip": "x"}}, r"critic.value_clip has the wrong type \(in critic_config\)"),
        ({"critic": MODEL | {"layout": 2}}, r"not a mapping of keys \(in critic_config\['layout'\]\)"),
        ({"reference": MODEL | {"layuot": {}}}, "did you mean layout"),
        ({"reference": MODEL | {"optim": {}}}, "is frozen(.|\n)*set it in actor_rollout_config"),
        ({"reference": MODEL | {"layout": {"data": 3}}}, "ref_policy: a layout of another size(.|\n)*got: +3(.|\n)*expected: 2"),
        ({"actor": MODEL | {"layout": {"tensor": 3}}}, "doesn't fill its pool(.|\n)*3 ranks a replica, 4 processes"),
        ({"actor": MODEL | {"layout": {"tensor": 2, "data": 1}}}, "actor: a layout of another size(.|\n)*2 ranks(.|\n)*4"),
        ({"overrides": ["critic.layout.data=1"]}, "critic: a layout of another size"),
        ({"overrides": ["run.total_steps=3"]}, "no effect in a loop by hand"),
        ({"overrides": ["warm_start.enabled=true"]}, "no effect in a loop by hand"),
        ({"overrides": ["algorithm.kl.coef=0.1"]}, "no effect in a loop by hand"),
        ({"overrides": "run.seed=1"}, r"expected: \['run.seed=1'\]"),
        ({"actor": MODEL | {"optim": object()}}, "actor_rollout_config"),
    ],
)
def test_what_cannot_be_run_as_asked_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(**changes)


def test_layouts_fill_their_pools() -> None:
    assert fill_layout({"tensor": 2, "pipeline": 2}, RayResourcePool([4, 4]), "x") == {"tensor": 2, "pipeline": 2, "data": 2}
    assert fill_layout({"data": 7}, RayResourcePool([4]), "x") == {"data": 7}, "compared later, when its type is known"


def sample(tokens: list[int]) -> dict[str, Any]:
    return {"input_ids": tokens, "prompt": "p", "data_source": "s", "ground_truth": "t"}


def test_datasets_are_files_or_samples() -> None:
    config = settings(train_dataset=[sample([1, 2, 3]), sample([1])]).config
    assert config.data.train_files == () and config.data.max_prompt_tokens == 3
    assert settings(train_dataset=["a.parquet", Path("b.parquet")]).config.data.train_files == ("a.parquet", "b.parquet")
    assert "another kind" in refused(train_dataset=3)
    assert "of different kinds" in refused(val_dataset=[sample([1])])
    assert "without samples" in refused(DataError, train_dataset=[])
    assert "a dict with input_ids" in refused(DataError, train_dataset=[{"prompt": "x"}])


def test_forms_of_a_reward_function() -> None:
    assert reward_keys("a/b.py") == {"path": "a/b.py"}
    assert reward_keys("a/b.py:score") == {"path": "a/b.py", "name": "score"}
    here = reward_keys(compute_score)
    assert here["name"] == "compute_score" and here["path"].endswith("easy_reward.py")
    assert reward_keys(None)["path"].endswith("unscored.py")

    def inner() -> float:
        return 0.0

    for function in (inner, lambda: 0.0, len, 3):
        with pytest.raises(ConfigError, match="can't import(.|\n)*file of its own"):
            reward_keys(function)
    inner.__module__, inner.__qualname__ = "__main__", "inner"
    with pytest.raises(ConfigError, match="__main__.inner"):
        reward_keys(inner)


def test_the_actor_has_a_pool() -> None:
    assert "actor_rollout_resource_pool" in refused(actor_pool=None)
