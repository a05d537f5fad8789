"""Recipes load as written, and every mistake is named where it stands."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.config.load import load_config, to_yaml
from megarl.config.schema import Config, LayoutConfig
from megarl.errors import EXIT_USER, ConfigError

MINIMAL = """\
model: m
run: {dir: r, total_steps: 3}
data:
  train_files: [a.parquet]
  max_prompt_tokens: 8
actor:
  samples_per_mini_batch: 4
critic: {samples_per_mini_batch: 4}
rollout: {prompts_per_step: 8, max_response_tokens: 8}
reward: {path: reward.py}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    assert error.value.exit_code == EXIT_USER
    return str(error.value)


def test_values_and_defaults_arrive_frozen(recipe: Path) -> None:
    config = load_config(recipe, ["actor.optim.lr=1e-4", "actor.layout={tensor: 2, sequence_parallel: true}", "plugins=[x.y]"])
    assert config.actor.optim.lr == 1e-4  # plain PyYAML reads 1e-4 as a string
    assert config.actor.layout == LayoutConfig(tensor=2, sequence_parallel=True)
    assert config.plugins == ("x.y",) and config.data.train_files == ("a.parquet",)
    assert config.critic.optim.lr == 1e-5 and config.reference is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = "other"  # type: ignore[misc]


def test_an_integer_serves_as_a_float_and_becomes_one(recipe: Path) -> None:
    value = load_config(recipe, ["algorithm.gamma=1"]).algorithm.gamma
    assert value == 1.0 and type(value) is float


def test_extends_merges_mappings_and_replaces_lists(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(MINIMAL)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "middle.yaml").write_text("extends: ../base.yaml\nrun: {total_steps: 5, name: middle}\n")
    top = tmp_path / "sub" / "top.yaml"
    top.write_text("extends: middle.yaml\nrun: {name: top}\ndata: {train_files: [b, c]}\n")
    config = load_config(top)
    assert (config.run.dir, config.run.total_steps, config.run.name) == ("r", 5, "top")
    assert config.data.train_files == ("b", "c") and config.data.max_prompt_tokens == 8
    assert load_config(top, ["run.name=mine"]).run.name == "mine"


def test_a_circle_of_extends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("\nextends: a.yaml\n")
    message = refused(tmp_path / "a.yaml")
    assert "circle" in message and "b.yaml:2" in message


def test_unknown_key_names_line_and_nearest(recipe: Path) -> None:
    recipe.write_text(MINIMAL + "algorithm:\n  kl:\n    coeff: 0.1\n")
    message = refused(recipe)
    assert "unknown key algorithm.kl.coeff" in message and f"{recipe}:13" in message and "did you mean algorithm.kl.coef?" in message


def test_unknown_key_of_an_override_names_the_override(recipe: Path) -> None:
    message = refused(recipe, "actor.lr=1")
    assert "override 'actor.lr=1'" in message and "did you mean actor.optim.lr?" in message
    assert "unknown key actor.layout.tensr" in refused(recipe, "actor.layout={tensr: 2}")


def test_unknown_key_in_a_base_names_the_base(tmp_path: Path, recipe: Path) -> None:
    recipe.write_text("modle: x\n")
    (tmp_path / "top.yaml").write_text("extends: recipe.yaml\n")
    assert f"{recipe}:1" in refused(tmp_path / "top.yaml")


@pytest.mark.parametrize(
    ("override", "got", "expected"),
    [
        ("run.total_steps=many", "'many' (str)", "int"),
        ("run.total_steps=3.5", "3.5 (float)", "int"),
        ("run.total_steps=true", "True (bool)", "int"),
        ("run.total_steps='3'", "'3' (str)", "int"),
        ("actor.optim.lr=.nan", "nan (float)", "finite float"),
        ("actor.optim.betas=[0.9]", "[0.9] (list)", "list of 2 float"),
        ("data.train_files=a.parquet", "'a.parquet' (str)", "list of str"),
        ("run.name=7", "7 (int)", "str"),
        ("run.export_hf=1", "1 (int)", "bool"),
        ("cluster.address=3", "3 (int)", "str"),
        ("run=3", "3 (int)", "group of keys"),
        ("actor.layout=null", "None (null)", "group of keys"),
    ],
)
def test_wrong_type_says_got_and_expected(recipe: Path, override: str, got: str, expected: str) -> None:
    message = refused(recipe, override)
    assert f"got:      {got}" in message and f"expected: {expected}" in message and f"override '{override}'" in message


def test_all_missing_keys_are_listed_at_once(recipe: Path) -> None:
    recipe.write_text("model: m\n")
    message = refused(recipe)
    for key in ("run.dir", "run.total_steps", "data.train_files", "actor.samples_per_mini_batch", "reward.path"):
        assert f"{key}:" in message
    assert "required keys without a value: 9" in message


def test_three_question_marks_ask_for_a_value(recipe: Path) -> None:
    recipe.write_text(MINIMAL.replace("model: m", "model: ???"))
    assert "required keys without a value: 1" in refused(recipe)
    assert load_config(recipe, ["model=mine"]).model == "mine"


def test_a_recipe_without_critic_need_not_size_its_batches(recipe: Path) -> None:
    recipe.write_text(MINIMAL.replace("critic: {samples_per_mini_batch: 4}\n", ""))
    assert "critic.samples_per_mini_batch" in refused(recipe)
    assert load_config(recipe, ["algorithm.advantage_estimator=grpo"]).critic.samples_per_mini_batch == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1\nb: 2\n", ":2"),
        ("model: x\nmodel: y\n", "duplicate key"),
        ("- a\n- b\n", "a mapping of keys"),
        ("only words\n", "a mapping of keys"),
        ("1: x\n", "unknown key 1"),
        ("extends: [a]\n", "names one file"),
        ("extends: gone.yaml\n", "extends of"),
        (MINIMAL + "plugins: ['${run.dir}']\n", "interpolation"),
        (MINIMAL + "plugins: ['${']\n", "recipe"),
        ("", "required keys without a value"),
    ],
)
def test_malformed_files_are_user_errors(recipe: Path, text: str, says: str) -> None:
    recipe.write_text(text)
    assert says in refused(recipe)


def test_a_missing_file_and_a_binary_one_are_user_errors(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "gone.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "can't be read" in refused(tmp_path / "binary.yaml")


@pytest.mark.parametrize("override", ["run.name", "=3", "actor.optim.lr=[1", "plugins=[${]"])
def test_malformed_overrides_are_user_errors(recipe: Path, override: str) -> None:
    assert f"override '{override}'" in refused(recipe, override)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text("a1é:#\"'{}[]-|>&*!%, ~", max_size=12),
    lr=st.floats(min_value=0, max_value=1),
    files=st.lists(st.sampled_from(["a", "b c", "ü.parquet", "x: y"]), min_size=1),
)
def test_to_yaml_round_trip(tmp_path: Path, name: str, lr: float, files: list[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(yaml.safe_load(MINIMAL) | {"run": {"dir": "r", "total_steps": 1, "name": name}}))
    base = load_config(tmp_path / "recipe.yaml")
    optim = dataclasses.replace(base.actor.optim, lr=lr)
    config = dataclasses.replace(
        base, actor=dataclasses.replace(base.actor, optim=optim), data=dataclasses.replace(base.data, train_files=tuple(files))
    )
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    again = load_config(tmp_path / "again.yaml")
    assert again == config and isinstance(again, Config)
