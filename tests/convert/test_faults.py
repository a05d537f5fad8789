"""What users meet beside whole models: mixed dtypes, places that can't be written, damage, odd files. No trace, nothing lost."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.cli.main import main
from megarl.convert import aside, dry_run
from megarl.convert import to_hf as to_hf_module
from megarl.convert import to_megatron as to_megatron_module
from megarl.convert.aside import Aside
from megarl.convert.distcp_read import Reader
from megarl.convert.inspect import inspect
from megarl.convert.targets import head_of
from megarl.convert.to_hf import to_hf
from megarl.convert.to_megatron import to_megatron
from megarl.convert.verify import DiffersError, same_bits, verify
from megarl.errors import EXIT_DATA, EXIT_DONE, EXIT_INTERNAL, EXIT_USER, CheckpointError, MegarlError, ModelError
from megarl.weights.casts import cast
from megarl.weights.model_record import ModelRecord, read_record
from tests.convert.directories import assert_same_tensors, config, snapshot, tensors
from tests.weights.families import save_model

Q = "model.layers.{}.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with a tokenizer, and its checkpoint in several files."""
    root = tmp_path_factory.mktemp("made")
    source = save_model("qwen3", root / "hf", num_hidden_layers=2)
    (source / "tokenizer.json").write_text("{}")
    to_megatron(source, root / "megatron", file_bytes=30_000, quiet=True)
    return root


@pytest.fixture
def hf(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "hf", tmp_path / "hf"))


@pytest.fixture
def megatron(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "megatron", tmp_path / "megatron"))


def convert(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


def put(source: Path, **changed: torch.Tensor) -> None:
    save_file(tensors(source) | changed, source / "model.safetensors", metadata={"format": "pt"})


# Numbers


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_any_bits_come_back_from_a_wider_tensor(narrow: torch.dtype, wide: torch.dtype, tmp_path: Path) -> None:
    """Layers in one tensor of the checkpoint, of which one is wide: NaNs keep what they carry."""
    source = save_model("llama", tmp_path / "hf", dtype=narrow)
    mixed = tensors(source)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in mixed if "layers" in name]:
        bits = torch.randint(-(1 << 15), 1 << 15, mixed[name].shape, generator=generator).to(torch.int16)
        mixed[name] = mixed[name].to(wide) if "layers.2." in name else bits.view(narrow)
    assert torch.isnan(mixed[Q.format(0)]).any()
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    to_megatron(source, tmp_path / "megatron", verified=True, quiet=True)
    assert Reader(tmp_path / "megatron").tensors["decoder.layers.self_attention.linear_proj.weight"].dtype is wide
    to_hf(tmp_path / "megatron", tmp_path / "back", verified=True, quiet=True)
    assert_same_tensors(mixed, tensors(tmp_path / "back"))


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_lone_nan_comes_back(narrow: torch.dtype, wide: torch.dtype) -> None:
    """Among numbers: torch puts one number otherwise than several."""
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    nans = bits[torch.isnan(bits.view(narrow))][::7]
    for i in range(len(nans)):
        there = cast(nans[i : i + 1].view(narrow), wide, "x")
        assert torch.equal(cast(there, narrow, "x").view(torch.int16), nans[i : i + 1])


def test_a_bit_that_a_cast_would_hide_is_found() -> None:
    narrow = torch.tensor([1.0, float("nan")], dtype=torch.bfloat16)
    wide = narrow.float()
    assert same_bits(narrow, wide) and same_bits(wide, narrow)
    wide.view(torch.int32)[0] |= 1  # rounds to the same bfloat16
    assert not same_bits(narrow, wide) and same_bits(narrow, wide, by_demand=True)


