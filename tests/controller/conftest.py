"""A sound recipe for tests to spoil: ask for ``place``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import megarl.controller.run as run_module
from megarl.checkpoint.store import CheckpointStore
from tests.controller.bad_place import STARTED, make_sound, train, tripwire


@pytest.fixture(scope="session")
def sound_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sound recipe, and in ``run`` a run of it that has done a step."""
    place = tmp_path_factory.mktemp("sound")
    make_sound(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(run_module, "start_cluster", tripwire)
        assert train() == STARTED
        store = CheckpointStore(Path("run/checkpoints").resolve(), keep=2)
        store.commit(store.begin(1, ("actor",)), 1, {"step": 1})
    return place


@pytest.fixture
def spoilable(sound_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may spoil, as the current directory; what starts workers is a tripwire."""
    shutil.copytree(sound_place, tmp_path / "spoilable")
    monkeypatch.chdir(tmp_path / "spoilable")
    monkeypatch.setattr(run_module, "start_cluster", tripwire)
    return tmp_path / "spoilable"
