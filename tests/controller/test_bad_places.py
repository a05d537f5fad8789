"""Files and run directories that can't be read or written, are in use, or are somebody else's: refused, and left alone."""

from __future__ import annotations

import json
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.checkpoint.lock import RunLock
from megarl.config.model_checks import check_model_files
from megarl.config.reward_checks import parse_reward_file
from megarl.controller.run_directory import claimed
from megarl.data.parquet import read_records
from megarl.errors import ConfigError, DataError, ModelError
from tests.controller.bad_place import assert_nothing_lost, snapshot, train


@contextmanager
def nobody() -> Iterator[None]:
    """As a user without rights: root may read and write everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_place(spoilable: Path) -> Iterator[Path]:
    """A place that others may enter: pytest's own are the user's alone."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        shutil.copytree(spoilable, Path(directory) / "place")
        os.chmod(Path(directory) / "place", 0o755)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(Path(directory) / "place")
            yield Path(directory) / "place"


def test_an_unreadable_data_file(open_place: Path) -> None:
    os.chmod("rows.parquet", 0o000)
    with nobody(), pytest.raises(DataError, match="(?s)can't be read.*rows.parquet.*denied.*permissions"):
        list(read_records(("rows.parquet",), "prompt"))


def test_an_unreadable_folder_of_data(open_place: Path) -> None:
    Path("closed").mkdir(0o700)
    shutil.copy("rows.parquet", "closed")
    with nobody(), pytest.raises(DataError, match="(?s)can't be read.*closed/rows.parquet"):
        list(read_records(("closed/rows.parquet",), "prompt"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "."])
def test_an_unreadable_model(open_place: Path, name: str) -> None:
    os.chmod(Path("model") / name, 0o000)
    with nobody(), pytest.raises(ModelError, match="(?s)can't be read.*denied.*permissions"):
        check_model_files("model")


def test_an_unreadable_reward_file(open_place: Path) -> None:
    os.chmod("reward.py", 0o000)
    with nobody(), pytest.raises(ConfigError, match="(?s)can't be read.*denied.*permissions"):
        parse_reward_file("reward.py")


@pytest.mark.parametrize("root", ["readonly", "readonly/deep/run"])
def test_a_run_directory_that_may_not_be_written(open_place: Path, root: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("readonly").mkdir(0o555)
    before = snapshot(open_place)
    with nobody():
        assert train(f"run.dir={root}") == 2
    said = capsys.readouterr().err
    assert "run directory can't be written" in said and "readonly is not writable" in said
    assert snapshot(open_place) == before


def test_no_room_for_the_prepared_data(spoilable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit on file sizes ends a write as a full disk does."""
    before, (soft, hard) = snapshot(spoilable), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        code = train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    assert "too large" in capsys.readouterr().err
    assert_nothing_lost(before, spoilable)


def test_a_run_directory_in_use(spoilable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(Path("run").resolve()):
        before = snapshot(spoilable)
        assert train() == 2
        said = capsys.readouterr().err
        assert snapshot(spoilable) == before
    assert f"process {os.getpid()}" in said and "another process works in this run directory" in said


def test_a_directory_of_something_else(spoilable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    before = snapshot(spoilable)
    assert train("run.dir=mine") == 2
    assert "no run of megarl" in capsys.readouterr().err
    assert snapshot(spoilable) == before


def test_a_claim_takes_back_a_directory_of_its_own_making_and_no_other(spoilable: Path) -> None:
    new, empty, used = spoilable / "new", spoilable / "empty", spoilable / "used"
    empty.mkdir()
    for root in (new, empty, used):
        with pytest.raises(DataError), claimed(root):
            assert json.loads((root / "lock").read_text())["pid"] == os.getpid()
            if root == used:
                (used / "config.yaml").write_text("x")
            raise DataError("refused")
    assert not new.exists()
    assert snapshot(empty).keys() == {"lock"} and snapshot(used).keys() == {"lock", "config.yaml"}
    with claimed(new), pytest.raises(ConfigError, match="another process works"), claimed(new):
        pass
    assert snapshot(new).keys() == {"lock"}


def test_a_lock_that_was_taken_away_under_its_owner_is_taken_again(spoilable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner before us removed the directory between our opening of its lock and our locking of it."""
    root, taken = spoilable / "new", []
    enter = RunLock.__enter__

    def late(lock: RunLock) -> RunLock:
        found = enter(lock)
        if not taken:
            shutil.rmtree(root)
        taken.append(lock)
        return found

    monkeypatch.setattr(RunLock, "__enter__", late)
    with claimed(root):
        assert len(taken) == 2
        with pytest.raises(ConfigError, match="another process works"), RunLock(root):
            pass


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no file system in which nothing can be made")
def test_a_place_where_no_directory_can_be_made() -> None:
    with pytest.raises(ConfigError, match="can't be written"), claimed(Path("/proc/nothing/here")):
        pass
