"""A run goes on under other profile keys, and one that began before there were any goes on too."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.controller.bad_place import STARTED, train


@pytest.mark.parametrize("older", [False, True])
def test_a_run_goes_on(spoilable: Path, older: bool) -> None:
    recipe = Path("run/config.yaml")
    recorded = yaml.safe_load(recipe.read_text())
    assert recorded["profile"]["steps"] == []
    if older:
        del recorded["profile"]
        recipe.write_text(yaml.safe_dump(recorded))
    assert train("profile.steps=[2]", "profile.memory=true") == STARTED
    assert yaml.safe_load(recipe.read_text())["profile"]["steps"] == [2]
