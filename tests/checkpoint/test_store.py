"""Which checkpoint is whole, which is newest, and that a broken one is never chosen."""

from pathlib import Path

import pytest

from megarl.checkpoint.store import CheckpointStore
from megarl.errors import CheckpointError, WorkerError


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
        (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json is damaged"),
        (lambda p: (p / "manifest.json").write_text("{}"), "manifest.json is damaged: it does not list controller.json"),
        (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json is damaged: it does not list controller.json"),
    ],
    ids=["truncated", "missing", "no manifest", "half a manifest", "no text", "empty manifest", "list as manifest"],
)
def test_a_damaged_one_is_passed_over_and_named(store: CheckpointStore, damage, said: str) -> None:
    write(store, 1)
    damage(write(store, 2))
    found, (skipped,) = store.scan()
    assert (found, found.step) == (store.newest(), 1)
    assert skipped.startswith(f"step_2: {said}")
    with pytest.raises(CheckpointError, match=said):
        store.require(2)


def test_only_the_newest_are_kept(store: CheckpointStore) -> None:
    for step in range(1, 7):
        write(store, step)
    assert sorted(p.name for p in store.directory.iterdir()) == ["step_4", "step_5", "step_6"]


def names(store: CheckpointStore) -> set[str]:
    return {p.name for p in store.directory.iterdir()}


def test_nothing_committed_differs_from_nothing_whole(store: CheckpointStore) -> None:
    assert store.scan() == (None, [])
    store.begin(1, ("actor",))
    (store.directory / "step_notes").mkdir()
    (store.directory / "step_7").write_text("no directory")
    assert store.scan() == (None, [])
    for path in [write(store, 1), write(store, 2)]:
        (path / "actor" / "weights").unlink()
    assert store.scan() == (None, ["step_2: actor/weights is missing", "step_1: actor/weights is missing"])


def test_a_damaged_newer_one_does_not_push_out_what_was_just_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 25)
    (write(CheckpointStore(tmp_path, keep=2), 50) / "manifest.json").unlink()
    assert store.newest().step == 25  # where the run goes on
    assert write(store, 30).is_dir()
    assert names(store) == {"step_30", "step_50"}
    assert store.newest().step == 30


def test_damaged_ones_take_no_place_of_whole_ones_and_go_when_they_are_old(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    (write(store, 5) / "manifest.json").unlink()
    write(store, 10)
    (write(store, 15) / "manifest.json").unlink()
    write(store, 20)
    assert names(store) == {"step_10", "step_15", "step_20"}
    write(store, 30)
    assert names(store) == {"step_20", "step_30"}


def test_after_a_return_to_an_earlier_step_the_new_one_stays(tmp_path: Path) -> None:
    for step in (10, 40, 50):
        write(CheckpointStore(tmp_path, keep=3), step)
    store = CheckpointStore(tmp_path, keep=2)
    assert write(store, 20).is_dir()
    assert names(store) == {"step_20", "step_40", "step_50"}


def test_a_step_committed_again_replaces_the_damaged_one(store: CheckpointStore) -> None:
    (write(store, 3) / "actor" / "weights").unlink()
    write(store, 3)
    assert store.scan() == (store.require(3), [])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), WorkerError("actor rank 0 raised CheckpointException")])
def test_a_save_that_fails_says_how_much_room_there_is_and_leaves_nothing_half_written(store: CheckpointStore, error: Exception) -> None:
    kept = write(store, 1)
    with (
        pytest.raises((CheckpointError, WorkerError), match=r"writing_step_2(.|\n)*[\d,]+ bytes free there") as said,
        store.writing(2, ("actor",)) as work,
    ):
        (work / "actor" / "half").write_bytes(b"x")
        raise error
    assert str(error) in str(said.value) and said.value.__cause__ is error
    assert isinstance(said.value, WorkerError) == isinstance(error, WorkerError)
    assert list(store.directory.iterdir()) == [kept]


def test_a_save_that_can_t_begin_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the directory should be")
    with (
        pytest.raises(CheckpointError, match="bytes free there; .*Not a directory"),
        CheckpointStore(tmp_path / "checkpoints", 1).writing(1, ("a",)),
    ):
        pass


def test_a_save_that_ends_well_is_a_checkpoint(store: CheckpointStore) -> None:
    with store.writing(3, ("actor",)) as work:
        store.commit(work, 3, {"step": 3})
    assert store.newest().step == 3 and [path.name for path in store.directory.iterdir()] == ["step_3"]
