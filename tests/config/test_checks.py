"""What a configuration can't be, and the arithmetic that is printed before anything starts."""

from pathlib import Path

import pytest

from megarl.config.checks import CHOICES, check_config
from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.observe.sinks import PACKAGES

DEMO = "recipes/demo-cpu.yaml"
SIZES = ("rollout.prompts_per_step=128", "actor.samples_per_mini_batch=64", "critic.samples_per_mini_batch=64")


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    monkeypatch.chdir(pytestconfig.rootpath)


def demo(*overrides: str) -> Config:
    """The demo with sizes of this test's own."""
    return load_config(DEMO, [*SIZES, *overrides])


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_config(demo(*overrides))
    return str(error.value)


def test_every_recipe_passes() -> None:
    for recipe in Path("recipes").glob("*.yaml"):
        assert check_config(load_config(recipe)), recipe


def test_the_arithmetic_is_printed() -> None:
    assert check_config(demo()) == [
        "actor: 128 prompts x 1 response = 128 samples = 2 optimizer steps of 64",
        "critic: 128 prompts x 1 response = 128 samples = 2 optimizer steps of 64",
    ]


def test_ranks_epochs_and_responses_show() -> None:
    actor = ("actor.layout.data=2", "actor.epochs_per_step=3")
    lines = check_config(demo(*actor, "rollout.prompts_per_step=32", "rollout.responses_per_prompt=4"))
    assert lines[0] == (
        "actor: 32 prompts x 4 responses = 128 samples = 2 optimizer steps of 64 (32 on each of 2 data-parallel ranks) x 3 epochs"
    )


def test_what_does_not_divide_names_the_nearest_that_do() -> None:
    message = refused("actor.samples_per_mini_batch=50")
    assert "128 / 50 = 2.56 mini-batches" in message
    assert "samples_per_mini_batch to 32 or 64" in message and "rollout.prompts_per_step to 100 or 150" in message
    assert "critic's" in refused("critic.samples_per_mini_batch=256")


def test_suggestions_hold() -> None:
    for override in ("actor.samples_per_mini_batch=32", "actor.samples_per_mini_batch=64"):
        check_config(demo(override))
    for prompts in (100, 150):
        check_config(demo("actor.samples_per_mini_batch=50", "critic.samples_per_mini_batch=50", f"rollout.prompts_per_step={prompts}"))


def test_mini_batches_divide_over_data_parallel_ranks() -> None:
    message = refused("actor.layout.data=3")
    assert "64 / 3 data-parallel ranks = 21.3333 samples a rank" in message and "a multiple of 3" in message


