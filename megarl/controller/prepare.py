"""All that can be wrong without a worker: run directory, models, reward function, data. Nothing is started before this passes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.config.model_sizes import check_model_sizes, model_directories
from megarl.config.schema import Config, LayoutConfig
from megarl.controller.context import RunPaths
from megarl.controller.run_directory import check_run_directory, digests, publish, staging
from megarl.data.prompts import PreparedSummary, prepare_prompts
from megarl.data.supervised import prepare_supervised
from megarl.errors import DataError, ModelError, explain
from megarl.rewards.pool import RewardPool
from megarl.types import Layout
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.hf_io import load_into

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prepared:
    """What the run needs to know of its data and tokenizer."""

    train_rows: int
    stop_token_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()  # lines to print: rows kept, dropped and cut; what differs from the run's last start


def prepare(config: Config, paths: RunPaths) -> Prepared:
    """Check everything, then write the run's own files: the resolved recipe and the prepared prompts.

    A refusal leaves the run directory as it was, so that the corrected recipe may use it.

    Raises ConfigError, ModelError or DataError for the first thing that is wrong.
    """
    check_run_directory(config, paths)
    check_models(config)
    RewardPool(
        config.reward.path, config.reward.name, workers=1, timeout_s=config.reward.timeout_s
    ).close()  # it imports the file, in a process of its own
    tokenizer = load_tokenizer(config.model)
    stop_token_ids = stop_tokens(tokenizer, config)
    with staging(paths) as staged:
        train, notes = prepare_data(config, tokenizer, staged)
        files = {f"{key}/config.json": Path(directory) / "config.json" for key, directory in model_directories(config).items()}
        inputs = digests(staged, {"reward.path": Path(config.reward.path)} | files)
        notes += publish(config, paths, staged, inputs)
    return Prepared(train.rows, stop_token_ids, tuple(notes))


def check_models(config: Config) -> None:
    """The model of every role: a known family, whole weights, and sizes that its layout can cut and that fit the other roles.

    Raises ModelError that names the key of the recipe.
    """
    directories = model_directories(config)
    hf_configs = {}
    for key, directory in directories.items():
        head, role = ("value", "critic") if key == "critic.model" else ("lm", "actor")
        layout = config.critic.layout if role == "critic" else config.actor.layout
        try:
            hf_configs[key] = read_hf_config(directory)
            model_family(hf_configs[key]).megatron_kwargs(hf_configs[key])
            _check_shards(directory, hf_configs[key], _layout(layout), head)
        except ModelError as error:
            cut = f"{role}.layout: tensor {layout.tensor}, pipeline {layout.pipeline}"
            raise ModelError(f"{key} = {directory} ({cut}): {error}") from error
    check_model_sizes(config, hf_configs)


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory. Raises ModelError where there is none, or a damaged one."""
    file = Path(directory) / "tokenizer_config.json"
    if not file.is_file():
        raise ModelError(explain("a model directory without tokenizer", where=directory, expected="tokenizer_config.json, tokenizer.json"))
    from transformers import AutoTokenizer  # seconds of imports; not before the cheap checks

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        do = "copy the model directory again"
        raise ModelError(explain("the tokenizer can't be loaded", where=directory, got=error, do=do)) from error


def stop_tokens(tokenizer: PreTrainedTokenizerBase, config: Config) -> tuple[int, ...]:
    """End-of-sequence ids: the generation configuration's, which may be several, else the tokenizer's.

    Raises ModelError for none, for anything that is no token id, and for a warm start that would teach an end which doesn't stop
    generation.
    """
    file = Path(config.model) / "generation_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    except (ValueError, AttributeError) as error:
        raise ModelError(explain("generation_config.json is no JSON object", where=str(file), got=error)) from error
    found = tokenizer.eos_token_id if found is None else found
    ids = found if isinstance(found, list) else [found]
    if found is None or not ids or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(
            explain(
                "no end-of-sequence token",
                where=config.model,
                got=repr(found),
                expected="one token id, or several",
                do="set eos_token_id in generation_config.json",
            )
        )
    if config.warm_start.enabled and tokenizer.eos_token_id not in ids:
        raise ModelError(
            explain(
                "the warm start teaches the tokenizer's end of sequence, and generation doesn't stop there",
                where=str(file),
                got=f"eos_token_id {ids}; the tokenizer's is {tokenizer.eos_token_id}",
                expected="the tokenizer's among them",
                do="add it to eos_token_id in generation_config.json",
            )
        )
    return tuple(ids)


def prepare_data(config: Config, tokenizer: PreTrainedTokenizerBase, target: RunPaths) -> tuple[PreparedSummary, list[str]]:
    """Write the data files of ``target``; returns what became of the training prompts, and a line a file."""
    train = _prepare(config, tokenizer, config.data.train_files, target.train_prompts)
    notes = [_describe("data.train_files", train)]
    if config.data.val_files:
        val = _prepare(config, tokenizer, config.data.val_files, target.val_prompts)
        notes.append(_describe("data.val_files", val))
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
        pairs = prepare_supervised(
            config.warm_start.train_files,
            tokenizer,
            target.supervised,
            prompt_key=config.data.prompt_key,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
        )
        notes.append(f"warm_start.train_files: {pairs} pairs")
    return train, notes


def _layout(layout: LayoutConfig) -> Layout:
    return Layout(**{name: getattr(layout, name) for name in layout.__dataclass_fields__})


def _check_shards(directory: str, hf_config: dict, layout: Layout, head: str) -> None:
    """Every rank's part exists, and the directory holds each tensor of it in its shape; no weight is read."""
    family = model_family(hf_config)
    for pipeline in range(layout.pipeline):
        for tensor in range(layout.tensor):
            shards = family.shard(hf_config, layout, tensor, pipeline, head=head)
            # Without elements to copy, loading is a check of names and shapes alone.
            empty = {name: replace(shard, shape=(0,), copies=()) for name, shard in shards.items()}
            load_into({name: torch.empty(0) for name in empty}, empty, directory)


def _describe(key: str, summary: PreparedSummary) -> str:
    """Dropped and cut prompts are named even when there are none, so that the line is the same to look for in every run."""
    kept = f"{summary.rows} prompts of up to {summary.max_tokens} tokens"
    return f"{key}: {kept}; overlong: {summary.dropped} dropped, {summary.truncated} truncated"


def _prepare(config: Config, tokenizer: PreTrainedTokenizerBase, files: tuple[str, ...], target: Path) -> PreparedSummary:
    return prepare_prompts(
        files,
        tokenizer,
        target,
        prompt_key=config.data.prompt_key,
        max_prompt_tokens=config.data.max_prompt_tokens,
        truncation=config.data.truncation,
    )
