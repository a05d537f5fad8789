"""A tiny sound recipe with model, data and reward function, of which tests spoil one thing at a time."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from megarl.cli.main import main

STARTED = "workers would start now"
ROOT = Path(__file__).parents[2]
WORDS = ("cat", "a", "bird", "dog", "bed", "net", "lift", "sun")  # prompts of 13 to 16 tokens
RECIPE = """\
model: model
run: {dir: run, total_steps: 2}
data: {train_files: [rows.parquet], max_prompt_tokens: 16}
actor: {samples_per_mini_batch: 4}
critic: {samples_per_mini_batch: 4}
rollout: {prompts_per_step: 4, max_response_tokens: 8}
reward: {path: reward.py}
"""


def row(word: str = "cat", **changes: Any) -> dict[str, Any]:
    """One row in verl's schema."""
    sound = {
        "data_source": "demo/reverse",
        "prompt": [{"role": "user", "content": f"reverse: {word}"}],
        "reward_model": {"style": "rule", "ground_truth": word[::-1]},
        "extra_info": {"index": len(word)},
    }
    return sound | changes


def write_rows(rows: list[dict[str, Any]], file: str | Path = "rows.parquet") -> None:
    """Replace a data file."""
    pq.write_table(pa.Table.from_pylist(rows), file)


def make_sound(out: Path) -> None:
    """Write everything that the recipe names below ``out``."""
    spec = importlib.util.spec_from_file_location("demo_prepare", ROOT / "recipes" / "demo" / "prepare.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    demo.write_model(out / "model", seed=0)
    write_rows([row(word) for word in WORDS], out / "rows.parquet")
    shutil.copy(ROOT / "recipes" / "demo" / "reward.py", out)
    (out / "recipe.yaml").write_text(RECIPE)


def change_json(file: str, **changes: Any) -> None:
    """Set keys of a JSON file; None removes a key."""
    path = Path(file)
    merged = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))


def change_weights(change: Callable[[dict[str, torch.Tensor]], Any], file: str = "model/model.safetensors") -> None:
    """Let ``change`` edit the tensors of a weight file in place."""
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def snapshot(directory: Path) -> dict[str, str]:
    """Name -> digest of everything below ``directory``; folders too."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(directory.rglob("*"))
    }


class WorkersWouldStart(BaseException):
    """Every check has passed."""


def tripwire(*_: object) -> None:
    """In the place of what starts Ray."""
    raise WorkersWouldStart


def train(*overrides: str) -> int | str:
    """``megarl train`` in the current directory: the exit code, or STARTED when all checks have passed."""
    try:
        return main(["train", "recipe.yaml", *overrides])
    except WorkersWouldStart:
        return STARTED


def assert_nothing_lost(before: dict[str, str], place: Path) -> None:
    """All is as it was in the snapshot ``before``, and nothing new is there."""
    after = snapshot(place)
    assert after.keys() == before.keys()
    assert after == before
