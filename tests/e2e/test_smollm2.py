"""A real language model end to end: SmolLM2-135M out of its GGUF file, one step of PPO and one of GRPO, on readable answers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from megarl.config.load import load_config
from megarl.errors import ModelError
from tests.e2e.demo import ROOT
from tests.recipes.test_smollm2 import RECIPE, gguf_model, prepare

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

OUT = ROOT / "build" / "smollm2"
QUESTION = [{"role": "user", "content": "Why?"}]
RENDERED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
)


def run_prepare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "recipes" / "smollm2" / "prepare.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def model() -> Path:
    """Made once in build/, as `make smollm2` does: the package is 93 MB and the model 538 MB."""
    done = run_prepare("--out", OUT)
    if "can't be fetched" in done.stderr or "didn't arrive" in done.stderr:
        pytest.skip(f"the model's package can't be had here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return OUT / "model"


@pytest.fixture(scope="module")
def gguf_file(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that the package holds, with the package that reads it on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        prepare.make_importable(tmp_path_factory.mktemp("reader"))
        yield OUT / prepare.GGUF_NAME


def test_model_directory(model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model)
    config = loaded.config
    assert (config.model_type, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == ("llama", 30, 9, 3)
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps, config.vocab_size) == (100000.0, 1e-5, 49152)
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert loaded.num_parameters() == 134_515_008
    assert loaded.generation_config.eos_token_id == [2, 0]

    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False) == RENDERED
    assert tokenizer.tokenize("in 1990") == ["in", "Ġ", "1", "9", "9", "0"]
    assert tokenizer("<|im_start|>x<|im_end|>").input_ids[::2] == [1, 2]
    text = "Naïve café,\n\tx  = 3.5 🙂<|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    limit = load_config(RECIPE, []).data.max_prompt_tokens
    rows = [row for name in (prepare.TRAIN, prepare.VAL) for row in pq.read_table(OUT / name).to_pylist()]
    assert max(len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]) for row in rows) <= limit


def test_a_second_call_changes_nothing(model: Path) -> None:
    before = (model / "model.safetensors").stat()
    done = run_prepare("--out", OUT)
    assert (done.returncode, done.stdout) == (0, f"{OUT}: already complete (seed 0)\n")
    after = (model / "model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_rows_in_the_files_own_order_are_noticed(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query and key rows as llama.cpp lays them: every shape is right, and the model talks nonsense."""
    monkeypatch.setitem(sys.modules, "gguf_model", gguf_model)
    monkeypatch.setattr(gguf_model, "halves_from_pairs", lambda rows, heads: rows)
    with pytest.raises(ModelError, match="the model doesn't know: What is the capital of France"):
        prepare.write_model(gguf_file, tmp_path)


def test_a_file_that_is_no_gguf(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"no gguf" * 100)
    with pytest.raises(ModelError, match="no GGUF file"):
        gguf_model.write_hf_directory(tmp_path / "cut.gguf", tmp_path / "model")


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_one_step(model: Path, tmp_path: Path, estimator: str) -> None:
    """The recipe with one override for GRPO; fewer prompts and shorter answers, so that it takes a minute."""
    changes = {
        "model": model,
        "data.train_files": f"[{OUT / prepare.TRAIN}]",
        "data.val_files": "[]",
        "run.dir": tmp_path / "run",
        "run.total_steps": 1,
        "run.export_hf": "false",
        "rollout.prompts_per_step": 4,
        "rollout.max_response_tokens": 32,
        "actor.samples_per_mini_batch": 8,
        "critic.samples_per_mini_batch": 8,
        "algorithm.advantage_estimator": estimator,
    }
    command = [sys.executable, "-m", "megarl.cli.main", "train", str(RECIPE), *(f"{key}={value}" for key, value in changes.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr

    (line,) = (json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    critics = ("critic/vf_loss", "critic/grad_norm") if estimator == "gae" else ()
    assert ("critic/vf_loss" in line) == bool(critics)
    for name in ("critic/score/mean", "actor/reward_kl_penalty", "actor/pg_loss", "actor/entropy", "actor/grad_norm", *critics):
        assert line[name] is not None and math.isfinite(line[name]), name
    assert 0 <= line["critic/score/min"] <= line["critic/score/max"] <= 1
    assert line["actor/reward_kl_penalty"] == 0.0, "before the first update actor and reference are one model"
    assert 0.0 < line["training/rollout_logprobs_diff_max"] < 1e-3, "vLLM against Megatron"
    assert 0.5 < line["actor/entropy"] < 4.0, "a trained model's; that of noise is ln 49152 = 10.8"
    assert_readable([row["response"] for row in pq.read_table(tmp_path / "run" / "rollouts" / "step_1.parquet").to_pylist()])


def assert_readable(answers: list[str]) -> None:
    """Text of words: what a model with misplaced weights says is neither."""
    assert len(answers) == 8 and all(answer.strip() for answer in answers)
    text = "".join(answers)
    assert np.mean([character.isprintable() or character == "\n" for character in text]) > 0.95
    assert np.mean([len(answer.split()) for answer in answers]) > 3
    common = {"the", "a", "to", "of", "and", "is", "in", "it", "you", "for", "your", "that"}
    assert np.mean([word.lower() in common for word in text.split()]) > 0.1
