"""``megarl validate``: everything about a recipe that can be known without starting a process or loading a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.config.checks import check_config
from megarl.config.load import load_config
from megarl.config.model_checks import check_model_files
from megarl.config.model_sizes import check_model_sizes, cuts_anything, model_directories
from megarl.config.path_checks import check_writable
from megarl.config.reward_checks import check_reward_source
from megarl.config.schema import Config
from megarl.errors import ConfigError, ModelError, explain

_FIRST_ROWS = 3


def validate(recipe: str, overrides: Sequence[str] = ()) -> list[str]:
    """Load and check a recipe, its model directories, its data files' first rows and its reward file; returns what was found.

    Raises ConfigError, ModelError or DataError for the first thing that is wrong.
    """
    config = load_config(recipe, overrides)
    lines = check_config(config)
    check_writable(config.run.dir)
    hf_configs = {key: model_config(directory, key) for key, directory in model_directories(config).items()}
    check_model_sizes(config, hf_configs)
    if cuts_anything(config):
        from megarl.controller.layout_checks import check_cuts  # torch, a second; most recipes for one device go without

        check_cuts(config, hf_configs)
    if not config.data.train_files:
        raise ConfigError(explain("no data files", where="data.train_files", got="[]", expected="a list of parquet files"))
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
    try:
        check_model_files(root)
    except ModelError as error:
        raise ModelError(f"{key} = {directory}: {error}") from error
    if key == "model" and not (root / "tokenizer_config.json").is_file():  # all roles read the tokens of the actor's tokenizer
        expected = "tokenizer_config.json, tokenizer.json"
        do = "copy the tokenizer's files too"
        raise ModelError(explain("a model directory without a tokenizer", where=f"{key}: {directory}", expected=expected, do=do))
    try:
        found = json.loads((root / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(explain("config.json is no JSON", where=f"{key}: {directory}/config.json", got=error)) from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        where = f"{key}: {directory}/config.json"
        raise ModelError(explain("a model configuration that names no model", where=where, got=str(found)[:80], expected="model_type"))
    return found


def _describe_file(key: str, file: str, config: Config) -> str:
    """Rows of a data file, and how its first one is understood."""
    import pyarrow.parquet as pq

    from megarl.data.parquet import read_records

    rows = list(islice(read_records((file,), config.data.prompt_key), _FIRST_ROWS))
    count = pq.read_metadata(file).num_rows
    first = rows[0]
    said = first.messages[-1]["content"]
    return f"{key}: {file}: {count} rows; the first: {first.data_source}, {said[:80]!r} -> {first.ground_truth!r}"
