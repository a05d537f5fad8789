"""Which checkpoint is whole, which is newest, and that a broken one is never chosen."""

from pathlib import Path

import pytest

from megarl.checkpoint.store import CheckpointStore
from megarl.errors import CheckpointError


def write(store: CheckpointStore, step: int) -> Path:
    work = store.begin(step, ("actor", "critic"))
    (work / "actor" / "weights").write_bytes(b"w" * 100)
    (work / "critic" / "weights").write_bytes(b"c" * 50)
    return store.commit(work, step, {"step": step}).path


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


def test_newest_of_several_with_its_state(store: CheckpointStore) -> None:
    assert store.newest() is None
    for step in (2, 10, 9):
        write(store, step)
    assert store.newest().step == 10
    assert store.newest().state() == {"step": 10}


def test_an_unfinished_write_is_never_chosen_and_is_begun_anew(store: CheckpointStore) -> None:
    write(store, 1)
    work = store.begin(2, ("actor",))
    (work / "actor" / "half").write_bytes(b"x")
    assert store.newest().step == 1
    again = store.begin(2, ("actor",))
    assert list((again / "actor").iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda p: (p / "actor" / "weights").write_bytes(b"w" * 99), "actor/weights has 99 bytes instead of 100"),
        (lambda p: (p / "critic" / "weights").unlink(), "critic/weights is missing"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is damaged"),
    ],
    ids=["truncated", "missing", "no manifest", "half a manifest"],
)
def test_a_damaged_one_is_passed_over_and_named(store: CheckpointStore, damage, said: str) -> None:
    write(store, 1)
    damage(write(store, 2))
    assert store.newest().step == 1
    with pytest.raises(CheckpointError, match=said):
        store.require(2)


def test_only_the_newest_are_kept(store: CheckpointStore) -> None:
    for step in range(1, 7):
        write(store, step)
    assert sorted(p.name for p in store.directory.iterdir()) == ["step_4", "step_5", "step_6"]