def test_a_number_that_has_no_room_in_the_dtype(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tensors(hf)[Q.format(1)]
    numbers[3, 4], numbers[0, 0], numbers[0, 1] = 70_000.0, float("inf"), 1e-30
    put(hf, **{Q.format(1): numbers})
    to_megatron(hf, tmp_path / "megatron", quiet=True)
    command = ("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back", "--verify", "--dtype")
    assert convert(*command, "float16") == EXIT_USER
    error = capsys.readouterr().err
    assert "no room in float16" in error and Q.format(1) in error and "70000" in error
    assert not (tmp_path / "back").exists()
    assert convert(*command, "bfloat16") == EXIT_DONE  # infinity stays one, and what is small becomes smaller or nothing
    assert "elements equal the source's, cast to bfloat16" in capsys.readouterr().out
    assert_same_tensors({name: t.bfloat16() for name, t in tensors(hf).items()}, tensors(tmp_path / "back"))


def test_dtypes_are_those_of_the_record_and_of_nothing_beside_it(tmp_path: Path) -> None:
    source = save_model("llama", tmp_path / "hf", dtype=torch.bfloat16)
    put(source, **{Q.format(0): tensors(source)[Q.format(0)].float()})
    (source / "tokenizer.json").write_text("{}")
    settings = {key: value for key, value in config(source).items() if key not in ("dtype", "torch_dtype")}
    (source / "config.json").write_text(json.dumps(settings))  # which names no dtype, and is the source's own
    to_megatron(source, tmp_path / "megatron", quiet=True)
    shutil.rmtree(tmp_path / "megatron" / "hf")
    to_hf(tmp_path / "megatron", tmp_path / "back", tokenizer=source, quiet=True)
    assert_same_tensors(tensors(source), tensors(tmp_path / "back"))
    assert config(tmp_path / "back") == config(source)


def test_a_run_says_nothing_of_tensors_and_each_stays_as_it_stored_it(tmp_path: Path) -> None:
    """DeepSeek-V3's router bias is float32 in a run of bfloat16, whatever lies beside the checkpoint."""
    source = save_model("deepseek_v3", tmp_path / "hf", dtype=torch.bfloat16)
    to_megatron(source, tmp_path / "megatron", quiet=True)
    ModelRecord(read_record(tmp_path / "megatron").hf_config, "lm", "bfloat16").write(tmp_path / "megatron")  # as a run does
    to_hf(tmp_path / "megatron", tmp_path / "back", quiet=True)
    found = tensors(tmp_path / "back")
    assert {t.dtype for name, t in found.items() if name.endswith("e_score_correction_bias")} == {torch.float32}
    assert_same_tensors(tensors(source), found)


def test_a_record_of_an_earlier_build(megatron: Path) -> None:
    record = json.loads((megatron / "model.json").read_text())
    assert record.pop("converted") is True
    for noted in ({}, {Q.format(0): "bfloat16"}):
        (megatron / "model.json").write_text(json.dumps(record | {"tensor_dtypes": noted}))
        assert read_record(megatron).converted is bool(noted)


# What is verified


@pytest.mark.parametrize("way", ["to-megatron", "to-hf"])
def test_a_result_that_differs_gets_no_name(
    way: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    source = ("--hf", made / "hf") if way == "to-megatron" else ("--megatron", made / "megatron")
    module, name = (to_megatron_module, "fill") if way == "to-megatron" else (to_hf_module, "write_unit")
    right = getattr(module, name)

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        if way == "to-megatron":
            arguments[-1].reshape(-1)[:1].view(torch.int32)[0] ^= 1
        else:
            writer, unit, _ = arguments
            for region, into in unit.target.within(unit.local):
                writer.write(region, torch.ones([stop - start for start, stop in into.box]))

    with monkeypatch.context() as patch:
        patch.setattr(module, name, wrong)
        assert convert(way, *source, "--out", out, "--verify") == EXIT_INTERNAL
    error = capsys.readouterr().err
    assert "differs from its source" in error and f"nothing was put at {out}" in error and "fault in megarl" in error
    assert not out.exists() and "didn't end" in inspect(tmp_path / "out.partial").missing[0]
    assert convert(way, *source, "--out", out) == EXIT_DONE, "and nothing of it is taken up again, verified or not"
    assert verify(*(made / "hf", out) if way == "to-megatron" else (out, made / "megatron"), quiet=True) > 0


def test_verify_of_two_directories(hf: Path, made: Path) -> None:
    put(hf, **{Q.format(0): tensors(hf)[Q.format(0)] + 1})
    with pytest.raises(DiffersError, match="differs from its source"):
        verify(hf, made / "megatron", quiet=True)


# Places


@pytest.mark.parametrize("name", ["tokenizer-out", "chat_template_new", "deeper/megatron"])
def test_an_output_inside_its_source(name: str, hf: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(tmp_path)
    (tmp_path / "link").symlink_to(hf)
    for inside in (hf, tmp_path / "link"):
        assert convert("to-megatron", "--hf", hf, "--out", inside / name) == EXIT_USER
        assert convert("to-megatron", "--hf", hf, "--out", inside / name, "--dry-run") == EXIT_USER
        assert convert("to-hf", "--megatron", megatron, "--tokenizer", hf, "--out", inside / name) == EXIT_USER
    assert convert("to-hf", "--megatron", megatron, "--out", megatron / name) == EXIT_USER
    assert convert("to-hf", "--megatron", megatron, "--out", megatron / "hf" / name, "--dry-run") == EXIT_USER
    assert capsys.readouterr().err.count("inside a directory that it is made of") == 8
    (tmp_path / "link").unlink()
    assert snapshot(tmp_path) == before


def test_an_output_over_its_source(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A source at the name where the result is written aside, with a journal of its own."""
    source = hf.rename(tmp_path / "out.partial")
    (source / "journal.jsonl").write_text("{}\n")
    before = snapshot(tmp_path)
    assert convert("to-megatron", "--hf", source, "--out", tmp_path / "out") == EXIT_USER
    assert "or over it" in capsys.readouterr().err and snapshot(tmp_path) == before
    assert convert("to-megatron", "--hf", source, "--out", tmp_path / "x.partial") == EXIT_USER


def test_places_that_cant_be(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken.partial").write_text("mine")
    hf, megatron, file, long = made / "hf", made / "megatron", tmp_path / "file", "n" * 300
    commands = {
        ("to-megatron", "--hf", hf, "--out", tmp_path / long): "File name too long",
        ("to-megatron", "--hf", hf, "--out", tmp_path / ("n" * 250)): "File name too long",  # .partial leaves no room
        ("to-hf", "--megatron", megatron, "--out", tmp_path / long, "--dry-run"): "File name too long",
        ("to-megatron", "--hf", hf, "--out", file): "exists already",
        ("to-megatron", "--hf", hf, "--out", file / "out"): "Not a directory",
        ("to-megatron", "--hf", hf, "--out", tmp_path / "taken"): "something else stands",
        ("to-hf", "--megatron", megatron, "--out", "/proc/out"): "too little room",
        ("to-megatron", "--hf", tmp_path / long, "--out", tmp_path / "out"): "too long",
        ("to-hf", "--megatron", tmp_path / long, "--out", tmp_path / "out"): "too long",
        ("to-hf", "--megatron", file, "--out", tmp_path / "out"): "a file",
        ("to-hf", "--megatron", tmp_path / "nowhere", "--out", tmp_path / "out"): "no such directory",
        ("to-hf", "--megatron", megatron, "--tokenizer", file, "--out", tmp_path / "out"): "a file, and no directory",
        ("to-hf", "--megatron", megatron, "--tokenizer", tmp_path, "--out", tmp_path / "out"): "no tokenizer here",
        ("inspect", file): "a file, and no directory",
        ("inspect", tmp_path / long): "too long",
    }
    before = snapshot(tmp_path)
    for command, words in commands.items():
        assert convert(*command) == EXIT_USER, command
        error = capsys.readouterr().err
        assert words in error and "Traceback" not in error, (command, error)
    assert snapshot(tmp_path) == before


def test_an_output_named_by_its_parent(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is written would have no name to get."""
    assert convert("to-megatron", "--hf", made / "hf", "--out", f"{tmp_path}/nowhere/..") == EXIT_USER
    assert "no name of its own" in capsys.readouterr().err and not os.listdir(tmp_path)


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GB"], ids=["bytes", "GB"])
def test_a_size_beyond_all_numbers(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        convert("to-hf", "--megatron", "x", "--out", "y", "--shard-size", size)
    assert ended.value.code == EXIT_USER and "is no size" in capsys.readouterr().err


def test_a_pipe_among_the_files_of_a_tokenizer(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Known before hours of copying, not at their end."""
    (hf / "tokenizer").mkdir()
    os.mkfifo(hf / "tokenizer" / "pipe")
    for dry in ([], ["--dry-run"]):
        assert convert("to-megatron", "--hf", hf, "--out", tmp_path / "out", *dry) == EXIT_USER
        assert "tokenizer/pipe" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_whoever_reads_the_dry_run_may_stop(made: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "megarl.cli.main",
        "convert",
        "to-megatron",
        "--hf",
        made / "hf",
        "--out",
        tmp_path / "out",
        "--dry-run",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=60) == EXIT_DONE
    process.stderr.close()


# Files beside the weights


def stop_at(what: str, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    def stop(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Aside, what, stop)
        call()


def test_a_companion_that_went_meanwhile_doesnt_come_along(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hf / "old.txt").write_text("old")
    stop_at("publish", monkeypatch, lambda: to_megatron(hf, tmp_path / "megatron", quiet=True))
    (hf / "old.txt").unlink()
    to_megatron(hf, tmp_path / "megatron", quiet=True)
    assert sorted(path.name for path in (tmp_path / "megatron" / "hf").iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
    ]
    (hf / "old.txt").write_text("old")
    (hf / "tokenizer").mkdir()
    (hf / "tokenizer" / "older.txt").write_text("older")
    back = {"tokenizer": hf, "shard_bytes": 30_000, "quiet": True}
    stop_at("publish", monkeypatch, lambda: to_hf(tmp_path / "megatron", tmp_path / "back", **back))
    assert (tmp_path / "back.partial" / "tokenizer" / "older.txt").is_file()
    (hf / "old.txt").unlink()
    shutil.rmtree(hf / "tokenizer")
    to_hf(tmp_path / "megatron", tmp_path / "back", **back)
    assert not (tmp_path / "back" / "old.txt").exists() and not (tmp_path / "back" / "tokenizer").exists()
    assert_same_tensors(tensors(hf), tensors(tmp_path / "back"))


def test_a_journal_that_a_stop_left_in_a_whole_result_does_no_harm(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between renaming the directory and removing its journal."""
    to_disk = aside.to_disk

    def stop(path: Path) -> None:
        if path == tmp_path and (tmp_path / "megatron").exists():
            raise KeyboardInterrupt
        to_disk(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(aside, "to_disk", stop)
        to_megatron(hf, tmp_path / "megatron", quiet=True)
    assert (tmp_path / "megatron" / "journal.jsonl").is_file() and not inspect(tmp_path / "megatron").missing
    to_hf(tmp_path / "megatron", tmp_path / "back", verified=True, quiet=True)
    shutil.copyfile(tmp_path / "megatron" / "journal.jsonl", tmp_path / "back" / "journal.jsonl")
    assert not inspect(tmp_path / "back").missing and "journal.jsonl" not in inspect(tmp_path / "back").beside
    to_megatron(tmp_path / "back", tmp_path / "again", quiet=True)
    assert not list((tmp_path / "again").rglob("journal*"))


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer/inner.json", "tokenizer/loop"])
def test_a_link_to_nowhere_is_named(name: str, hf: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (hf / name).parent.mkdir(exist_ok=True)
    (hf / name).symlink_to(hf / "tokenizer" if name.endswith("loop") else "../blobs/gone")
    assert convert("to-megatron", "--hf", hf, "--out", tmp_path / "out") == EXIT_USER
    assert convert("to-megatron", "--hf", hf, "--out", tmp_path / "out", "--dry-run") == EXIT_USER
    assert convert("to-hf", "--megatron", megatron, "--tokenizer", hf, "--out", tmp_path / "out") == EXIT_USER
    assert capsys.readouterr().err.count(f"leads nowhere (in {hf / name})") == 3
    assert not list(tmp_path.glob("out*"))
    assert convert("inspect", hf) == EXIT_DATA
    assert "leads nowhere" in capsys.readouterr().out


def test_files_that_stay_behind_are_named(hf: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("modeling_mine.py", "pytorch_model.bin", ".gitattributes", "consolidated.safetensors"):
        shutil.copyfile(hf / "model.safetensors", hf / name)
    (hf / "runs").mkdir()
    os.mkfifo(hf / "pipe")
    words = {
        "modeling_mine.py": "code",
        "pytorch_model.bin": "weights",
        ".gitattributes": "hidden",
        "runs": "a folder",
        "pipe": "neither a file",
    }
    there, back = ("to-megatron", "--hf", hf), ("to-hf", "--megatron", megatron, "--tokenizer", hf)
    for command in (there, back):
        for more in (("--dry-run",), ()):
            assert convert(*command, "--out", tmp_path / command[0], *more) == EXIT_DONE
            lines = capsys.readouterr().out.splitlines()
            for name, reason in words.items():
                assert sum(line.startswith(f"left out: {name}: {reason}") for line in lines) == 1, (name, lines)
            assert sum("consolidated.safetensors" in line for line in lines) == (1 if command is there else 0)
    assert sorted(path.name for path in (tmp_path / "to-megatron" / "hf").iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
    ]


# Damaged checkpoints


def edit_contents(megatron: Path, change: Callable[[Any], object]) -> None:
    found = pickle.loads((megatron / ".metadata").read_bytes())
    change(found)
    (megatron / ".metadata").write_bytes(pickle.dumps(found))


def first_place(contents: Any) -> Any:
    return next(iter(contents.storage_data.values()))


@pytest.mark.parametrize("place", ["absolute", "../other/__0_0.distcp", "hf/../../other/__0_0.distcp", 5, ""])
def test_a_checkpoint_reads_no_file_outside_it(place: object, megatron: Path, tmp_path: Path) -> None:
    shutil.copytree(megatron, tmp_path / "other")
    value = str(tmp_path / "other" / "__0_0.distcp") if place == "absolute" else place
    edit_contents(megatron, lambda contents: setattr(first_place(contents), "relative_path", value))
    with pytest.raises(CheckpointError, match="is no file of the checkpoint"):
        to_hf(megatron, tmp_path / "out", quiet=True)


EDITS: dict[str, Callable[[Any], object]] = {
    "no chunks": lambda c: delattr(next(iter(c.state_dict_metadata.values())), "chunks"),
    "a size that is text": lambda c: setattr(next(iter(c.state_dict_metadata.values())), "size", "many"),
    "a negative size": lambda c: setattr(next(iter(c.state_dict_metadata.values())), "size", [-1, 40]),
    "a size beyond memory": lambda c: setattr(next(iter(c.state_dict_metadata.values())), "size", [1 << 62, 1 << 62]),
    "a chunk of other dimensions": lambda c: setattr(next(iter(c.state_dict_metadata.values())).chunks[0], "sizes", [1] * 9),
    "no dtype": lambda c: setattr(next(iter(c.state_dict_metadata.values())).properties, "dtype", "float32"),
    "an offset that is a fraction": lambda c: setattr(first_place(c), "offset", 1.5),
    "a negative length": lambda c: setattr(first_place(c), "length", -1),
    "a transformed file": lambda c: setattr(first_place(c), "transform_descriptors", ["zstd"]),
    "no places": lambda c: setattr(c, "storage_data", None),
    "a place of nothing": lambda c: c.storage_data.update({5: first_place(c)}),
    "one place less": lambda c: c.storage_data.pop(next(iter(c.storage_data))),
    "integers": lambda c: setattr(next(iter(c.state_dict_metadata.values())).properties, "dtype", torch.int32),
}


@pytest.mark.parametrize("edit", EDITS)
def test_contents_with_a_wrong_field(edit: str, megatron: Path, tmp_path: Path) -> None:
    edit_contents(megatron, EDITS[edit])
    with pytest.raises(CheckpointError):
        to_hf(megatron, tmp_path / "out", quiet=True)
    assert inspect(megatron).missing and inspect(megatron).lines()
    assert not list(tmp_path.glob("out*"))


def test_contents_that_would_take_all_memory(megatron: Path) -> None:
    """A pickle may number what it remembers as it likes, and the loader takes memory for every number below."""
    (megatron / ".metadata").write_bytes(b"\x80\x02}r" + (0x7FFFFFFF).to_bytes(4, "little") + b".")
    with pytest.raises(CheckpointError, match="damaged"):
        Reader(megatron)


RECORDS: list[dict[str, object]] = [
    {"tensor_dtypes": {"a": []}}, {"dtype": []}, {"head": {}}, {"converted": 1}, {"hf_config": {"model_type": "qwen3"}}, {"format": [1]},
]  # fmt: skip


@pytest.mark.parametrize("change", RECORDS, ids=str)
def test_a_record_with_a_wrong_field(change: dict[str, object], megatron: Path, tmp_path: Path) -> None:
    record = json.loads((megatron / "model.json").read_text())
    (megatron / "model.json").write_text(json.dumps(record | change))
    assert convert("to-hf", "--megatron", megatron, "--out", tmp_path / "out") == EXIT_USER
    assert convert("inspect", megatron) == EXIT_DATA


def test_a_record_that_is_nested_without_end(megatron: Path) -> None:
    (megatron / "model.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not a record"):
        read_record(megatron)


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Cut off, a few other bytes, or another stretch."""
    found = bytearray(data)
    kind, at = chance.randrange(3), chance.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        for _ in range(chance.choice((1, 1, 2, 8))):
            found[chance.randrange(len(found))] = chance.randrange(256)
    else:
        found[at : at + chance.randrange(40)] = chance.randbytes(chance.randrange(20))
    return bytes(found)


@pytest.mark.parametrize(("file", "times"), [(".metadata", 150), ("model.json", 100), ("__0_0.distcp", 50)])
def test_damage_of_any_kind_is_told(file: str, times: int, megatron: Path, tmp_path: Path) -> None:
    """Only errors on purpose, or a whole conversion where the damage is in numbers or in nothing that is read."""
    whole = (megatron / file).read_bytes()
    for seed in range(times):
        (megatron / file).write_bytes(mutate(whole, random.Random(f"{file} {seed}")))
        inspect(megatron).lines()
        with contextlib.suppress(MegarlError):
            to_hf(megatron, tmp_path / "out", quiet=True)
        for name in ("out", "out.partial"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)


# What is said


@pytest.mark.parametrize("value", [5, "LlamaForCausalLM", [5], {"a": 1}, True, 0])
def test_architectures_that_name_no_class(value: object, hf: Path, megatron: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="`architectures`"):
        head_of({"architectures": value})
    (hf / "config.json").write_text(json.dumps(config(hf) | {"architectures": value}))
    assert convert("to-megatron", "--hf", hf, "--out", tmp_path / "out") == EXIT_USER
    record = json.loads((megatron / "model.json").read_text())
    (megatron / "model.json").write_text(json.dumps(record | {"hf_config": record["hf_config"] | {"architectures": value}}))
    with pytest.raises(ModelError, match="`architectures`"):
        to_hf(megatron, tmp_path / "out", dtype="bfloat16", quiet=True)
    assert not (tmp_path / "out").exists()


def test_exit_codes_of_checkpoints_that_cant_be_used(megatron: Path, tmp_path: Path) -> None:
    command = ("to-hf", "--megatron", megatron, "--out")
    assert convert(*command, megatron) == EXIT_USER
    (megatron / "__1_0.distcp").write_bytes(b"\0" * (megatron / "__1_0.distcp").stat().st_size)
    assert convert(*command, tmp_path / "a") == EXIT_USER
    (megatron / ".metadata").unlink()
    assert convert(*command, tmp_path / "b") == EXIT_USER


def test_thousands_of_problems_are_counted_and_some_are_shown(hf: Path) -> None:
    (hf / "config.json").write_text(json.dumps(config(hf) | {"num_hidden_layers": 400}))
    found = inspect(hf)
    missing = sum("a tensor is missing" in problem for problem in found.missing)
    assert missing > 4000 and len(found.to_json()["missing"]) == len(found.missing)
    lines = found.lines()
    assert len(lines) < 100 and f"and {len(found.missing) - 20} more" in lines[-1]


def test_how_often_tensors_are_used_is_counted(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = tensors(made / "hf")
    told = list(dry_run.dry_run_to_megatron(made / "hf", tmp_path / "out"))
    assert told[-2] == f"coverage: {len(names)} tensors used exactly once, 0 dropped, none left over"
    opened = dry_run.open_hf_model

    def doubled(directory: Path) -> Any:
        model = opened(directory)
        object.__setattr__(model.plan, "targets", (*model.plan.targets, model.plan.targets[-1]))
        return model

    monkeypatch.setattr(dry_run, "open_hf_model", doubled)
    told = list(dry_run.dry_run_to_megatron(made / "hf", tmp_path / "out"))
    assert f"{len(names) - 1} tensors used exactly once, 1 NOT exactly once" in told[-2]
