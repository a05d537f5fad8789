"""``megarl validate``: everything about a recipe that can be known without starting a process or loading a model."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.config.checks import check_config
from megarl.config.load import load_config
from megarl.config.model_sizes import check_model_sizes, model_directories
from megarl.config.schema import Config
from megarl.errors import ConfigError, DataError, ModelError, explain

_FIRST_ROWS = 3


def validate(recipe: str, overrides: Sequence[str] = ()) -> list[str]:
    """Load and check a recipe, its model directories, its data files' first rows and its reward file; returns what was found.

    Raises ConfigError, ModelError or DataError for the first thing that is wrong.
    """
    config = load_config(recipe, overrides)
    lines = check_config(config)
    hf_configs = {key: model_config(directory, key) for key, directory in model_directories(config).items()}
    check_model_sizes(config, hf_configs)
    lines += [f"{key}: {directory}: {hf_configs[key]['model_type']}" for key, directory in model_directories(config).items()]
    for key, files in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
        ("warm_start.train_files", config.warm_start.train_files if config.warm_start.enabled else ()),
    ):
        lines += [_describe_file(key, file, config) for file in files]
    check_reward_source(config.reward.path, config.reward.name)
    lines.append(f"reward: {config.reward.path}: {config.reward.name}")
    return [*lines, f"{recipe}: sound"]


def model_config(directory: str, key: str) -> dict[str, Any]:
    """``config.json`` of a Hugging Face directory that has weights, and for the actor a tokenizer. Raises ModelError for any other."""
    root = Path(directory)
    present = sorted(path.name for path in root.iterdir()) if root.is_dir() else "no directory"
    wanted = {"config.json": "config.json", "weights": "*.safetensors"}
    if key == "model":  # all roles read the tokens of the actor's tokenizer
        wanted["a tokenizer"] = "tokenizer_config.json"
    for what, pattern in wanted.items():
        if not any(root.glob(pattern)):
            expected = f"{what}: {pattern}"
            raise ModelError(explain("no Hugging Face model directory", where=f"{key}: {directory}", got=present, expected=expected))
    try:
        found = json.loads((root / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(explain("config.json is no JSON", where=f"{key}: {directory}/config.json", got=error)) from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        where = f"{key}: {directory}/config.json"
        raise ModelError(explain("a model configuration that names no model", where=where, got=str(found)[:80], expected="model_type"))
    return found


def check_reward_source(path: str, name: str) -> None:
    """The reward file is Python and binds ``name``. It is read and never run: its code belongs into a reward process."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(explain("reward file not found", where="reward.path", got=path, expected="a Python file"))
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=path)
    except SyntaxError as error:
        raise ConfigError(explain("the reward file is not Python", where=f"{path}:{error.lineno}", got=error.msg)) from error
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    imported = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    if name not in bound | defined | imported:
        got = ", ".join(sorted(defined)) or "no functions"
        raise ConfigError(explain(f"no function '{name}' in the reward file", where=f"reward.name, {path}", got=got, expected=name))


def _describe_file(key: str, file: str, config: Config) -> str:
    """Rows of a data file, and how its first one is understood."""
    import pyarrow.parquet as pq

    from megarl.data.parquet import read_records

    rows = list(islice(read_records((file,), config.data.prompt_key), _FIRST_ROWS))
    count = pq.read_metadata(file).num_rows
    if not rows:
        raise DataError(explain("a data file without rows", where=f"{key}: {file}", expected="at least one row"))
    first = rows[0]
    said = first.messages[-1]["content"]
    return f"{key}: {file}: {count} rows; the first: {first.data_source}, {said[:80]!r} -> {first.ground_truth!r}"
