"""The loop by hand in one real cluster that the user started: numbers of the controller's own step, and what is refused on the way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.util.placement_group import placement_group_table

from megarl import (
    AdaptiveKLController,
    CriticWorker,
    RayClassWithInitArgs,
    RayPPOTrainer,
    RayResourcePool,
    RayWorkerGroup,
    apply_kl_penalty,
    compute_advantage,
)
from megarl.algo.kl import FixedKLController
from megarl.compat.batch import TrainerBatch
from megarl.controller.context import Context
from megarl.controller.metrics import StepMetrics
from megarl.controller.roles import load_roles
from megarl.controller.step import add_advantages, add_log_probs_and_values, draw_samples, ppo_step, score_samples
from megarl.errors import ConfigError, DataError, DivergedError, ModelError, PlacementError
from megarl.types import Ragged
from tests.compat.places import SMALL, trainer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

COEF = 0.05
CLOCK = ("timing", "perf/", "controller/", "training/global_step", "training/epoch")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of the user's. What Ray leaves in the environment is no other test's."""
    before = dict(os.environ)
    ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def by_hand(place: Path, cluster: None) -> Iterator[RayPPOTrainer]:
    optim = {"optim": {"lr": 1e-2}}
    model = {"model_name_or_path": place / "model"}
    changes = {"actor_rollout_config": model | optim | {"samples_per_mini_batch": 4}, "critic_config": model | optim}
    overrides = [*SMALL, "algorithm.gamma=0.99", "algorithm.lam=0.95", "data.val_prompts=8"]
    with trainer(place, **changes, val_dataset=place / "val.parquet", overrides=overrides) as made:
        made.init_worker_groups()
        yield made
    assert not living_placements(), "close gives every slot back"
    assert ray.is_initialized(), "the user's cluster is the user's"


def living_placements() -> list[str]:
    return sorted(i for i, facts in placement_group_table().items() if facts["state"] != "REMOVED")


def begin_anew(run: Context) -> None:
    """Step 0, with fresh models and optimizers, in the processes that are there."""
    load_roles(run.groups, run.config, run.config.model)
    run.version += 1
    run.step = 0
    run.cursor.load_state_dict(run.cursor.state_dict() | {"epoch": 0, "position": 0})


def scored(made: RayPPOTrainer) -> TrainerBatch:
    """Samples with all that rewards and advantages are computed from."""
    drawn = made.actor_rollout_wg.generate_sequences(next(iter(made.train_dataloader)))
    return drawn.union(made.ref_policy_wg.compute_ref_log_prob(drawn)).union(made.critic_wg.compute_values(drawn))


def one_step(made: RayPPOTrainer) -> tuple[TrainerBatch, dict[str, float], dict[str, float]]:
    batch = compute_advantage(apply_kl_penalty(scored(made), FixedKLController(COEF)))
    return batch, made.critic_wg.update_critic(batch), made.actor_rollout_wg.update_actor(batch)


def same(a: Ragged, b: Ragged) -> bool:
    return np.array_equal(a.values, b.values) and np.array_equal(a.offsets, b.offsets)


def test_two_steps_by_hand_are_two_steps_of_the_controller_bit_for_bit(by_hand: RayPPOTrainer) -> None:
    run = by_hand._started()
    begin_anew(run)
    steps = [one_step(by_hand) for _ in range(2)]
    columns = steps[1][0].to_local()
    assert steps[0][2]["kl_divergence"] == pytest.approx(0.0, abs=1e-6) and steps[1][2]["kl_divergence"] != 0.0
    assert steps[1][1]["loss"] > 0 and steps[1][2]["grad_norm"] > 0 and steps[1][0].scores.std() > 0

    begin_anew(run)
    run.kl = FixedKLController(COEF)
    for number, (batch, critic, actor) in enumerate(steps, start=1):
        expected = {k: v for k, v in ppo_step(run, number).items() if not k.startswith(CLOCK)}
        run.step = number
        found = dict(batch.metrics) | {f"critic/{k}": v for k, v in critic.items()} | {f"actor/{k}": v for k, v in actor.items()}
        assert {k: found[k] for k in expected} == expected
        assert {"actor/pg_loss", "critic/vf_loss", "critic/advantages/max", "actor/reward_kl_penalty"} <= set(expected)

    begin_anew(run)
    ppo_step(run, 1)
    m, rows = StepMetrics(), run.cursor.take(8)
    proto, reward = score_samples(run, draw_samples(run, rows, 2, m), 2, m)
    proto = add_advantages(run, add_log_probs_and_values(run, proto, m), reward, m)
    again = TrainerBatch(proto, run, 2, 8).to_local(*(name for name in columns if name != "sequences"))
    assert set(again) == set(columns) - {"sequences"}
    for name, column in again.items():
        assert same(column, columns[name]) if isinstance(column, Ragged) else np.array_equal(column, columns[name]), name
    for i in range(8):
        assert columns["sequences"][i].tolist() == [*columns["prompts"][i].tolist(), *columns["responses"][i].tolist()]
    run.step = 2


