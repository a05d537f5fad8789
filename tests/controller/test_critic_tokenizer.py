"""Actor and critic of different vocabularies: refused, or the critic reads the text."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megarl.config.checks import check_config
from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.controller.context import RunPaths
from megarl.controller.critic_tokenizer import critic_notes
from megarl.controller.prepare import check_models, prepare
from megarl.errors import ModelError
from tests.data.tokenizers import byte_level

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's actor and its data, and a critic of another family with a tokenizer of its own."""
    spec = importlib.util.spec_from_file_location("demo_prepare", ROOT / "recipes" / "demo" / "prepare.py")
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    out = tmp_path_factory.mktemp("made")
    recipe.write_model(out / "model", seed=0)
    recipe.write_data(out, seed=0)
    llama(out / "llama")
    return out


def llama(directory: Path, *, vocab: int | None = None, positions: int = 24) -> None:
    """Fewer positions than the longest sample has tokens of the actor: what counts is how many it has of the critic's."""
    tokenizer = byte_level(280, eos_token="<|im_end|>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocab or len(tokenizer), max_position_embeddings=positions, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "place")
    return tmp_path / "place"


def load(place: Path, **changes: Any) -> Config:
    values = {
        "model": place / "model",
        "critic.model": place / "llama",
        "data.train_files": f"[{place / 'train.parquet'}]",
        "data.val_files": f"[{place / 'val.parquet'}]",
        "warm_start.enabled": "false",
        "reward.path": ROOT / "recipes" / "demo" / "reward.py",
        "run.dir": place / "run",
    }
    return load_config(ROOT / "recipes" / "demo-cpu.yaml", [f"{k}={v}" for k, v in (values | changes).items()])


def refused(place: Path, **changes: Any) -> str:
    with pytest.raises(ModelError) as error:
        check_models(load(place, **changes))
    return str(error.value)


def start(place: Path, **changes: Any) -> tuple[str, ...]:
    config = load(place, **changes)
    check_config(config)
    return prepare(config, RunPaths(place / "run")).notes


@pytest.mark.slow
def test_another_vocabulary_is_refused_by_name_and_the_key_takes_it(place: Path) -> None:
    message = refused(place)
    assert f"vocabularies of {place / 'model'} and {place / 'llama'}: 33 and 281 tokens; " in message
    assert "'!': no such token and id 0" in message and "'<|pad|>': id 0 and no such token" in message
    assert "critic.retokenize" in message
    notes = start(place, **{"critic.retokenize": "true"})
    assert notes[-1] == f"critic.retokenize: the critic reads the text of the samples with the tokenizer of {place / 'llama'}"
    assert "critic.model/tokenizer.json" in json.loads((place / "run" / "run.json").read_text())["inputs"]


def test_the_same_size_with_other_tokens_is_refused_too(place: Path) -> None:
    shutil.copytree(place / "model", place / "twin")
    check_models(load(place, **{"critic.model": place / "twin"}))
    file = place / "twin" / "tokenizer.json"
    parsed = json.loads(file.read_text())
    vocab = parsed["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(parsed))
    assert "'a': id 7 and id 8, 'b': id 8 and id 7" in refused(place, **{"critic.model": place / "twin"})


@pytest.mark.slow
def test_the_key_without_a_use_is_a_note(place: Path) -> None:
    shutil.copytree(place / "model", place / "twin")
    for critic in (place / "twin", "null"):
        assert "nothing to do" in start(place, **{"critic.model": critic, "critic.retokenize": "true"})[-1]
    assert not any("retokenize" in note for note in start(place, **{"critic.model": place / "twin"}))
    grpo = {"algorithm.advantage_estimator": "grpo", "rollout.responses_per_prompt": 2}
    assert critic_notes(load(place, **grpo, **{"critic.retokenize": "true"})) == []
    check_models(load(place, **grpo))


@pytest.mark.parametrize("retokenize", ["true", "false"])
def test_a_critic_without_tokenizer_is_refused(place: Path, retokenize: str) -> None:
    for file in (place / "llama").glob("tokenizer*"):
        file.unlink()
    message = refused(place, **{"critic.retokenize": retokenize})
    assert f"critic.model = {place / 'llama'}" in message and "no tokenizer.json" in message


def test_a_critic_whose_tokenizer_is_another_models_is_refused(place: Path) -> None:
    llama(place / "small", vocab=100)
    message = refused(place, **{"critic.model": place / "small", "critic.retokenize": "true"})
    assert "id 280" in message and "vocab_size 100" in message
