"""A dataset of samples (RLHFDataset, or anything that gives the same dicts by index) as the file of prompts that workers read.

What is trained on is what ``dataset[i]["input_ids"]`` shows: the dataset's own truncation, language and order of rows hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.config.model_sizes import model_directories
from megarl.config.schema import Config
from megarl.controller.context import RunPaths
from megarl.controller.critic_tokenizer import critic_files, critic_notes
from megarl.controller.prepare import Prepared, check_models, check_template, load_tokenizer, parse_reward_file
from megarl.controller.run_directory import check_run_directory, digests, publish, staging
from megarl.controller.stop_tokens import stop_tokens
from megarl.data.arrow_file import write_rows
from megarl.data.parquet import to_json
from megarl.data.prompts import KIND, SCHEMA, in_batches
from megarl.errors import DataError, explain
from megarl.rewards.pool import RewardPool
from megarl.weights.families import read_hf_config

_NEEDED = ("input_ids", "prompt", "data_source", "ground_truth")


def prepare_samples(config: Config, paths: RunPaths, train: Any, val: Any) -> Prepared:
    """What :func:`megarl.controller.prepare.prepare` does of a recipe's files, of datasets: check everything, then write.

    Raises ConfigError, ModelError or DataError for the first thing that is wrong; the run directory is as it was then.
    """
    check_run_directory(config, paths)
    check_models(config)
    parse_reward_file(config.reward.path)
    RewardPool(config.reward.path, config.reward.name, workers=1, timeout_s=config.reward.timeout_s).close()
    tokenizer = load_tokenizer(config.model)
    check_template(tokenizer, config.model)
    stop_token_ids = stop_tokens(tokenizer, config)
    vocabulary = int(read_hf_config(config.model)["vocab_size"])
    with staging(paths) as staged:
        rows = write_samples(train, staged.train_prompts, config.data.max_prompt_tokens, vocabulary, "train_dataset")
        notes = [f"train_dataset: {rows} prompts"]
        if val is not None:
            held_out = write_samples(val, staged.val_prompts, config.data.max_prompt_tokens, vocabulary, "val_dataset")
            notes.append(f"val_dataset: {held_out} prompts")
            if held_out < config.data.val_prompts:
                do = f"overrides=['data.val_prompts={held_out}']"
                expected = f"at least {config.data.val_prompts} (data.val_prompts)"
                raise DataError(explain("too few held-out prompts", where="val_dataset", got=f"{held_out} rows", expected=expected, do=do))
        inputs = {"reward.path": Path(config.reward.path)} | critic_files(config)
        inputs |= {f"{key}/config.json": Path(directory) / "config.json" for key, directory in model_directories(config).items()}
        notes += critic_notes(config)
        notes += publish(config, paths, staged, digests(staged, inputs))
    return Prepared(rows, stop_token_ids, tuple(notes))


def write_samples(dataset: Any, target: Path, max_prompt_tokens: int, vocabulary: int, where: str) -> int:
    """Write the prompts of a dataset to ``target``; returns their number. Raises DataError for a sample that is none, with its index."""
    return write_rows(target, KIND, SCHEMA, in_batches(_rows(dataset, max_prompt_tokens, vocabulary, where)))


def _rows(dataset: Any, max_prompt_tokens: int, vocabulary: int, where: str) -> Iterator[dict[str, Any]]:
    for index in range(len(dataset)):
        sample = dataset[index]
        place = f"{where}[{index}]"
        missing = [name for name in _NEEDED if not isinstance(sample, dict) or name not in sample]
        if missing:
            got = sorted(sample) if isinstance(sample, dict) else type(sample).__name__
            raise DataError(explain(f"a sample without {', '.join(missing)}", where=place, got=got, expected=", ".join(_NEEDED)))
        tokens = sample["input_ids"]
        if not 0 < len(tokens) <= max_prompt_tokens:
            raise DataError(
                explain("a prompt of another length", where=place, got=f"{len(tokens)} tokens", expected=f"1 to {max_prompt_tokens}")
            )
        if not all(0 <= token < vocabulary for token in tokens):
            raise DataError(explain("a token outside the model's vocabulary", where=place, got=max(tokens), expected=f"below {vocabulary}"))
        yield {
            "tokens": tokens,
            "text": sample["prompt"],
            "data_source": sample["data_source"],
            "ground_truth": to_json(sample["ground_truth"], f"{place}, ground_truth"),
            "extra_info": to_json(sample.get("extra_info") or {}, f"{place}, extra_info"),
            "extra_columns": "{}",
            "source": sample.get("source", place),
        }
