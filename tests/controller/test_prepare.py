"""Before anything is started: what a run directory accepts, and what is found in models and data. Real files, no worker."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.algo.kl import MAX_PROPORTIONAL_ERROR
from megarl.checkpoint.store import CheckpointStore
from megarl.config.checks import MAX_KL_CHANGE, WARM_START_FIRST_MEASUREMENT, check_config
from megarl.config.load import load_config
from megarl.config.schema import WarmStartConfig
from megarl.controller.context import RunPaths
from megarl.controller.prepare import Prepared, check_models, prepare
from megarl.controller.run_directory import has_begun
from megarl.controller.warm_start import _pace
from megarl.errors import ConfigError, DataError, MegarlError, ModelError

ROOT = Path(__file__).parents[2]
Overrides = dict[str, Any]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, and eight rows of its data, of 13 to 16 prompt tokens."""
    spec = importlib.util.spec_from_file_location("demo_prepare", ROOT / "recipes" / "demo" / "prepare.py")
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    out = tmp_path_factory.mktemp("demo")
    recipe.write_model(out / "model", seed=0)
    write_rows(out / "rows.parquet", ["cat", "a", "bird", "dog", "bed", "net", "lift", "sun"])
    shutil.copy(ROOT / "recipes" / "demo" / "reward.py", out)
    return out