def test_the_penalty_takes_effect_in_either_order(by_hand: RayPPOTrainer) -> None:
    base = scored(by_hand)  # after updates: policy and reference differ
    before, after = AdaptiveKLController(init_kl=COEF, target=1e-4), AdaptiveKLController(init_kl=COEF, target=1e-4)
    plain = compute_advantage(batch=base, gamma=0.9, lam=0.8)
    late = apply_kl_penalty(batch=plain, kl_ctrl=after, kl_penalty="kl")
    early = compute_advantage(batch=apply_kl_penalty(batch=base, kl_ctrl=before), gamma=0.9, lam=0.8)
    names = ("token_rewards", "raw_advantages", "returns", "advantages")
    one, other, without = (b.to_local(*names) for b in (late, early, plain))
    for name in names:
        assert same(one[name], other[name]), name
        assert not same(one[name], without[name]), f"{name}: the penalty had no effect"
    assert late.penalty == early.penalty and late.penalty.coef == COEF and late.penalty.kl != 0.0
    assert (late.estimate.gamma, late.estimate.lam) == (0.9, 0.8)
    assert before.value == after.value != COEF, "the controller was told of the KL"
    for update in (by_hand.critic_wg.update_critic, by_hand.actor_rollout_wg.update_actor):
        for inert in (plain, plain.take([0, 1])):
            with pytest.raises(DataError, match="afterwards(.|\n)*train on what apply_kl_penalty returned"):
                update(inert)
    assert by_hand.critic_wg.update_critic(late)["loss"] >= 0 and by_hand.critic_wg.update_critic(early)["loss"] >= 0
    raw = compute_advantage(batch=base, gamma=0.9, lam=0.8, whiten=False).to_local("advantages", "raw_advantages")
    assert same(raw["advantages"], raw["raw_advantages"])
    assert not same(without["advantages"], without["raw_advantages"])
    others = [apply_kl_penalty(base, FixedKLController(COEF), name).penalty.kl for name in ("abs", "mse", "low_var_kl")]
    assert len({late.penalty.kl, *others}) == 4 and min(others) > 0


def test_a_penalty_that_would_do_nothing_is_refused(by_hand: RayPPOTrainer) -> None:
    base = scored(by_hand)
    kl = AdaptiveKLController()
    with pytest.raises(DataError, match="in the rewards already"):
        apply_kl_penalty(compute_advantage(apply_kl_penalty(base, FixedKLController(COEF))), kl)
    with pytest.raises(DataError, match=r"no column 'ref_log_probs'(.|\n)*ref_policy_wg.compute_ref_log_prob"):
        apply_kl_penalty(base.select(["prompts", "responses", "log_probs"]), kl)
    batch = compute_advantage(base)
    by_hand.critic_wg.update_critic(batch)
    for late in (batch, batch.take([0, 1, 2]), batch.select(["log_probs", "ref_log_probs", "advantages"])):
        with pytest.raises(DataError, match="too late for these advantages(.|\n)*critic trained(.|\n)*before update_critic"):
            apply_kl_penalty(late, kl)
    assert apply_kl_penalty(base, kl).penalty is not None, "new advantages may be computed from it"
    with pytest.raises(ConfigError, match="whole distributions"):
        apply_kl_penalty(base, kl, kl_penalty="full")
    with pytest.raises(ConfigError, match="gamma out of range"):
        compute_advantage(base, gamma=1.5)


