"""A real run, ready for its first step: cluster, groups and roles, without the loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.cluster.placement import start_cluster
from megarl.config.schema import Config
from megarl.controller.context import Context, RunPaths
from megarl.controller.prepare import prepare
from megarl.controller.roles import load_roles, start_groups
from megarl.controller.run import new_context


def started(config: Config) -> Iterator[Context]:
    """To be used as a fixture's body: everything ends when the generator does."""
    paths = RunPaths(Path(config.run.dir))
    prepared = prepare(config, paths)
    leave = start_cluster(None)
    try:
        groups, _ = start_groups(config, paths)
        context = new_context(config, paths, groups, prepared)
        load_roles(groups, config, config.model)
        context.version += 1
        yield context
    finally:
        leave()