def write_rows(file: Path, words: list[str]) -> None:
    rows = [
        {
            "data_source": "demo/reverse",
            "prompt": [{"role": "user", "content": f"reverse: {word}"}],
            "reward_model": {"style": "rule", "ground_truth": word[::-1]},
        }
        for word in words
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


@pytest.fixture
def place(demo: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    shutil.copytree(demo, tmp_path / "place")
    return tmp_path / "place"


def load(place: Path, **changes: Any):
    values: Overrides = {
        "model": place / "model",
        "data.train_files": f"[{place / 'rows.parquet'}]",
        "data.val_files": f"[{place / 'rows.parquet'}]",
        "data.val_prompts": 8,
        "warm_start.train_files": f"[{place / 'rows.parquet'}]",
        "reward.path": place / "reward.py",
        "run.dir": place / "run",
    }
    return load_config(ROOT / "recipes" / "demo-cpu.yaml", [f"{k}={v}" for k, v in (values | changes).items()])


def start(place: Path, **changes: Any) -> Prepared:
    config = load(place, **changes)
    check_config(config)
    return prepare(config, RunPaths(place / "run"))


def refused(kind: type[MegarlError], place: Path, **changes: Any) -> str:
    with pytest.raises(kind) as error:
        start(place, **changes)
    return str(error.value)


def begin(place: Path) -> None:
    """A whole checkpoint, as if the run had done a step."""
    store = CheckpointStore(place / "run" / "checkpoints", keep=2)
    store.commit(store.begin(1, ("actor",)), 1, {"step": 1})
    assert has_begun(RunPaths(place / "run"))


def change_model(place: Path, file: str = "config.json", **changes: Any) -> None:
    path = place / "model" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_start_writes_its_files_and_says_what_became_of_the_rows(place: Path) -> None:
    cut = {"data.max_prompt_tokens": 15, "data.truncation": "drop", "data.val_prompts": 6}
    prepared = start(place, **cut, **{"warm_start.enabled": "false"})
    assert prepared.train_rows == 6 and prepared.stop_token_ids == (1,)
    assert prepared.notes[0] == "data.train_files: 6 prompts of up to 15 tokens; overlong: 2 dropped, 0 truncated"
    assert prepared.notes[1].startswith("data.val_files: 6 prompts")
    run = place / "run"
    assert sorted(p.name for p in run.iterdir()) == ["checkpoints", "config.yaml", "data", "logs", "run.json"]
    inputs = json.loads((run / "run.json").read_text())["inputs"]
    assert inputs["data/train.arrow"] == hashlib.sha256((run / "data" / "train.arrow").read_bytes()).hexdigest()
    assert set(inputs) == {
        *("data/train.arrow", "data/val.arrow", "reward.path"),
        *("model/config.json", "reference/config.json", "critic.model/config.json"),
    }


def test_the_advice_of_a_refusal_can_be_followed_in_the_same_directory(place: Path) -> None:
    message = refused(DataError, place, **{"data.max_prompt_tokens": 15})
    assert "16" in message
    assert list((place / "run").iterdir()) == []
    assert len(start(place).notes) == 3
    start(place, **{"actor.optim.lr": 1e-5})  # still nothing that depends on the settings
    assert "lr: 1.0e-05" in (place / "run" / "config.yaml").read_text()


def test_a_begun_run_accepts_what_changes_no_number(place: Path) -> None:
    start(place)
    begin(place)
    free = {"reward.timeout_s": 9, "reward.workers": 2, "rollout.kv_cache_mib": 128, "rollout.max_concurrent_samples": 8}
    start(place, **free, **{"rollout.check_sync_every": 3, "run.total_steps": 80})
    before = (place / "run" / "config.yaml").read_text()
    assert "kv_cache_mib: 128" in before
    message = refused(ConfigError, place, **free, **{"actor.optim.lr": 1e-5, "actor.max_tokens_per_micro_batch": 512})
    assert "actor.optim.lr: 0.0005 -> 1e-05" in message and "max_tokens_per_micro_batch: 16384 -> 512" in message
    assert "timeout_s" not in message and (place / "run" / "config.yaml").read_text() == before


def test_the_warm_starts_model_fixes_the_settings_too(place: Path) -> None:
    start(place)
    shutil.copytree(place / "model", place / "run" / "warm_start" / "model")
    assert "run.seed: 0 -> 1" in refused(ConfigError, place, **{"run.seed": 1})


def test_changed_contents_of_the_same_length_are_refused_once_the_run_has_begun(place: Path) -> None:
    start(place)
    begin(place)
    prepared = (place / "run" / "data" / "train.arrow").read_bytes()
    write_rows(place / "rows.parquet", ["tac", "a", "bird", "dog", "bed", "net", "lift", "sun"])
    with open(place / "reward.py", "a") as file:
        file.write("# another reward\n")
    change_model(place, initializer_range=0.5)
    message = refused(ConfigError, place)
    for name in ("data/train.arrow", "data/val.arrow", "data/warm_start.arrow", "reward.path", "model/config.json"):
        assert name in message
    assert (place / "run" / "data" / "train.arrow").read_bytes() == prepared
    shutil.rmtree(place / "run" / "checkpoints")
    start(place)
    assert (place / "run" / "data" / "train.arrow").read_bytes() != prepared


def test_other_software_is_a_note(place: Path) -> None:
    start(place)
    begin(place)
    facts = json.loads((place / "run" / "run.json").read_text())
    facts["versions"]["torch"] = "1.0"
    facts["eval_start"] = {"reward": 0.4}
    (place / "run" / "run.json").write_text(json.dumps(facts))
    assert "torch: 1.0 ->" in start(place).notes[-1]
    assert json.loads((place / "run" / "run.json").read_text())["eval_start"] == {"reward": 0.4}
    assert not any("software" in note for note in start(place).notes)


@pytest.mark.parametrize("name", ["config.yaml", "run.json"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"a: [", b"\xff\xfe", b"model: x\nrun:\n  dir: y\n"])
def test_damaged_files_of_a_run_are_named(place: Path, name: str, content: bytes) -> None:
    (place / "run").mkdir()
    (place / "run" / "config.yaml").write_text((ROOT / "recipes" / "demo-cpu.yaml").read_text() + "reference:\ncluster: {}\nplugins: []\n")
    (place / "run" / name).write_bytes(content)
    message = refused(ConfigError, place)
    assert "damaged" in message and str(place / "run" / name) in message and "do:" in message


def test_a_directory_of_something_else_is_refused_untouched(place: Path) -> None:
    (place / "run").mkdir()
    (place / "run" / "notes.txt").write_text("mine")
    assert "no run of megarl" in refused(ConfigError, place)
    assert [p.name for p in (place / "run").iterdir()] == ["notes.txt"]
    assert "can't be written" in refused_at(place, place / "run" / "notes.txt")


def refused_at(place: Path, root: Path) -> str:
    with pytest.raises(ConfigError) as error:
        prepare(load(place), RunPaths(root))
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"critic.layout.pipeline": 3}, "critic.model"),
        ({"actor.layout.pipeline": 3}, "num_hidden_layers"),
        ({"actor.layout.tensor": 8}, "can't be split"),
        ({"reference": "gone"}, "reference = gone"),
        ({"critic.model": "gone"}, "critic.model = gone"),
        ({"rollout.max_response_tokens": 8000}, "max_position_embeddings"),
    ],
)
def test_models_that_do_not_fit_the_recipe(demo: Path, changes: Overrides, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        check_models(load(demo, **changes))


def test_models_of_other_roles_are_read_whole(place: Path) -> None:
    other = place / "other"
    shutil.copytree(place / "model", other)
    check_models(load(place, reference=other, **{"critic.model": other}))
    (other / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes()[:5000])
    for key in ("reference", "critic.model"):
        with pytest.raises(ModelError, match=f"{key} = .*other"):
            check_models(load(place, **{key: other}))
    (other / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="without weights"):
        check_models(load(place, reference=other))


@pytest.mark.parametrize(
    ("eos", "says"), [([], "no end-of-sequence"), (["1"], "one token id"), (2, "the tokenizer's is 1"), ([2, 3], "tokenizer's is 1")]
)
def test_stop_tokens_that_never_stop(place: Path, eos: Any, says: str) -> None:
    change_model(place, "generation_config.json", eos_token_id=eos)
    assert says in refused(ModelError, place)


def test_several_stop_tokens(place: Path) -> None:
    change_model(place, "generation_config.json", eos_token_id=[2, 1])
    assert start(place).stop_token_ids == (2, 1)


def test_the_recipes_stop_tokens_come_after_the_models(place: Path) -> None:
    """By id and by text; one that is among them already counts once."""
    own = {"rollout.stop_token_ids": "[9,1]", "rollout.stop_tokens": '["a","<|user|>","c"]'}
    prepared = start(place, **own)
    assert prepared.stop_token_ids == (1, 9, 7, 2)
    assert "stop_tokens:\n  - a" in (place / "run" / "config.yaml").read_text()


def test_a_damaged_tokenizer_is_the_models_fault(place: Path) -> None:
    (place / "model" / "tokenizer_config.json").write_text("{")
    assert str(place / "model") in refused(ModelError, place)


def test_limits_that_checks_repeats_are_those_of_their_owners() -> None:
    """megarl.config may not import the rooms above it, so it says two numbers again."""
    assert MAX_KL_CHANGE == MAX_PROPORTIONAL_ERROR
    assert _pace(WarmStartConfig(eval_every_steps=3), None).measure_every == WARM_START_FIRST_MEASUREMENT * 3
