"""Pools and roles are values; what is wrong with one is said when it is made."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.compat.kl_controller import KL_PENALTIES, AdaptiveKLController, estimator_of
from megarl.compat.pools import ActorRolloutWorker, CriticWorker, RayClassWithInitArgs, RayResourcePool
from megarl.compat.worker_group import RayWorkerGroup
from megarl.errors import ConfigError


def test_a_pool_counts_its_processes() -> None:
    assert RayResourcePool(process_on_nodes=[4, 2], use_gpu=True).world_size == 6
    assert RayResourcePool([2]) != RayResourcePool([2]), "two pools are two places"


@pytest.mark.parametrize("counts", [[], [0], [-1], [True], ["4"], 4, "4", None])
def test_a_pool_without_processes_is_refused(counts: Any) -> None:
    with pytest.raises(ConfigError, match=r"without processes(.|\n)*\[4\]"):
        RayResourcePool(counts)


@pytest.mark.parametrize("use_gpu", ["yes", 1, 0])
def test_a_pool_has_gpus_or_not(use_gpu: Any) -> None:
    with pytest.raises(ConfigError, match=r"use_gpu(.|\n)*True, False or None"):
        RayResourcePool([1], use_gpu=use_gpu)


def test_roles_take_their_arguments_late() -> None:
    described = RayClassWithInitArgs(ActorRolloutWorker, config={"model_name_or_path": "m"})
    assert described.role() == ActorRolloutWorker({"model_name_or_path": "m"})
    with pytest.raises(ConfigError, match="no role(.|\n)*got: +dict"):
        RayClassWithInitArgs(dict)
    with pytest.raises(ConfigError, match="one argument, config"):
        RayClassWithInitArgs(cls=CriticWorker, model="m").role()


def test_a_group_without_a_model_is_refused_when_it_is_spawned() -> None:
    group = RayWorkerGroup(resource_pool=RayResourcePool([2]), ray_cls_with_init=RayClassWithInitArgs(cls=CriticWorker))
    assert group.world_size == 2
    with pytest.raises(ConfigError, match=r"without a model(.|\n)*RayClassWithInitArgs\(CriticWorker, config="):
        group.spawn()


def test_names_of_kl_penalties() -> None:
    assert {estimator_of(name) for name in KL_PENALTIES} == {"k1", "k2", "k3", "abs"}
    assert estimator_of("kl") == "k1" and estimator_of("low_var_kl") == "k3"
    with pytest.raises(ConfigError, match="whole distributions"):
        estimator_of("full")
    with pytest.raises(ConfigError, match="no such KL penalty(.|\n)*low_var_kl"):
        estimator_of("k4")


def test_the_controller_follows_the_paper() -> None:
    controller = AdaptiveKLController()
    assert (controller.value, controller.target, controller.horizon) == (0.01, 0.1, 10000)
    controller.update(current_kl=10.0, n_steps=500)  # the error is clipped to 0.2
    assert controller.value == pytest.approx(0.01 * (1 + 0.2 * 500 / 10000))
