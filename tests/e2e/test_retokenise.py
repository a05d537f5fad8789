"""A critic of another family and another vocabulary beside the actor: it reads the text, and learns."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM

from megarl.cluster.calls import fetch_together
from megarl.config.load import load_config
from megarl.controller.context import Context
from megarl.controller.metrics import StepMetrics
from megarl.controller.step import add_log_probs_and_values, draw_samples, ppo_step, score_samples
from tests.data.tokenizers import byte_level
from tests.e2e.demo import ROOT, metrics
from tests.e2e.started import started

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RECIPE = ROOT / "recipes" / "bench" / "C0.yaml"


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2 with words for tokens, and a GPT-NeoX (the tutorial's critic is a Pythia) whose tokenizer has a token for each byte."""
    out = tmp_path_factory.mktemp("bench")
    subprocess.run([sys.executable, ROOT / "recipes" / "bench" / "prepare.py", "C0", "--out", out], check=True, timeout=120)
    write_pythia(out / "pythia")
    shutil.copytree(out / "model", out / "twin")
    return out


def write_pythia(directory: Path, positions: int = 512) -> None:
    tokenizer = byte_level(270, eos_token="<|im_end|>", pad_token="<|im_end|>")
    torch.manual_seed(1)
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    GPTNeoXForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def overrides(workload: Path, run_dir: Path, **changes: Any) -> list[str]:
    values = {
        "model": workload / "model",
        "critic.model": workload / "pythia",
        "data.train_files": f"[{workload / 'train.parquet'}]",
        "reward.path": ROOT / "recipes" / "bench" / "reward.py",
        "run.dir": run_dir,
        "run.total_steps": 2,
        "algorithm.advantage_estimator": "gae",
        "cluster.placement": "separate",
        "critic.layout.data": 2,  # the actor has one replica: the critic's samples are balanced by its own tokens
        "critic.optim.lr": 3e-3,
        "critic.samples_per_mini_batch": 32,
        "critic.value_clip": 0,
        "critic.max_tokens_per_micro_batch": 2048,
    }
    return [f"{key}={value}" for key, value in {**values, **changes}.items()]


def train(workload: Path, run_dir: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl.cli.main", "train", str(RECIPE), *overrides(workload, run_dir, **changes)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def steps(workload: Path, run_dir: Path, **changes: Any) -> list[dict[str, float]]:
    done = train(workload, run_dir, **changes)
    assert done.returncode == 0, done.stderr
    return metrics(run_dir)


def test_a_critic_of_another_vocabulary_learns(workload: Path, tmp_path: Path) -> None:
    first, second = steps(workload, tmp_path / "run", **{"critic.retokenize": "true"})
    assert all(math.isfinite(step[f"critic/{name}"]) for step in (first, second) for name in ("vf_loss", "grad_norm", "vf_explained_var"))
    assert first["critic/values/max"] == 0.0, "an untrained head"
    assert second["critic/vf_loss"] < 0.7 * first["critic/vf_loss"]
    # Rewards have mean 1/2 whatever is written; what it has learnt must be near that at every token.
    assert 0.2 < second["critic/values/mean"] < 0.8 and second["critic/values/min"] != second["critic/values/max"]


def test_with_one_vocabulary_the_key_changes_no_bit(workload: Path, tmp_path: Path) -> None:
    runs = [
        steps(workload, tmp_path / name, **{"critic.model": workload / "twin", "critic.retokenize": name}) for name in ("true", "false")
    ]
    assert len(runs[0]) == 2 and runs[0][1]["critic/values/max"] != 0.0
    assert runs[0] == runs[1]


def test_a_sample_that_is_too_long_for_the_critic_ends_the_run_with_what_to_do(workload: Path, tmp_path: Path) -> None:
    write_pythia(tmp_path / "short", positions=100)
    done = train(workload, tmp_path / "positions", **{"critic.retokenize": "true", "critic.model": tmp_path / "short"})
    assert done.returncode == 3, done.stderr
    assert "critic.model" in done.stderr and "at most 100 (max_position_embeddings)" in done.stderr
    done = train(workload, tmp_path / "budget", **{"critic.retokenize": "true", "critic.max_tokens_per_micro_batch": 100})
    assert done.returncode == 2, done.stderr
    assert "critic.max_tokens_per_micro_batch" in done.stderr and "raise it to" in done.stderr


@pytest.fixture
def run(workload: Path, tmp_path: Path) -> Iterator[Context]:
    """Colocated, and cut by tensor parallelism."""
    changes = {"critic.layout.data": 1, "cluster.placement": "colocated", "rollout.engines": 2, "critic.retokenize": "true"}
    layouts = {"actor.layout.tensor": 2, "critic.layout.tensor": 2}
    yield from started(load_config(RECIPE, overrides(workload, tmp_path / "run", **changes, **layouts)))


def test_values_are_hugging_faces_at_what_was_known(run: Context, workload: Path, tmp_path: Path) -> None:
    """The trained critic's columns, against its export run on the text of each sample. The loop by hand gets the same."""
    ppo_step(run, 1)
    m = StepMetrics()
    drawn, _ = score_samples(run, draw_samples(run, run.cursor.take(8), 2, m), 2, m)
    critic = run.groups.critic
    assert critic is not None
    by_hand, _ = critic.forward("critic", drawn.select(("prompts", "responses")), {"values": "values"}, phase="test").result()
    batch = add_log_probs_and_values(run, drawn, m)
    critic.export("critic", str(tmp_path / "work"), str(tmp_path / "critic"), str(workload / "pythia"))
    columns = batch.to_local(fetch=fetch_together)
    assert np.array_equal(by_hand.to_local("values", fetch=fetch_together)["values"].values, columns["values"].values)
    assert columns["critic_lengths"].tolist() == columns["critic_tokens"].lengths.tolist()

    actor, tokenizer = (AutoTokenizer.from_pretrained(workload / name) for name in ("model", "pythia"))
    model = AutoModel.from_pretrained(tmp_path / "critic", dtype=torch.float32)
    head = load_file(tmp_path / "critic" / "model.safetensors")["score.weight"][0]
    assert head.abs().max() > 0
    for i in range(0, len(batch), 7):
        prompt, response = columns["prompts"][i].tolist(), columns["responses"][i].tolist()
        tokens, predictors = columns["critic_tokens"][i], columns["critic_predictors"][i]
        assert tokens.tolist() == tokenizer.encode(actor.decode(prompt + response), add_special_tokens=False)
        for t, predictor in enumerate(predictors.tolist()):
            known, read = actor.decode(prompt + response[:t]), tokenizer.decode(tokens[: predictor + 1])
            more = tokenizer.decode(tokens[: predictor + 2])
            assert known.startswith(read) and not known.startswith(more)
        with torch.no_grad():
            values = (model(torch.from_numpy(tokens.astype(np.int64))[None]).last_hidden_state[0] @ head).numpy()
        scale = np.abs(values).max()
        assert np.abs(columns["values"][i] - values[predictors]).max() <= 1e-4 * scale
        assert abs(columns["last_values"][i][0] - values[-1]) <= 1e-4 * scale
