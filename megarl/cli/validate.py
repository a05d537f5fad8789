"""``megarl validate``: everything about a recipe that can be known without starting a process or loading a model."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from megarl.config.checks import check_config
from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.errors import ConfigError, DataError, ModelError, explain

_FIRST_ROWS = 3


def validate(recipe: str, overrides: Sequence[str] = ()) -> list[str]:
    """Load and check a recipe, its model directories, its data files' first rows and its reward file; returns what was found.

    Raises ConfigError, ModelError or DataError for the first thing that is wrong.
    """
    config = load_config(recipe, overrides)
    lines = check_config(config)
    for key, directory in (("model", config.model), ("reference", config.reference), ("critic.model", config.critic.model)):
        if directory is not None:
            lines.append(f"{key}: {directory}: {model_type(directory, key)}")
    for key, files in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
        ("warm_start.train_files", config.warm_start.train_files if config.warm_start.enabled else ()),
    ):
        lines += [_describe_file(key, file, config) for file in files]
    check_reward_source(config.reward.path, config.reward.name)
    lines.append(f"reward: {config.reward.path}: {config.reward.name}")
    return [*lines, f"{recipe}: sound"]


def model_type(directory: str, key: str) -> str:
    """``model_type`` of a Hugging Face directory that has weights and a tokenizer. Raises ModelError for any other."""
    root = Path(directory)
    present = sorted(path.name for path in root.iterdir()) if root.is_dir() else "no directory"
    wanted = {"config.json": ["config.json"], "weights": ["*.safetensors"], "a tokenizer": ["tokenizer.json", "tokenizer_config.json"]}
    for what, patterns in wanted.items():
        if not any(path for pattern in patterns for path in root.glob(pattern)):
            expected = f"{what}: {' or '.join(patterns)}"
            raise ModelError(explain("no Hugging Face model directory", where=f"{key}: {directory}", got=present, expected=expected))
    try:
        return str(json.loads((root / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (json.JSONDecodeError, KeyError) as error:
        where, got = f"{key}: {directory}/config.json", repr(error)
        raise ModelError(explain("a model configuration that names no model", where=where, got=got, expected="model_type")) from error


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
    return f"{key}: {file}: {count} rows; the first: {first.data_source}, {said!r} -> {first.ground_truth!r}"
