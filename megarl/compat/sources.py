"""Where a trainer by hand gets its prompts and its scores from: datasets and reward functions, as keys of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.compat import unscored
from megarl.errors import ConfigError, DataError, explain

_MAX_PROMPT, _MAX_RESPONSE = 512, 256  # tokens, where only files are given


def is_files(dataset: Any) -> bool:
    """Whether a dataset is named by parquet files: a path, or a list of paths."""
    return isinstance(dataset, (str, Path)) or (
        isinstance(dataset, (list, tuple)) and len(dataset) > 0 and all(isinstance(item, (str, Path)) for item in dataset)
    )


def data_keys(train: Any, val: Any) -> tuple[dict[str, Any], int]:
    """The group ``data``, and the longest response in tokens.

    A dataset is parquet files, or samples by index as RLHFDataset has them, whose own limits then hold. Raises ConfigError or DataError
    for anything else, and for held-out data of the other kind.
    """
    keys: dict[str, Any] = {"train_files": [], "max_prompt_tokens": _MAX_PROMPT}
    longest = _MAX_RESPONSE
    for where, dataset in (("train_dataset", train), ("val_dataset", val)):
        if dataset is not None and not is_files(dataset):
            _check_samples(dataset, where)
    if val is not None and train is not None and is_files(val) != is_files(train):
        raise ConfigError(
            explain("train_dataset and val_dataset of different kinds", where="val_dataset", expected="files both, or samples both")
        )
    if is_files(train):
        keys["train_files"] = _files(train)
        keys |= {"val_files": _files(val)} if val is not None else {}
    elif train is not None:
        lengths = (len(_sample(train, i, "train_dataset")["input_ids"]) for i in range(len(train)))
        keys["max_prompt_tokens"] = getattr(train, "max_prompt_length", None) or max(lengths)
        longest = getattr(train, "max_response_length", _MAX_RESPONSE)
    return keys, longest


def _files(files: Any) -> list[str]:
    return [str(f) for f in ([files] if isinstance(files, (str, Path)) else files)]


def _check_samples(dataset: Any, where: str) -> None:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        expected = "an RLHFDataset, a parquet file, or a list of them"
        raise ConfigError(explain("a dataset of another kind", where=where, got=type(dataset).__name__, expected=expected))
    if not len(dataset):
        raise DataError(explain("a dataset without samples", where=where, got="0 samples", expected="at least one"))
    _sample(dataset, 0, where)


def _sample(dataset: Any, index: int, where: str) -> dict[str, Any]:
    sample = dataset[index]
    if not isinstance(sample, dict) or "input_ids" not in sample:
        got = sorted(sample) if isinstance(sample, dict) else type(sample).__name__
        expected = "a dict with input_ids, as of RLHFDataset"
        raise DataError(explain("a sample of another kind", where=f"{where}[{index}]", got=got, expected=expected))
    return sample


def reward_keys(reward_fn: str | Path | Callable[..., Any] | None) -> dict[str, Any]:
    """The group ``reward``: "file.py" (its ``compute_score``), "file.py:name", or a function at the top level of a module.

    Raises ConfigError for a function that the reward's own process couldn't import.
    """
    if reward_fn is None:
        return {"path": unscored.__file__}
    if isinstance(reward_fn, (str, Path)):
        path, colon, name = str(reward_fn).rpartition(":")
        return {"path": path, "name": name} if colon and name.isidentifier() else {"path": str(reward_fn)}
    file = inspect.getsourcefile(reward_fn) if inspect.isfunction(reward_fn) else None
    if file is None or not Path(file).is_file() or reward_fn.__qualname__ != reward_fn.__name__ or reward_fn.__module__ == "__main__":
        raise ConfigError(
            explain(
                "a reward function that another process can't import",
                where="reward_fn",
                got=f"{getattr(reward_fn, '__module__', '')}.{getattr(reward_fn, '__qualname__', repr(reward_fn))}",
                expected="a function at the top level of a module that is not the program itself",
                do='put it into a file of its own and pass "that_file.py:its_name"',
            )
        )
    return {"path": str(file), "name": reward_fn.__name__}
