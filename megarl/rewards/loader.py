"""Find the user's reward function. Runs in the reward process: the trainer itself never imports a user's reward file."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError, explain

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(path: str, name: str) -> Callable[..., Any]:
    """The function ``name`` of the Python file ``path``; its folder is importable for it.

    Whatever the file raises while it is imported goes through.

    Raises:
        ConfigError: no such file, no such function, or one that can't be called with data_source, solution_str, ground_truth
            and extra_info by keyword.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(explain("reward file not found", where="reward.path", got=path, expected="a Python file"))
    sys.path.insert(0, str(file.resolve().parent))
    module = _import(file)
    if name not in vars(module):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        raise ConfigError(
            explain(
                f"no function '{name}' in the reward file",
                where=f"reward.name, {path}",
                got=", ".join(functions) or "no functions",
                expected=name,
            )
        )
    function = vars(module)[name]
    if not callable(function):
        raise ConfigError(explain(f"'{name}' is no function", where=f"reward.name, {path}", got=type(function).__name__))
    _check_signature(function, f"{path}: {name}")
    return function


def _import(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("megarl_user_reward", file)
    if spec is None or spec.loader is None:
        raise ConfigError(explain("reward file is no Python file", where="reward.path", got=str(file), expected="a name that ends in .py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling in the user's file look it up
    spec.loader.exec_module(module)
    return module


def _check_signature(function: Callable[..., Any], where: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a builtin without a signature: the first call tells
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise ConfigError(
            explain(
                "reward function with another signature",
                where=where,
                got=f"{function.__name__}{signature}: {error}",
                expected=f"({', '.join(ARGUMENTS[:3])}, extra_info=None, **kwargs), called by keyword",
            )
        ) from error