COLOCATED = "cluster.placement=colocated critic.layout.pipeline=1 critic.layout.tensor=2 rollout.engines=2"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.truncation=rigth", "did you mean right?"),
        ("algorithm.advantage_estimator=gea", "gae | grpo"),
        ("actor.policy_loss=ppo", "ppo_clip"),
        ("rollout.dtype=fp16", "float32 | bfloat16"),
        ("actor.layout.sequence_parallel=true actor.layout.tensor=1", "sequence parallelism without tensor"),
        ("actor.layout.virtual_pipeline=2", "actor.layout.virtual_pipeline"),
        ("critic.layout.expert=2 critic.layout.data=3", "can't be spread"),
        ("critic.layout.expert_tensor=2", "can't be spread"),
        ("actor.layout.tensor=0", "1 or more"),
        ("run.total_steps=0", "1 or more"),
        ("rollout.temperature=0", "0.01 or more: 0 is greedy"),
        ("rollout.temperature=0.009", "0.01 or more"),
        ("rollout.top_k=1", "1 is greedy"),
        ("rollout.ignore_eos=true rollout.stop_token_ids=[3]", "stop_token_ids: [3]"),
        ("rollout.stop_tokens=[a,b,a]", "a stop token twice"),
        ("rollout.top_p=1.5", "at most 1"),
        ("rollout.top_k=0", "-1 (all tokens)"),
        ("actor.clip_ratio_dual=0.5", "0 (off) or more than 1"),
        ("actor.optim.betas=[0.9,1]", "below 1"),
        ("algorithm.gamma=1.1", "from 0 to 1"),
        ("algorithm.advantage_estimator=grpo", "2 or more"),
        ("algorithm.advantage_estimator=grpo rollout.responses_per_prompt=4 algorithm.critic_warmup_steps=1", "no critic"),
        ("actor.max_tokens_per_micro_batch=23", "at least 24"),
        ("warm_start.train_files=[]", "without data"),
        ("data.val_files=[]", "without held-out data"),
        ("data.val_files=[] warm_start.enabled=false", "run.eval_every_steps"),
        ("warm_start.stop_reward_min=0.5", "empty stopping range"),
        ("warm_start.eval_every_steps=3 warm_start.max_steps=14", "at least 15 = 5 x 3"),
        ("cluster.cpu_share_per_process=0", "more than 0"),
        ("cluster.placement=colocate", "did you mean colocated?"),
        ("cluster.placement=colocated", "cut as the actor is"),
        (COLOCATED + " rollout.tensor_parallel=2", "not supported yet"),
        (COLOCATED + " rollout.engines=1", "set it to 2, or set cluster.placement to separate"),
        ("run.save_every_steps=-2", "-1 or more"),
        ("run.seed=4294967296", "from 0 to 4294967295"),
        ("run.seed=-1", "from 0 to"),
        ("run.sinks=[wandb,foo]", "tensorboard | wandb"),
        ("run.sinks=[tensorbord]", "did you mean tensorboard?"),
        ("actor.optim.schedule=cosin", "did you mean cosine?"),
        ("actor.optim.schedule=cosine", "actor.optim.schedule_steps"),
        ("critic.optim.schedule=linear critic.optim.lr_warmup_steps=9 critic.optim.schedule_steps=9", "more than 9"),
        ("actor.optim.schedule=linear actor.optim.schedule_steps=75 actor.optim.lr_min=1", "less than"),
        ("actor.optim.lr_min=1e-9", "nowhere to fall"),
        ("rollout.kv_cache_mib=-1", "0 or more"),
        ("algorithm.critic_warmup_steps=75 run.total_steps=75", "less than 75 = run.total_steps"),
        ("algorithm.kl.coef=0", "stays 0"),
        ("algorithm.kl.horizon=25", "0.2 x 128 samples a step / 25 = 1.024"),
    ],
)
def test_refusals(override: str, says: str) -> None:
    assert says in refused(*override.split(" "))


@pytest.mark.parametrize(
    "override",
    [
        "warm_start.eval_every_steps=3 warm_start.max_steps=15",
        "algorithm.critic_warmup_steps=74 run.total_steps=75",
        "algorithm.kl.coef=0 algorithm.kl.controller=fixed",
        "algorithm.kl.coef=0 algorithm.kl.where=none",
        "algorithm.kl.horizon=26",
        "algorithm.kl.horizon=25 algorithm.kl.controller=fixed",
        COLOCATED,
        "rollout.temperature=0.01",
        "rollout.stop_token_ids=[0,3] rollout.stop_tokens=[a,b]",
        "critic.optim.schedule=linear critic.optim.lr_warmup_steps=9 critic.optim.schedule_steps=10",
        "run.save_every_steps=-1",
        "run.seed=4294967295",
        "run.sinks=[wandb,tensorboard]",
    ],
)
def test_what_is_just_inside_passes(override: str) -> None:
    assert len(check_config(demo(*override.split(" ")))) == 2


def test_a_plugin_may_bring_an_estimator() -> None:
    assert len(check_config(demo("algorithm.advantage_estimator=mine", "plugins=[my.module]"))) == 1


def test_a_name_near_a_built_in_one_is_pointed_out_beside_plugins() -> None:
    lines = check_config(demo("algorithm.advantage_estimator=gea", "plugins=[my.module]"))
    assert [line for line in lines if line.startswith("warning: ")] == [lines[-1]]
    assert "gea is left to the plugins" in lines[-1] and "the built-in gae" in lines[-1]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.top_p=0.9", "top_p 0.9"),
        ("rollout.top_k=50", "top_k 50"),
        ("algorithm.kl.where=none", "kl.coef has no effect"),
        ("algorithm.advantage_estimator=grpo rollout.responses_per_prompt=4 critic.model=m", "critic.model has no effect"),
    ],
)
def test_warnings(override: str, says: str) -> None:
    warnings = [line for line in check_config(demo(*override.split(" "))) if line.startswith("warning: ")]
    assert len(warnings) == 1 and says in warnings[0]


def test_grpo_says_nothing_of_a_critic() -> None:
    lines = check_config(demo("algorithm.advantage_estimator=grpo", "rollout.responses_per_prompt=4", "critic.samples_per_mini_batch=7"))
    assert [line.partition(":")[0] for line in lines] == ["actor"]


def test_the_sinks_are_those_that_there_are() -> None:
    assert set(CHOICES["run.sinks"]) == set(PACKAGES)
