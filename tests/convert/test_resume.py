"""An interrupted conversion goes on where it stood; a changed source, or other settings, begin again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.convert import to_hf as to_hf_module
from megarl.convert.aside import Aside
from megarl.convert.to_hf import to_hf
from megarl.convert.to_megatron import to_megatron
from megarl.errors import CheckpointError
from tests.convert.directories import assert_same_tensors, snapshot, tensors
from tests.weights.families import save_model

# A conversion that stops to breathe after each group, so that a signal finds it in the middle.
SLOW = """
import sys, time
from pathlib import Path
from megarl.convert import aside, to_hf
to_hf.GROUP_BYTES = 30_000
finished = aside.Aside.finished
def slowly(self, group, noted=None):
    finished(self, group, noted)
    print(group, flush=True)
    time.sleep(0.2)
aside.Aside.finished = slowly
from megarl.convert.to_megatron import to_megatron
{call}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3", tmp_path_factory.mktemp("model"))


def kill_after(call: str, groups: int) -> None:
    """Run a conversion and kill it, as nothing can be caught, after so many groups."""
    process = subprocess.Popen([sys.executable, "-c", SLOW.format(call=call)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(groups):
        assert process.stdout.readline().strip().isdigit()
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=30) == -signal.SIGKILL


def times(directory: Path, pattern: str) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.glob(pattern)}


def test_to_megatron_goes_on_after_a_kill(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kill_after(f"to_megatron(Path({str(model)!r}), Path({str(out)!r}), file_bytes=30_000, quiet=True)", groups=3)
    assert not out.exists()
    before = times(tmp_path / "out.partial", "__[012]_0.distcp")
    assert len(before) == 3
    to_megatron(model, out, file_bytes=30_000, quiet=True)
    assert times(out, "__[012]_0.distcp") == before, "finished groups are not written again"
    assert not (tmp_path / "out.partial").exists() and not list(out.glob("journal*"))
    undisturbed = tmp_path / "undisturbed"
    to_megatron(model, undisturbed, file_bytes=30_000, quiet=True)
    a, b = snapshot(out), snapshot(undisturbed)
    assert {n: v for n, v in a.items() if n != ".metadata"} == {n: v for n, v in b.items() if n != ".metadata"}  # it names the directory
    to_hf(out, tmp_path / "back", quiet=True)
    assert_same_tensors(tensors(model), tensors(tmp_path / "back"))


def test_to_hf_goes_on_after_a_kill(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron, out = tmp_path / "megatron", tmp_path / "out"
    to_megatron(model, megatron, quiet=True)
    kill_after(f"to_hf.to_hf(Path({str(megatron)!r}), Path({str(out)!r}), shard_bytes=40_000, quiet=True)", groups=3)
    assert not out.exists() and not list((tmp_path / "out.partial").glob("*.safetensors"))
    monkeypatch.setattr(to_hf_module, "GROUP_BYTES", 30_000)
    written: list[str] = []
    write_unit = to_hf_module.write_unit
    monkeypatch.setattr(to_hf_module, "write_unit", lambda *a: (written.append(a[1].target.name), write_unit(*a)))
    to_hf(megatron, out, shard_bytes=40_000, quiet=True)
    assert 0 < len(written) < 60 and "embedding.word_embeddings.weight" not in written
    assert_same_tensors(tensors(model), tensors(out))


def test_to_hf_goes_on_where_it_was_renaming(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron, out = tmp_path / "megatron", tmp_path / "out"
    to_megatron(model, megatron, quiet=True)

    def broken(self: Aside) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Aside, "publish", broken)
        to_hf(megatron, out, shard_bytes=40_000, quiet=True)
    some = sorted((tmp_path / "out.partial").glob("*.safetensors"))[0]
    os.rename(some, some.with_name(some.name + ".part"))
    to_hf(megatron, out, shard_bytes=40_000, quiet=True)
    assert_same_tensors(tensors(model), tensors(out))
    assert not list(out.glob("*.part"))


def interrupted(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, groups: int = 3) -> None:
    finished = Aside.finished

    def stop(self: Aside, group: int, noted: object = None) -> None:
        finished(self, group, noted)
        if group == groups - 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Aside, "finished", stop)
        to_megatron(model, out, file_bytes=30_000, quiet=True)


def test_a_changed_source_begins_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = Path(shutil.copytree(model, tmp_path / "source")), tmp_path / "out"
    interrupted(source, out, monkeypatch)
    time.sleep(0.01)
    changed = {name: torch.randn_like(t) for name, t in tensors(source).items()}
    save_file(changed, source / "model.safetensors", metadata={"format": "pt"})
    to_megatron(source, out, file_bytes=30_000, quiet=True)
    assert "another source or other settings; starting again" in capsys.readouterr().err
    to_hf(out, tmp_path / "back", quiet=True)
    assert_same_tensors(changed, tensors(tmp_path / "back"))


@pytest.mark.parametrize("harm", ["file gone", "file cut", "journal torn", "other settings"])
def test_what_was_left_is_believed_only_if_it_is_there(harm: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    interrupted(model, out, monkeypatch)
    file = partial / "__1_0.distcp"
    if harm == "file gone":
        file.unlink()
    elif harm == "file cut":
        file.write_bytes(file.read_bytes()[:-7])
    elif harm == "journal torn":
        journal = partial / "journal.jsonl"
        journal.write_bytes(journal.read_bytes()[:-9])
    to_megatron(model, out, file_bytes=50_000 if harm == "other settings" else 30_000, quiet=True)
    to_hf(out, tmp_path / "back", quiet=True)
    assert_same_tensors(tensors(model), tensors(tmp_path / "back"))


def test_two_at_once(model: Path, tmp_path: Path) -> None:
    call = f"to_megatron(Path({str(model)!r}), Path({str(tmp_path / 'out')!r}), file_bytes=30_000, quiet=True)"
    process = subprocess.Popen([sys.executable, "-c", SLOW.format(call=call)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    with pytest.raises(CheckpointError, match="another process is converting"):
        to_megatron(model, tmp_path / "out", file_bytes=30_000, quiet=True)
    assert process.wait(timeout=60) == 0
    to_hf(tmp_path / "out", tmp_path / "back", quiet=True)
    assert_same_tensors(tensors(model), tensors(tmp_path / "back"))
