"""All that can be wrong without a worker: run directory, models, reward function, data. Nothing is started before this passes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.model_checks import check_model_files
from megarl.config.model_sizes import check_model_sizes, model_directories
from megarl.config.reward_checks import parse_reward_file
from megarl.config.schema import Config
from megarl.controller.context import RunPaths
from megarl.controller.critic_tokenizer import check_critic_tokenizer, critic_files, critic_notes
from megarl.controller.engine_checks import check_engine
from megarl.controller.layout_checks import check_cut, head_of, naming
from megarl.controller.run_directory import check_run_directory, digests, publish, staging
from megarl.controller.stop_tokens import stop_tokens
from megarl.data.prompts import PreparedSummary, prepare_prompts
from megarl.data.supervised import prepare_supervised
from megarl.errors import DataError, ModelError, explain
from megarl.rewards.pool import RewardPool
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.hf_checks import check_tensors

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
    parse_reward_file(config.reward.path)
    RewardPool(
        config.reward.path, config.reward.name, workers=1, timeout_s=config.reward.timeout_s
    ).close()  # it imports the file, in a process of its own
    tokenizer = load_tokenizer(config.model)
    check_template(tokenizer, config.model)
    stop_token_ids = stop_tokens(tokenizer, config)
    with staging(paths) as staged:
        train, notes = prepare_data(config, tokenizer, staged)
        files = {f"{key}/config.json": Path(directory) / "config.json" for key, directory in model_directories(config).items()}
        inputs = digests(staged, {"reward.path": Path(config.reward.path)} | files | critic_files(config))
        notes += critic_notes(config)
        notes += publish(config, paths, staged, inputs)
    return Prepared(train.rows, stop_token_ids, tuple(notes))


def check_models(config: Config) -> None:
    """The model of every role: a known family, whole weights that are the model's and finite, and sizes that its layout can cut and that
    fit the other roles and the engine.

    Raises ModelError that names the key of the recipe.
    """
    directories = model_directories(config)
    hf_configs = {}
    read: set[str] = set()  # most roles have one directory
    for key, directory in directories.items():
        with naming(config, key):
            check_model_files(directory)
            hf_configs[key] = read_hf_config(directory)
            model_family(hf_configs[key]).check_computed(hf_configs[key])
            check_cut(config, key, hf_configs[key])
            check_tensors(directory, hf_configs[key], head_of(key), read=directory not in read)
            read.add(directory)
    check_critic_tokenizer(config, load_tokenizer)
    check_model_sizes(config, hf_configs)
    check_engine(config, hf_configs["model"])


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory. Raises ModelError where there is none, or a damaged one."""
    file = Path(directory) / "tokenizer_config.json"
    if not file.is_file():
        raise ModelError(explain("a model directory without tokenizer", where=directory, expected="tokenizer_config.json, tokenizer.json"))
    from transformers import AutoTokenizer  # seconds of imports; not before the cheap checks

    do = "copy the model directory again, or install the release of tokenizers that wrote it"
    _check_tokenizer_file(Path(directory) / "tokenizer.json", do)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(explain("the tokenizer can't be loaded", where=directory, got=error, do=do)) from error
    files = sorted({name for name in tokenizer.vocab_files_names.values() if name})
    if files and not any((Path(directory) / name).is_file() for name in files):  # transformers makes an empty one without a word
        raise ModelError(explain("a tokenizer without vocabulary", where=directory, expected=" | ".join(files), do=do))
    return tokenizer


def _check_tokenizer_file(file: Path, do: str) -> None:
    """Raise ModelError for a damaged tokenizer.json. In a process of its own: the errors of the tokenizers package have no class."""
    if not file.is_file():
        return
    source = "import sys, tokenizers; tokenizers.Tokenizer.from_file(sys.argv[1])"
    child = subprocess.run([sys.executable, "-c", source, str(file)], capture_output=True, text=True, check=False)
    if child.returncode:
        said = child.stderr.strip().rpartition("\n")[2]
        raise ModelError(explain("the tokenizer can't be loaded", where=str(file), got=said, do=do))


def check_template(tokenizer: PreTrainedTokenizerBase, directory: str) -> None:
    """Raise ModelError for a tokenizer without chat template."""
    if not tokenizer.chat_template:
        raise ModelError(
            explain(
                "the tokenizer has no chat template, so that prompts of messages can't become tokens",
                where=directory,
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                do="copy the template of the model's instruct version, or write one",
            )
        )


def prepare_data(config: Config, tokenizer: PreTrainedTokenizerBase, target: RunPaths) -> tuple[PreparedSummary, list[str]]:
    """Write the data files of ``target``; returns what became of the training prompts, and a line a file."""
    train = _prepare(config, tokenizer, config.data.train_files, target.train_prompts)
    notes = [_describe("data.train_files", train, config.data.truncation)]
    if config.data.val_files:
        val = _prepare(config, tokenizer, config.data.val_files, target.val_prompts)
        notes.append(_describe("data.val_files", val, config.data.truncation))
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
            vocabulary=_vocabulary(config),
        )
        notes.append(f"warm_start.train_files: {pairs} pairs")
    return train, notes


def _describe(key: str, summary: PreparedSummary, truncation: str) -> str:
    """Dropped and cut prompts are named even when there are none, so that the line is the same to look for in every run."""
    kept = f"{summary.rows} prompts of up to {summary.max_tokens} tokens"
    lost = ", without the opening of the assistant's turn" if truncation == "right" and summary.truncated else ""
    return f"{key}: {kept}; overlong: {summary.dropped} dropped, {summary.truncated} truncated{lost}"


def _prepare(config: Config, tokenizer: PreTrainedTokenizerBase, files: tuple[str, ...], target: Path) -> PreparedSummary:
    return prepare_prompts(
        files,
        tokenizer,
        target,
        prompt_key=config.data.prompt_key,
        max_prompt_tokens=config.data.max_prompt_tokens,
        truncation=config.data.truncation,
        vocabulary=_vocabulary(config),
    )


def _vocabulary(config: Config) -> int:
    return int(read_hf_config(config.model)["vocab_size"])
