"""From a recipe file to a frozen ``Config``: YAML, ``extends:``, then ``key=value`` overrides, each checked against the schema.

Relative paths inside a recipe (model, data files, reward.path, run.dir) are relative to the current directory, as on a command
line; only ``extends:`` is relative to the file that says it. Values are plain: no interpolation, no resolvers.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.keys import all_keys, type_name
from megarl.config.schema import REQUIRED, Config
from megarl.errors import ConfigError, explain

EXTENDS = "extends"
Origins = dict[str, str]  # dotted key -> where its value stands: "file:line" or "override 'a.b=c'"


def load_config(recipe_path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and what it extends, apply overrides ("actor.optim.lr=1e-6"; the value is YAML), and freeze the result.

    Mappings merge key by key, everything else replaces. Raises ConfigError for a missing or malformed file, a circle of
    ``extends``, an unknown key, a value of another type, and for all missing required keys at once ("???" is no value).
    """
    return _assemble(_chain(Path(recipe_path)), overrides, str(recipe_path))


def config_from_tree(tree: Mapping[str, Any], origins: Mapping[str, str], overrides: Sequence[str] = ()) -> Config:
    """A frozen configuration from keys that a program gives: nested mappings of plain values, as a recipe's.

    ``origins``: dotted key or group -> what errors name as its place. Raises ConfigError as :func:`load_config` does.
    """
    try:
        plain = OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=False)
    except OmegaConfBaseException as error:
        where = ", ".join(sorted(set(origins.values())))
        raise ConfigError(explain("a value that no recipe could hold", where=where, got=error, expected="numbers, texts, lists")) from error
    return _assemble([(plain, dict(origins))], overrides, "the arguments")


def _assemble(layers: Sequence[tuple[dict[str, Any], Origins]], overrides: Sequence[str], source: str) -> Config:
    """Merge the layers, base first, then the overrides; check and freeze the result."""
    origins: Origins = {}
    tree = OmegaConf.create({})
    for layer, where in layers:
        tree = OmegaConf.merge(tree, layer)
        origins |= where
    for override in overrides:
        tree = OmegaConf.merge(tree, _parse_override(override))
        origins[override.partition("=")[0]] = f"override '{override}'"
    plain = OmegaConf.to_container(tree, resolve=False)
    _refuse_unknown(plain, origins)
    _fill_unused(plain)
    missing: list[str] = []
    config = _build(Config, plain, "", origins, missing)
    if missing:
        docs = "\n".join(f"              {key}: {all_keys()[key].doc}" for key in missing)
        what = f"required keys without a value: {len(missing)}"
        raise ConfigError(explain(what, where=source, expected="a value for\n" + docs))
    return config


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML, defaults included; ``load_config`` of it gives the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(asdict(config))))


def nearest(name: str, choices: Sequence[str]) -> str:
    """The choice that ``name`` was most likely meant to be; empty when none is near."""
    exact_leaf = [choice for choice in choices if choice.rpartition(".")[2] == name.rpartition(".")[2]]
    found = difflib.get_close_matches(name, exact_leaf, n=1, cutoff=0.0) or difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    return found[0] if found else ""


def _chain(path: Path) -> list[tuple[dict[str, Any], Origins]]:
    """The recipe after all that it extends, base first: each file's tree, and where its keys stand."""
    layers: list[tuple[dict[str, Any], Origins]] = []
    seen: list[Path] = []
    while True:
        layer, origins = _read(path, said_by=seen[-1] if seen else None)
        seen.append(path)
        base = layer.pop(EXTENDS, None)
        layers.append((layer, origins))
        if base is None:
            return layers[::-1]
        if not isinstance(base, str):
            raise ConfigError(explain(f"{EXTENDS} names one file", where=origins[EXTENDS], got=repr(base), expected="a path"))
        path = path.parent / base
        if path.resolve() in (one.resolve() for one in seen):
            circle = " -> ".join(str(one) for one in [*seen, path])
            raise ConfigError(explain("recipes extend each other in a circle", where=origins[EXTENDS], got=circle, do="take one link away"))


