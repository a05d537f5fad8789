"""A trainer before any process: what the constructor checks, and what it leaves behind. Real models, no worker."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megarl.compat.pools import RayResourcePool
from megarl.data import RLHFDataset
from megarl.data.prompts import PreparedPrompts
from megarl.errors import ConfigError, DataError, MegarlError, ModelError
from tests.compat.places import SMALL, trainer


def refused(kind: type[MegarlError], place: Path, **changes: Any) -> str:
    with pytest.raises(kind) as error:
        trainer(place, **changes)
    return str(error.value)


@pytest.fixture
def other(place: Path, tmp_path: Path) -> Path:
    """A model directory that a test may spoil."""
    shutil.copytree(place / "model", tmp_path / "other")
    return tmp_path / "other"


def test_a_trainer_is_checked_and_prepared_and_has_no_processes(place: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with trainer(place, run_dir=tmp_path / "run", say=said.append) as made:
        assert said[0].startswith("actor: 8 prompts") and "8192 prompts of up to 16 tokens" in said[-1]
        assert (tmp_path / "run" / "data" / "train.arrow").is_file() and (tmp_path / "run" / "config.yaml").is_file()
        assert "locked by" in refused(ConfigError, place, run_dir=tmp_path / "run")
        for part in ("train_dataloader", "actor_rollout_wg", "critic_wg", "ref_policy_wg"):
            with pytest.raises(ConfigError, match="call trainer.init_worker_groups"):
                getattr(made, part)
    with pytest.raises(ConfigError, match="the trainer is closed"):
        made.init_worker_groups()
    with pytest.raises(ConfigError, match="the trainer is closed"):
        _ = made.train_dataloader
    trainer(place, run_dir=tmp_path / "run").close()  # the lock is free again


@pytest.mark.slow
def test_temporary_directories_go_unless_something_went_wrong(place: Path) -> None:
    with trainer(place) as made:
        directory = made.run_dir
        assert directory.is_dir()
    assert not directory.exists()
    with pytest.raises(ZeroDivisionError), trainer(place) as made:
        _ = 1 / 0
    assert not made.run_dir.exists(), "there was nothing to look at"
    with pytest.raises(ZeroDivisionError), trainer(place) as made:
        (made.paths.logs / "actor-rank-0.log").write_text("the reason")
        _ = 1 / 0
    assert (made.paths.logs / "actor-rank-0.log").is_file()
    shutil.rmtree(made.run_dir)


def test_a_refused_trainer_leaves_no_directory(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    refused(ConfigError, place, overrides=["data.max_prompt_tokens=0"])
    refused(DataError, place, overrides=["data.max_prompt_tokens=3", "rollout.max_response_tokens=8"])
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_directory_stays_as_it_is(place: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    before = foreign.stat().st_mtime_ns
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    samples = RLHFDataset(str(place / "val.parquet"), tokenizer, max_prompt_length=16, max_response_length=8)
    for data in (place / "train.parquet", samples):
        message = refused(ConfigError, place, run_dir=foreign, train_dataset=data)
        assert "no run of megarl" in message and "['notes.txt']" in message
        assert [path.name for path in foreign.iterdir()] == ["notes.txt"] and foreign.stat().st_mtime_ns == before
    assert (foreign / "notes.txt").read_text() == "mine"
    refused(ConfigError, place, run_dir=tmp_path / "new", reward_fn=tmp_path / "nowhere.py")
    assert not (tmp_path / "new").exists(), "a directory that the trainer made goes with its failure"


def test_without_data_the_groups_are_not_started(place: Path) -> None:
    with (
        trainer(place, train_dataset=None) as made,
        pytest.raises(DataError, match=r"no prompts to draw from(.|\n)*train_dataset=RLHFDataset"),
    ):
        made.init_worker_groups()


def test_a_dataset_is_trained_on_as_it_shows_itself(place: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    dataset = RLHFDataset(str(place / "val.parquet"), tokenizer, max_prompt_length=15, max_response_length=8, truncation="left")
    files = place / "val.parquet"
    with trainer(place, train_dataset=dataset, val_dataset=dataset, overrides=()) as made, trainer(place, train_dataset=files) as plain:
        assert (made.config.data.max_prompt_tokens, made.config.rollout.max_response_tokens) == (15, 8)
        prompts, files = PreparedPrompts.open(made.paths.train_prompts), PreparedPrompts.open(plain.paths.train_prompts)
        assert len(prompts) == len(dataset) == len(files)
        lengths = [len(files.tokens([i])[0]) for i in range(len(files))]
        assert max(lengths) == 16, "the dataset must have something to cut"
        for i in range(len(dataset)):
            assert prompts.tokens([i])[0].tolist() == dataset[i]["input_ids"] == files.tokens([i])[0][-15:].tolist()
        assert prompts.reward_inputs(range(8)) == files.reward_inputs(range(8)) and prompts.text(3) == files.text(3)
        assert made._prepared.stop_token_ids == plain._prepared.stop_token_ids


def test_a_dataset_of_another_tokenizer_is_refused(place: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    dataset = RLHFDataset(str(place / "val.parquet"), tokenizer, max_prompt_length=16, max_response_length=8)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|", "< |")
    assert "another chat template" in refused(DataError, place, train_dataset=dataset)
    tokenizer.add_tokens(["new"])
    assert "another vocabulary" in refused(DataError, place, train_dataset=dataset)


@pytest.mark.parametrize(
    "sample, said",
    [
        ({"input_ids": [0] * 17}, r"train_dataset\[1\](.|\n)*17 tokens"),
        ({"input_ids": []}, r"train_dataset\[1\](.|\n)*0 tokens"),
        ({"input_ids": [33]}, r"outside the model's vocabulary(.|\n)*below 33"),
        ({"input_ids": [1], "ground_truth": object()}, r"train_dataset\[1\], ground_truth"),
        ("text", r"train_dataset\[1\]"),
    ],
)
def test_bad_samples_are_named(place: Path, sample: Any, said: str) -> None:
    good = {"input_ids": [2, 3], "prompt": "p", "data_source": "s", "ground_truth": "t"}
    bad = good | sample if isinstance(sample, dict) else sample
    with pytest.raises(DataError, match=said):
        trainer(place, train_dataset=[good, bad], overrides=SMALL)


@pytest.mark.slow
def test_another_vocabulary_of_the_same_size_is_refused(place: Path, other: Path) -> None:
    file = other / "tokenizer.json"
    parsed = json.loads(file.read_text())
    vocab = parsed["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(parsed))
    for key, do in (("critic_config", "critic.retokenize"), ("ref_policy_config", "actor's tokenizer")):
        message = refused(ModelError, place, **{key: {"model_name_or_path": other}})
        assert str(other) in message and "'a': id" in message and do in message
    file.unlink()  # can't be compared; sizes are
    trainer(place, ref_policy_config={"model_name_or_path": other}).close()


def test_a_critic_of_an_unknown_family_is_named(place: Path, other: Path) -> None:
    config = json.loads((other / "config.json").read_text()) | {"model_type": "bloom", "architectures": ["BloomForCausalLM"]}
    (other / "config.json").write_text(json.dumps(config))
    assert "bloom" in refused(ModelError, place, critic_config={"model_name_or_path": other})


def test_roles_that_the_algorithm_lacks_or_needs_are_named(place: Path) -> None:
    grpo = [*SMALL, "algorithm.advantage_estimator=grpo", "rollout.responses_per_prompt=2"]
    assert "critic would do nothing" in refused(ConfigError, place, overrides=grpo)
    assert "critic is needed" in refused(ConfigError, place, critic_config=None, critic_resource_pool=None)
    assert "ref_policy would do nothing" in refused(ConfigError, place, overrides=[*SMALL, "algorithm.kl.where=none"])
    trainer(place, overrides=grpo, critic_config=None, critic_resource_pool=None).close()


def test_the_references_own_layout_is_checked_on_its_model(place: Path) -> None:
    changes = {
        "ref_policy_config": {"model_name_or_path": place / "model", "layout": {"tensor": 3}},
        "ref_policy_resource_pool": RayResourcePool([3]),
    }
    assert "tensor 3" in refused(ModelError, place, **changes)


def test_missing_models_and_rewards_are_named(place: Path, tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refused(ModelError, place, critic_config={"model_name_or_path": tmp_path / "nowhere"})
    assert "nowhere.py" in refused(ConfigError, place, reward_fn=tmp_path / "nowhere.py")
    trainer(place, reward_fn=None).close()  # scored by hand
