"""All that can be wrong without a worker: run directory, model, data, reward function. Nothing is started before this passes."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megarl.config.load import to_yaml
from megarl.config.schema import Config
from megarl.controller.context import RunPaths
from megarl.data.prompts import PreparedSummary, prepare_prompts
from megarl.data.supervised import prepare_supervised
from megarl.device import fingerprint
from megarl.errors import ConfigError, DataError, ModelError, explain
from megarl.rewards.pool import RewardPool
from megarl.weights.families import model_family, read_hf_config

# What may differ between a run and its resume; every other key decides the numbers.
FREE_KEYS = (
    "run.dir",
    "run.name",
    "run.total_steps",
    "run.save_every_steps",
    "run.keep_checkpoints",
    "run.eval_every_steps",
    "run.export_hf",
    "run.log_rollouts",
    "cluster.",
)


@dataclass(frozen=True)
class Prepared:
    """What the run needs to know of its data and tokenizer."""

    train_rows: int
    stop_token_ids: tuple[int, ...]


def prepare(config: Config, paths: RunPaths) -> Prepared:
    """Check everything and write the run's own files: the resolved recipe and the prepared prompts."""
    check_model(config.model)
    RewardPool(
        config.reward.path, config.reward.name, workers=1, timeout_s=config.reward.timeout_s
    ).close()  # it imports the file, in a process of its own
    open_run_directory(config, paths)
    from transformers import AutoTokenizer  # seconds of imports; not before the cheap checks

    tokenizer = AutoTokenizer.from_pretrained(config.model)
    stop_token_ids = stop_tokens(tokenizer, config.model)
    train = _prepare(config, tokenizer, config.data.train_files, paths.train_prompts)
    if config.data.val_files:
        val = _prepare(config, tokenizer, config.data.val_files, paths.val_prompts)
        if val.rows < config.data.val_prompts:
            raise DataError(
                explain(
                    "too few held-out prompts",
                    where="data.val_prompts",
                    got=f"{val.rows} rows",
                    expected=f"at least {config.data.val_prompts}",
                    do="lower data.val_prompts",
                )
            )
    if config.warm_start.enabled:
        prepare_supervised(
            config.warm_start.train_files,
            tokenizer,
            paths.supervised,
            prompt_key=config.data.prompt_key,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
        )
    return Prepared(train.rows, stop_token_ids)


def check_model(directory: str) -> None:
    """The model directory exists, is of a known family, and has weights and a tokenizer."""
    path = Path(directory)
    hf_config = read_hf_config(path)
    model_family(hf_config).megatron_kwargs(hf_config)
    if not list(path.glob("*.safetensors")):
        raise ModelError(
            explain(
                "a model directory without weights", where=directory, got=sorted(p.name for p in path.iterdir()), expected="*.safetensors"
            )
        )
    if not (path / "tokenizer_config.json").is_file():
        raise ModelError(explain("a model directory without tokenizer", where=directory, expected="tokenizer_config.json, tokenizer.json"))


def stop_tokens(tokenizer: Any, model: str) -> tuple[int, ...]:
    """End-of-sequence ids: the generation configuration's, which may be several, else the tokenizer's."""
    file = Path(model) / "generation_config.json"
    ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    ids = tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        raise ModelError(explain("no end-of-sequence token", where=model, do="set eos_token_id in generation_config.json"))
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def open_run_directory(config: Config, paths: RunPaths) -> None:
    """Create the run directory, or recognise it as this run's.

    Raises ConfigError for a directory that holds something else, can't be written, or belongs to a run with other numbers.
    """
    recipe = paths.root / "config.yaml"
    if paths.root.is_dir() and any(paths.root.iterdir()) and not recipe.is_file():
        raise ConfigError(
            explain(
                "the run directory holds something that is no run of megarl",
                where=str(paths.root),
                got=sorted(p.name for p in paths.root.iterdir())[:5],
                do="name another run.dir",
            )
        )
    if recipe.is_file():
        _refuse_changes(recipe, config)
    try:
        for directory in (paths.root / "data", paths.logs, paths.checkpoints):
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            explain("the run directory can't be written", where=str(paths.root), got=error, do="name another run.dir")
        ) from error
    if not os.access(paths.root, os.W_OK):
        raise ConfigError(explain("the run directory can't be written", where=str(paths.root), do="name another run.dir"))
    recipe.write_text(to_yaml(config))
    facts = paths.root / "run.json"
    known = json.loads(facts.read_text()) if facts.is_file() else {}
    facts.write_text(json.dumps(known | {"name": config.run.name, "versions": versions(), "fingerprint": fingerprint()}, indent=1))


def versions() -> dict[str, str]:
    """What this run runs on."""
    names = {"megarl": "megarl", "torch": "torch", "megatron-core": "megatron-core", "ray": "ray", "transformers": "transformers"}
    found = {label: version(name) for label, name in names.items()}
    return found | {"python": platform.python_version()}


def _refuse_changes(recipe: Path, config: Config) -> None:
    old, new = (_flat(OmegaConf.to_container(OmegaConf.create(text))) for text in (recipe.read_text(), to_yaml(config)))
    changed = [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old | new)
        if old.get(key) != new.get(key) and not key.startswith(FREE_KEYS)
    ]
    if changed:
        raise ConfigError(
            explain(
                "the run directory belongs to a run with other settings",
                where=str(recipe),
                got="; ".join(changed),
                do="name another run.dir, or take the changes back",
            )
        )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    return {k: v for name, sub in tree.items() for k, v in _flat(sub, f"{prefix}{name}.").items()}


def _prepare(config: Config, tokenizer: Any, files: tuple[str, ...], target: Path) -> PreparedSummary:
    return prepare_prompts(
        files,
        tokenizer,
        target,
        prompt_key=config.data.prompt_key,
        max_prompt_tokens=config.data.max_prompt_tokens,
        truncation=config.data.truncation,
    )
