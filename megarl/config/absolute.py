"""Paths of a recipe, said so that they hold in every process: workers of a cluster that was joined stand in another directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megarl.config.schema import Config


def with_absolute_paths(config: Config) -> Config:
    """The same recipe with every path of its own made absolute; what is null stays null.

    The run's own copy of the recipe keeps its paths as they were written: it is compared with what the next start is given.
    """
    data, warm, critic = config.data, config.warm_start, config.critic
    return replace(
        config,
        model=_absolute(config.model),
        reference=config.reference and _absolute(config.reference),
        critic=replace(critic, model=critic.model and _absolute(critic.model)),
        data=replace(data, train_files=_all(data.train_files), val_files=_all(data.val_files)),
        warm_start=replace(warm, train_files=_all(warm.train_files)),
        reward=replace(config.reward, path=_absolute(config.reward.path)),
        run=replace(config.run, dir=_absolute(config.run.dir)),
    )


def paths_of_workers(config: Config) -> dict[str, str]:
    """Key of the recipe -> absolute path that worker processes read or write; what the recipe leaves out is not in it."""
    full = with_absolute_paths(config)
    found = {
        "model": full.model,
        "reference": full.reference,
        "critic.model": full.critic.model,
        "reward.path": full.reward.path,
        "run.dir": full.run.dir,
    }
    return {key: path for key, path in found.items() if path}


def _all(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_absolute(path) for path in paths)


def _absolute(path: str) -> str:
    return str(Path(path).absolute())
