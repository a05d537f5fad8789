"""Windows that could never be recorded are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.absolute import paths_of_workers, with_absolute_paths
from megarl.config.checks import check_config
from megarl.config.load import load_config
from megarl.errors import ConfigError
from tests.e2e.demo import ROOT

RECIPE = ROOT / "recipes" / "demo-cpu.yaml"


def check(*overrides: str) -> None:
    check_config(load_config(RECIPE, list(overrides)))


def test_sound_windows() -> None:
    check()
    check("profile.steps=[1,75]", "profile.ranks=[0,1]", "actor.layout.tensor=2", "profile.memory=true")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["profile.steps=[0]"], r"never come(.|\n)*got: +\[0\](.|\n)*from 1 to 75"),
        (["profile.steps=[3,76]"], r"got: +\[76\]"),
        (["profile.steps=[1]", "profile.groups=[rollouts]"], r"no such worker group(.|\n)*did you mean rollout"),
        (["profile.steps=[1]", "profile.groups=[]"], "steps to profile, and no worker group"),
        (["profile.ranks=[7]", "profile.groups=[critic,rollout]"], r"ranks that no worker group has(.|\n)*critic: \d, rollout: 1"),
    ],
)
def test_windows_that_never_come(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(*overrides)


def test_paths_hold_in_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(RECIPE, ["model=m", "reference=/r", "reward.path=sub/reward.py", "run.dir=../run", "data.train_files=[a,/b]"])
    full = with_absolute_paths(config)
    assert (full.model, full.reference, full.critic.model) == (f"{tmp_path}/m", "/r", None)
    assert full.data.train_files == (f"{tmp_path}/a", "/b")
    assert paths_of_workers(config) == {
        "model": f"{tmp_path}/m",
        "reference": "/r",
        "reward.path": f"{tmp_path}/sub/reward.py",
        "run.dir": f"{tmp_path}/../run",
    }
    assert with_absolute_paths(full) == full
