"""The steps of a run that are profiled. The recording begins before a step's clock and is written after it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.cluster.profile import start_profile, stop_profile
from megarl.config.schema import ProfileConfig
from megarl.controller.context import Groups
from megarl.profiling import Recorded


class ProfiledSteps:
    """Records the steps that ``profile.steps`` names, into ``directory/step_N``. Failures are said once and counted."""

    def __init__(self, config: ProfileConfig, groups: Groups, directory: Path, say: Callable[[str], None]):
        named = {"actor": groups.actor, "critic": groups.critic, "rollout": groups.rollout}
        chosen = [named[name] for name in config.groups if named[name] is not None]
        self.groups = list({id(group): group for group in chosen}.values())  # a colocated critic is in the actor's processes
        self.config, self.directory, self._say = config, directory, say
        self.total = Recorded()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step ``number``; an error of the step itself leaves no files."""
        if number not in self.config.steps:
            yield
            return
        place = self.directory / f"step_{number}"
        shutil.rmtree(place, ignore_errors=True)  # of the same step before a resume
        failures = start_profile(self.groups, self.config, str(place))
        yield
        found = stop_profile(self.groups, self.config)
        failures += found.failures
        if failures and not self.total.failures:
            self._say(f"warning: a profile failed, and the run goes on (said once): {failures[0]}")
        self.total = Recorded(self.total.files + found.files, self.total.failures + failures)

    def close(self) -> dict[str, Any]:
        """Facts for run.json; empty where nothing was to be recorded. Says how it went."""
        if not self.total.files and not self.total.failures:
            return {}
        failed = f"; {len(self.total.failures)} recordings failed" if self.total.failures else ""
        self._say(f"profile: {len(self.total.files)} files in {self.directory}{failed}")
        first = self.total.failures[0] if self.total.failures else None
        return {"profile": {"files": len(self.total.files), "failed": len(self.total.failures), "first_failure": first}}
