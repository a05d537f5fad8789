"""Can the recipe's layouts cut its models? Known from their ``config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from megarl.config.model_sizes import layout_of, model_directories
from megarl.config.schema import Config
from megarl.controller.engine_checks import check_engine_cut
from megarl.errors import ModelError
from megarl.types import Layout, Rank
from megarl.weights.families import model_family


def check_cuts(config: Config, hf_configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Every role's layout fits its model, and the engine's ranks the actor; no file is read.

    ``hf_configs``: key of the recipe -> parsed ``config.json``. Raises ModelError or ConfigError that names the key of the recipe.
    """
    for key in model_directories(config):
        with naming(config, key):
            check_cut(config, key, hf_configs[key])
    check_engine_cut(config, hf_configs["model"])


def check_cut(config: Config, key: str, hf_config: Mapping[str, Any]) -> None:
    """The layout of the role at ``key`` fits its model. Raises ModelError."""
    layout, head = layout_of(config, key), head_of(key)
    model_family(hf_config).shard(hf_config, Rank(0, Layout(**{f.name: getattr(layout, f.name) for f in fields(layout)})), head=head)


@contextmanager
def naming(config: Config, key: str) -> Iterator[None]:
    """Put the key of the recipe, its directory and its layout before what a ModelError says."""
    try:
        yield
    except ModelError as error:
        layout, role = layout_of(config, key), "critic" if key == "critic.model" else "actor"
        cut = f"{role}.layout: " + ", ".join(f"{f.name} {getattr(layout, f.name)}" for f in fields(layout) if f.type == "int")
        raise ModelError(f"{key} = {model_directories(config)[key]} ({cut}): {error}") from error


def head_of(key: str) -> str:
    """What the role at ``key`` computes from its last layer: "lm" or "value"."""
    return "value" if key == "critic.model" else "lm"