def test_missing_columns_name_the_call_to_make(by_hand: RayPPOTrainer) -> None:
    base = scored(by_hand)
    run = by_hand._started()
    version = run.version
    theirs = compute_advantage(replace(base, run=replace(run)))
    for call in (
        by_hand.actor_rollout_wg.update_actor,
        by_hand.actor_rollout_wg.compute_log_prob,
        by_hand.critic_wg.update_critic,
        by_hand.critic_wg.compute_values,
        by_hand.ref_policy_wg.compute_ref_log_prob,
    ):
        with pytest.raises(DataError, match="samples of another trainer"):
            call(theirs)
    for call, columns, said in (
        (by_hand.actor_rollout_wg.update_actor, ["log_probs", "ref_log_probs"], "call compute_advantage"),
        (by_hand.critic_wg.update_critic, ["values"], "call compute_advantage"),
        (by_hand.critic_wg.compute_values, ["log_probs"], "actor_rollout_wg.generate_sequences"),
        (compute_advantage, ["prompts", "responses", "log_probs"], "critic_wg.compute_values"),
        (compute_advantage, ["values"], "actor_rollout_wg.compute_log_prob"),
    ):
        with pytest.raises(DataError, match=said):
            call(base.select(columns))
    without = compute_advantage(base.select(["prompts", "responses", "log_probs", "values", "last_values"]))
    with pytest.raises(DataError, match=r"kl_divergence(.|\n)*compute_ref_log_prob"):
        by_hand.actor_rollout_wg.update_actor(without)
    with pytest.raises(DataError, match="with_scores"):
        compute_advantage(replace(base, scores=None))
    with pytest.raises(DataError, match="trainer.train_dataloader"):
        by_hand.actor_rollout_wg.generate_sequences(base)
    assert by_hand._started().version == version, "a refused update changes nothing"


def test_batches_go_on_through_the_data(by_hand: RayPPOTrainer) -> None:
    loader = by_hand.train_dataloader
    rows = [next(iter(loader)).rows.tolist() for _ in range(3)]
    assert len({row for batch in rows for row in batch}) == 24 and len(loader) == 1024
    assert len(next(iter(loader))) == 8


def test_draws_join_into_one_update(by_hand: RayPPOTrainer) -> None:
    parts = [scored(by_hand), scored(by_hand)]
    batch = compute_advantage(TrainerBatch.concat(parts))
    assert len(batch) == 16 and batch.step == parts[1].step
    assert by_hand.actor_rollout_wg.update_actor(batch)["grad_norm"] > 0
    halves = batch.split(2)
    assert by_hand.critic_wg.update_critic(halves[0])["loss"] >= 0 and batch.estimate.trained == ["actor", "critic"]


def test_evaluation_and_export(by_hand: RayPPOTrainer, tmp_path: Path) -> None:
    measured = by_hand.evaluate()
    assert measured.prompts == 8 and 0 <= measured.reward <= 1
    out = by_hand.export_hf(tmp_path / "model")
    with pytest.raises(ConfigError, match="exists already"):
        by_hand.export_hf(tmp_path)
    assert (out / "config.json").is_file() and list(out.glob("*.safetensors")) and not (tmp_path / "model.writing").exists()


def test_groups_start_once(by_hand: RayPPOTrainer) -> None:
    with pytest.raises(ConfigError, match="called a second time"):
        by_hand.init_worker_groups()


def test_a_group_of_its_own_computes_on_a_trainers_batches(by_hand: RayPPOTrainer, place: Path, tmp_path: Path) -> None:
    base, before = scored(by_hand), len(living_placements())
    described = RayClassWithInitArgs(CriticWorker, config={"model_name_or_path": place / "model"})
    alone = RayWorkerGroup(resource_pool=RayResourcePool([1]), ray_cls_with_init=described, log_dir=tmp_path)
    group = alone.spawn()
    try:
        values = group.compute_values(base).to_local("values")["values"]
        assert group.world_size == 1 and not values.values.any(), "a fresh value head gives 0"
        with pytest.raises(ConfigError, match="spawned once"):
            alone.spawn()
    finally:
        alone.shutdown()
    assert len(living_placements()) == before


def test_pools_that_the_cluster_cannot_serve(place: Path, cluster: None) -> None:
    for pool, said in (
        (RayResourcePool([1], use_gpu=True), r"asks for GPUs(.|\n)*RayResourcePool\(\[1\], use_gpu=True\)"),
        (RayResourcePool([8]), "missing"),
    ):
        with trainer(place, actor_rollout_resource_pool=pool) as made, pytest.raises(PlacementError, match=said):
            made.init_worker_groups()


