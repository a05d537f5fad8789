"""``megarl validate`` finds what is wrong with files, runs no user code, and starts nothing."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.cli.main import main

ROW = {
    "data_source": "d",
    "prompt": [{"role": "user", "content": "question"}],
    "reward_model": {"style": "rule", "ground_truth": "answer"},
}
MODEL = {"model_type": "qwen2", "vocab_size": 33, "max_position_embeddings": 16}
RECIPE = """\
model: model
run: {dir: runs/x, total_steps: 1}
data: {train_files: [train.parquet], max_prompt_tokens: 8}
actor: {samples_per_mini_batch: 4}
critic: {samples_per_mini_batch: 4}
rollout: {prompts_per_step: 8, max_response_tokens: 8}
reward: {path: reward.py}
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(MODEL))
    Path("model/tokenizer_config.json").write_text("{}")
    Path("model/model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # of no tensors
    pq.write_table(pa.Table.from_pylist([ROW] * 5), "train.parquet")
    Path("reward.py").write_text("open('touched', 'w')\ndef compute_score(**kwargs):\n    return 1.0\n")
    Path("recipe.yaml").write_text(RECIPE)
    return tmp_path


def test_a_sound_recipe_says_what_was_found(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(workplace.rglob("*"))
    assert main(["validate", "recipe.yaml"]) == 0
    out = capsys.readouterr().out
    assert "8 prompts x 1 response = 8 samples = 2 optimizer steps of 4" in out
    assert "train.parquet: 5 rows; the first: d, 'question' -> 'answer'" in out and "model: model: qwen2" in out
    assert sorted(workplace.rglob("*")) == before, "validate wrote something, or ran the reward file"


@pytest.mark.parametrize(
    ("spoil", "code", "says"),
    [
        (lambda: Path("model/config.json").unlink(), 2, "config.json"),
        (lambda: Path("model/config.json").write_text("{}"), 2, "names no model"),
        (lambda: Path("model/config.json").write_text("{"), 2, "no JSON"),
        (lambda: Path("model/config.json").write_text(json.dumps(MODEL | {"vocab_size": None})), 2, "no vocab_size"),
        (lambda: Path("model/config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": 15})), 2, "at least 16 ="),
        (lambda: Path("model/model.safetensors").unlink(), 2, "weights"),
        (lambda: Path("model/tokenizer_config.json").unlink(), 2, "a tokenizer"),
        (lambda: Path("train.parquet").unlink(), 2, "train.parquet"),
        (lambda: Path("train.parquet").write_text("text"), 3, "not a parquet file"),
        (lambda: pq.write_table(pa.table({"question": ["q"]}), "train.parquet"), 3, "missing columns"),
        (lambda: pq.write_table(pa.Table.from_pylist([ROW]).slice(0, 0), "train.parquet"), 3, "without rows"),
        (lambda: pq.write_table(pa.Table.from_pylist([ROW | {"reward_model": None}, ROW]), "train.parquet"), 3, "row 0"),
        (lambda: Path("reward.py").unlink(), 2, "reward file not found"),
        (lambda: Path("reward.py").write_text("def compute_score(:"), 2, "reward.py:1"),
        (lambda: Path("reward.py").write_text("def score(): pass"), 2, "no function 'compute_score'"),
        (lambda: Path("recipe.yaml").write_text(RECIPE + "modl: x\n"), 2, "did you mean model?"),
    ],
)
def test_what_is_wrong_is_named(spoil, code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    spoil()
    assert main(["validate", "recipe.yaml"]) == code
    assert says in capsys.readouterr().err


def test_a_reward_function_may_be_imported_or_assigned() -> None:
    for source in ("from math import fsum as compute_score", "compute_score = print"):
        Path("reward.py").write_text(source)
        assert main(["validate", "recipe.yaml"]) == 0


def test_critic_and_reference_directories_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "recipe.yaml", "critic.model=gone"]) == 2
    assert "critic.model = gone" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["critic.model", "reference"])
def test_all_roles_share_one_vocabulary(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("model", "other")
    assert main(["validate", "recipe.yaml", f"{key}=other"]) == 0
    Path("other/config.json").write_text(json.dumps(MODEL | {"vocab_size": 34}))
    assert main(["validate", "recipe.yaml", f"{key}=other"]) == 2
    assert f"(in {key}: vocab_size)" in capsys.readouterr().err


def test_only_the_actors_directory_needs_a_tokenizer() -> None:
    shutil.copytree("model", "other")
    Path("other/tokenizer_config.json").unlink()
    assert main(["validate", "recipe.yaml", "critic.model=other", "reference=other"]) == 0
    assert main(["validate", "recipe.yaml", "model=other"]) == 2
