"""Is the reward file Python, and does it define a function that can be called as rewards are? It is read and never run."""

from __future__ import annotations

import ast
from pathlib import Path

from megarl.errors import ConfigError, explain

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # all by keyword


def check_reward_source(path: str, name: str) -> None:
    """Raise ConfigError for a reward file that doesn't bind ``name``, or defines it with another signature.

    What only running the file can tell is left to the reward process: that is where its code belongs.
    """
    tree = parse_reward_file(path)
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    imported = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    if "*" not in imported and name not in bound | defined | imported:
        got = ", ".join(sorted(defined)) or "no functions"
        do = "set reward.name to a function of the file"
        raise ConfigError(explain(f"no function '{name}' in the reward file", where=f"reward.name, {path}", got=got, expected=name, do=do))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name]
    if functions and name not in bound | imported and not functions[-1].decorator_list:
        _check_signature(functions[-1], path)


def parse_reward_file(path: str) -> ast.Module:
    """The file's syntax tree. Raises ConfigError for no file, or one that is not Python."""
    file = Path(path)
    try:
        if not file.is_file():
            do = "paths are relative to the current directory; correct reward.path"
            raise ConfigError(explain("reward file not found", where="reward.path", got=path, expected="a Python file", do=do))
        source = file.read_bytes()
    except OSError as error:
        raise ConfigError(explain("the reward file can't be read", where="reward.path", got=error, do="mend its permissions")) from error
    do = "mend the line; the file is Python like any other"
    try:
        return ast.parse(source, filename=path)  # bytes: a declared encoding is Python's own affair
    except SyntaxError as error:
        where = f"{path}:{error.lineno}"
        raise ConfigError(explain("the reward file is not Python", where=where, got=error.msg, do=do)) from error
    except ValueError as error:
        raise ConfigError(explain("the reward file is not Python", where=path, got=error, do="name a text file of Python")) from error


def _check_signature(function: ast.FunctionDef | ast.AsyncFunctionDef, path: str) -> None:
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    needed = {arg.arg for arg in positional[: len(positional) - len(spec.defaults)]}
    needed |= {arg.arg for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is None}
    taken = {arg.arg for arg in (*spec.args, *spec.kwonlyargs)}
    refused = [] if spec.kwarg else [argument for argument in ARGUMENTS if argument not in taken]
    asked = sorted(needed - set(ARGUMENTS)) + sorted(arg.arg for arg in spec.posonlyargs if arg.arg in needed and arg.arg in ARGUMENTS)
    if refused or asked:
        got = f"{function.name}({ast.unparse(spec)})"
        raise ConfigError(
            explain(
                "reward function with another signature",
                where=f"{path}:{function.lineno}",
                got=f"{got}: {f'takes no {refused[0]}' if refused else f'asks for {asked[0]}'}",
                expected=f"({', '.join(ARGUMENTS[:3])}, extra_info=None, **kwargs), called by keyword",
                do="give it these arguments; **kwargs takes those that it doesn't use",
            )
        )