def test_a_failure_half_way_stops_what_was_started(place: Path, cluster: None, tmp_path: Path) -> None:
    """The model goes after the checks: every process is up when loading fails. Afterwards the same trainer starts, shares and goes on."""
    shutil.copytree(place / "model", tmp_path / "model")
    model = {"model_name_or_path": tmp_path / "model"}
    pool, before = RayResourcePool([1]), living_placements()
    roles = {
        "actor_rollout_config": model,
        "actor_rollout_resource_pool": pool,
        "ref_policy_config": model,
        "ref_policy_resource_pool": pool,
    }
    grpo = [*SMALL, "algorithm.advantage_estimator=grpo", "rollout.responses_per_prompt=2", "rollout.prompts_per_step=4"]
    changes = {**roles, "critic_config": None, "critic_resource_pool": None, "reward_fn": None, "overrides": grpo}
    with trainer(place, **changes) as made:
        (tmp_path / "model" / "model.safetensors").rename(tmp_path / "aside")
        with pytest.raises(ModelError):
            made.init_worker_groups()
        assert living_placements() == before
        (tmp_path / "aside").rename(tmp_path / "model" / "model.safetensors")
        made.init_worker_groups()
        drawn, actor = without_critic_and_reward(made), made.actor_rollout_wg
    for late in (
        drawn.to_local,
        lambda: compute_advantage(drawn),
        lambda: actor.update_actor(drawn),
        lambda: actor.compute_log_prob(drawn),
    ):
        with pytest.raises(DataError, match="closed, and their columns are gone"):
            late()
    with pytest.raises(ConfigError, match="the trainer is closed"):
        actor.generate_sequences(drawn)
    assert living_placements() == before


def without_critic_and_reward(made: RayPPOTrainer) -> TrainerBatch:
    with pytest.raises(ConfigError, match="has no critic(.|\n)*critic_resource_pool"):
        _ = made.critic_wg
    drawn = made.actor_rollout_wg.generate_sequences(next(iter(made.train_dataloader)))
    drawn = drawn.union(made.ref_policy_wg.compute_ref_log_prob(drawn))
    with pytest.raises(DataError, match="no scores(.|\n)*pass reward_fn"):
        compute_advantage(drawn)
    lengths = drawn.info.response_length
    batch = compute_advantage(drawn.with_scores(np.arange(len(drawn))))
    sums = [a.sum() for a in np.split(batch.to_local("advantages")["advantages"].values, np.cumsum(lengths)[:-1])]
    assert all(sums[i] / lengths[i] == pytest.approx(-sums[i + 1] / lengths[i + 1]) for i in range(0, len(drawn), 2)), (
        "of two, one is better"
    )
    assert made.actor_rollout_wg.update_actor(batch)["loss"] != 0.0
    with pytest.raises(DataError, match="reward_fn=None|val_dataset=None"):
        made.evaluate()
    with pytest.raises(DataError, match=r"apply_kl_penalty\)(.|\n)*2 samples of each prompt"):
        apply_kl_penalty(compute_advantage(drawn.with_scores(np.arange(len(drawn)))).take([0, 2]), AdaptiveKLController())
    halves = compute_advantage(drawn.with_scores(np.arange(len(drawn)))).take([0, 2])
    assert np.isfinite(made.actor_rollout_wg.update_actor(halves)["loss"]), "advantages of the whole may be split"
    return batch


def test_one_pool_for_all_shares_devices(place: Path, cluster: None) -> None:
    pool = RayResourcePool([1])
    pools = {f"{role}_resource_pool": pool for role in ("actor_rollout", "critic", "ref_policy")}
    with trainer(place, **pools) as made:
        made.init_worker_groups()
        groups = made._started().groups
        assert groups.critic is groups.actor and groups.reference is None
        for _ in range(2):
            batch, critic, actor = one_step(made)
        assert actor["grad_norm"] > 0 and np.isfinite(actor["kl_divergence"]) and critic["loss"] >= 0


def test_too_many_failed_rewards_stop_the_loop(place: Path, cluster: None, tmp_path: Path) -> None:
    file = tmp_path / "bad_reward.py"
    file.write_text("def score(data_source, solution_str, ground_truth, extra_info=None):\n    raise ValueError('broken')\n")
    pool = RayResourcePool([1])
    pools = {f"{role}_resource_pool": pool for role in ("actor_rollout", "critic", "ref_policy")}
    with trainer(place, **pools, reward_fn=f"{file}:score") as made:
        made.init_worker_groups()
        with pytest.raises(DivergedError, match="too many reward calls failed(.|\n)*broken"):
            made.actor_rollout_wg.generate_sequences(next(iter(made.train_dataloader)))
        assert made._started().step == 0