def _read(path: Path, said_by: Path | None) -> tuple[dict[str, Any], Origins]:
    """A file's tree, and where each of its keys stands."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        where = f"{EXTENDS} of {said_by}" if said_by else "the command line"
        raise ConfigError(explain(f"a recipe can't be read: {path}", where=where, got=error, do="check the path")) from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return {}, {}
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(explain("a recipe is not valid YAML", where=f"{path}:{line}", got=error.problem, do="mend the line")) from error
    except OmegaConfBaseException as error:
        raise ConfigError(explain("a recipe can't be read as a configuration", where=str(path), got=error)) from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(explain("a recipe is a mapping of keys", where=str(path), got=type_of(tree), expected="lines of key: value"))
    return tree, {key: f"{path}:{line}" for key, line in _lines(node, "")}


def _lines(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, int]]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _lines(value, name + ".")


def _parse_override(override: str) -> Any:
    where = f"override '{override}'"
    key, equals, _ = override.partition("=")
    if not equals or not key:
        raise ConfigError(explain("an override has no value", where=where, expected="key=value, as in actor.optim.lr=1e-6"))
    if key not in all_keys():
        raise _unknown(key, where)
    try:
        return OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(explain("the value of an override is not valid YAML", where=where, got=error, do="quote the value")) from error


def _refuse_unknown(tree: dict[Any, Any], origins: Origins, prefix: str = "") -> None:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key not in all_keys():
            raise _unknown(key, _where(key, origins))
        if isinstance(value, dict) and all_keys()[key].is_group:
            _refuse_unknown(value, origins, key + ".")


def _fill_unused(tree: dict[str, Any]) -> None:
    """Without a critic nothing reads its batch size, so that a recipe need not name one; it takes the actor's."""
    estimator = _subtree(tree, "algorithm").get("advantage_estimator", all_keys()["algorithm.advantage_estimator"].default)
    name = "samples_per_mini_batch"
    if estimator != "gae" and isinstance(tree.setdefault("critic", {}), dict) and name in _subtree(tree, "actor"):
        tree["critic"].setdefault(name, tree["actor"][name])


def _subtree(tree: dict[str, Any], name: str) -> dict[str, Any]:
    group = tree.get(name, {})
    return group if isinstance(group, dict) else {}


def _where(key: str, origins: Origins) -> str:
    """Where a key, or else the nearest group around it, was written."""
    while key and key not in origins:
        key = key.rpartition(".")[0]
    return origins.get(key, "")


def _unknown(key: str, where: str) -> ConfigError:
    near = nearest(key, list(all_keys()))
    do = f"did you mean {near}?" if near else "see `megarl config list`"
    return ConfigError(explain(f"unknown key {key}", where=where, do=do))


def _build(cls: type, tree: Any, prefix: str, origins: Origins, missing: list[str]) -> Any:
    hints = get_type_hints(cls)
    values = {}
    for item in fields(cls):
        key = prefix + item.name
        hint, given = hints[item.name], item.name in tree
        if is_dataclass(hint):
            group = tree.get(item.name, {})
            if not isinstance(group, dict):
                raise _wrong_type(key, group, hint, origins)
            values[item.name] = _build(hint, group, key + ".", origins, missing)
        elif (tree[item.name] if given else all_keys()[key].default) == REQUIRED:
            missing.append(key)
        else:
            # the default of the key's place, not of its class: critic.optim.lr differs from actor.optim.lr
            values[item.name] = _convert(tree[item.name], hint, key, origins) if given else all_keys()[key].default
    return None if missing else cls(**values)


def _convert(value: Any, hint: Any, key: str, origins: Origins) -> Any:
    """``value`` as ``hint`` says. Only an integer where a float is asked for changes its type; nothing is guessed."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = next(arg for arg in get_args(hint) if arg is not type(None))
        return None if value is None else _convert(value, inner, key, origins)
    if get_origin(hint) is tuple:
        args = get_args(hint)
        if not isinstance(value, list) or (args[-1] is not ... and len(value) != len(args)):
            raise _wrong_type(key, value, hint, origins)
        return tuple(_convert(v, args[0], key, origins) for v in value)
    if isinstance(value, str) and "${" in value:
        raise ConfigError(explain(f"{key} holds an interpolation", where=_where(key, origins), got=value, do="write the value itself"))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        raise _wrong_type(key, value, hint, origins)
    return value


def _wrong_type(key: str, value: Any, hint: Any, origins: Origins) -> ConfigError:
    finite = "finite " if isinstance(value, float) and not math.isfinite(value) else ""
    do = f"write {key}: [{value}]" if get_origin(hint) is tuple and isinstance(value, str) else ""
    do = f'quote it: "{value}"' if hint is str and not isinstance(value, dict | list | None) else do
    got = f"{value!r} ({type_of(value)})"
    return ConfigError(explain(f"{key} has the wrong type", where=_where(key, origins), got=got, expected=finite + type_name(hint), do=do))


def type_of(value: Any) -> str:
    """The name of a YAML value's type."""
    names = {dict: "group of keys", list: "list", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
