"""A source that isn't whole, or an output that can't be: an error that names file and tensor, and nothing that looks whole."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.convert import aside
from megarl.convert.inspect import inspect
from megarl.convert.to_hf import to_hf
from megarl.convert.to_megatron import to_megatron
from megarl.errors import CheckpointError, ConfigError, MegarlError, ModelError
from tests.convert.directories import assert_same_tensors, config, snapshot, tensors
from tests.weights.families import save_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, with an index, and its checkpoint in several files."""
    root = tmp_path_factory.mktemp("whole")
    to_megatron(save_model("qwen3", root / "one"), root / "megatron", file_bytes=30_000, quiet=True)
    to_hf(root / "megatron", root / "hf", shard_bytes=30_000, quiet=True)
    return root


@pytest.fixture
def hf(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole / "hf", tmp_path / "hf"))


@pytest.fixture
def megatron(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole / "megatron", tmp_path / "megatron"))


def file_of(hf: Path, tensor: str) -> Path:
    return hf / json.loads((hf / INDEX).read_text())["weight_map"][tensor]


def change(hf: Path, tensor: str, what: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    path = file_of(hf, tensor)
    found = {name: t for name, t in tensors(hf).items() if file_of(hf, name) == path}
    new = what(found.pop(tensor))
    save_file(found if new is None else found | {tensor: new}, path)


def forget(hf: Path, tensor: str) -> None:
    index = json.loads((hf / INDEX).read_text())
    del index["weight_map"][tensor]
    (hf / INDEX).write_text(json.dumps(index))


V = "model.layers.4.self_attn.v_proj.weight"
FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "truncated": (lambda d: truncate(file_of(d, V)), ("not a whole safetensors file", "model-0")),
    "no bytes at all": (lambda d: file_of(d, V).write_bytes(b""), ("not a whole safetensors file", "model-0")),
    "file missing": (lambda d: file_of(d, V).unlink(), ("a weight file is missing", "model-0")),
    "index entry missing": (lambda d: forget(d, V), ("missing from the index, though a file has it", V, "model-0")),
    "no such tensor": (lambda d: change(d, V, lambda t: None), ("not in the file that the index names", V, "model-0")),
    "shape": (lambda d: change(d, V, lambda t: t[:-1].clone()), ("another shape", V, "(27, 40)", "(28, 40)", "model-0")),
    "dtype": (lambda d: change(d, V, lambda t: t.to(torch.int32)), ("not of plain floating-point numbers", V, "I32", "model-0")),
    "fp8 alone": (lambda d: change(d, V, lambda t: t.to(torch.float8_e4m3fn)), ("fp8 without the factors", V, "model-0")),
    "index no JSON": (lambda d: (d / INDEX).write_text("{"), ("not an index", INDEX)),
    "no index": (lambda d: (d / INDEX).unlink(), ("without the index", INDEX)),
    "no configuration": (lambda d: (d / "config.json").unlink(), ("config.json is missing",)),
    "unknown family": (lambda d: edit(d, model_type="bloom"), ("unsupported model family", "bloom")),
    "more layers": (lambda d: edit(d, num_hidden_layers=7), ("missing", "model.layers.6.")),
    "fewer layers": (lambda d: edit(d, num_hidden_layers=5), ("no place for", "model.layers.5.")),
    "stranger": (lambda d: change(d, V, lambda t: t) or add(d), ("no place for", "adapter.lora_A")),
}


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def edit(hf: Path, **changes: object) -> None:
    (hf / "config.json").write_text(json.dumps(config(hf) | changes))


def add(hf: Path) -> None:
    save_file({"adapter.lora_A": torch.zeros(2)}, hf / "more.safetensors")
    index = json.loads((hf / INDEX).read_text())
    index["weight_map"]["adapter.lora_A"] = "more.safetensors"
    (hf / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_model_is_refused_before_anything_is_written(fault: str, hf: Path, tmp_path: Path) -> None:
    damage, words = FAULTS[fault]
    damage(hf)
    with pytest.raises(ModelError) as caught:
        to_megatron(hf, tmp_path / "out", quiet=True)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    try:
        missing = "\n".join(inspect(hf).missing)
    except MegarlError as error:
        missing = str(error)
    assert all(word in missing for word in words), missing


def test_a_tied_output_layer_that_differs(tmp_path: Path) -> None:
    source = save_model("qwen2", tmp_path / "hf")
    kept = tensors(source)
    save_file(kept | {"lm_head.weight": kept["model.embed_tokens.weight"] + 1}, source / "model.safetensors")
    with pytest.raises(ModelError, match="differs from the embedding"):
        to_megatron(source, tmp_path / "out", quiet=True)
    assert "differs from the embedding" in inspect(source).missing[0]


MEGATRON_FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "truncated": (lambda d: truncate(d / "__1_0.distcp"), ("truncated", "__1_0.distcp", "decoder.layers.")),
    "file missing": (lambda d: (d / "__2_0.distcp").unlink(), ("a file of the checkpoint is missing", "__2_0.distcp")),
    "no contents": (lambda d: (d / ".metadata").unlink(), ("no Megatron distributed checkpoint", ".metadata")),
    "contents damaged": (lambda d: truncate(d / ".metadata"), ("damaged", ".metadata")),
    "a pickle that runs code": (lambda d: (d / ".metadata").write_bytes(pickle.dumps(Evil())), ("asks for", "which is no record")),
    "no record": (lambda d: (d / "model.json").unlink(), ("which model it is of", "model.json")),
    "record damaged": (lambda d: (d / "model.json").write_text('{"format": 1}'), ("not a record of a model", "model.json")),
    "record of a later format": (lambda d: edit_record(d, format=2), ("not a record of a model", "format 2")),
    "another shape": (lambda d: edit_record(d, hf_config={"intermediate_size": 48}), ("another shape", "mlp.linear_fc1.weight")),
    "another model": (lambda d: edit_record(d, hf_config={"model_type": "qwen2"}), ("missing", "linear_qkv.bias")),
}


class Evil:
    def __reduce__(self) -> tuple:
        return (sys.exit, ("code was run",))


def edit_record(directory: Path, **changes: object) -> None:
    record = json.loads((directory / "model.json").read_text())
    inner = changes.pop("hf_config", {})
    (directory / "model.json").write_text(json.dumps(record | changes | {"hf_config": record["hf_config"] | inner}))


@pytest.mark.parametrize("fault", MEGATRON_FAULTS)
def test_a_damaged_checkpoint_is_refused_before_anything_is_written(fault: str, megatron: Path, tmp_path: Path) -> None:
    damage, words = MEGATRON_FAULTS[fault]
    damage(megatron)
    with pytest.raises(CheckpointError) as caught:
        to_hf(megatron, tmp_path / "out", quiet=True)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"]
    missing = "\n".join(inspect(megatron).missing)
    assert all(word in missing for word in words), missing


def test_bytes_that_are_no_tensor(megatron: Path, tmp_path: Path) -> None:
    """Of the right length, so that only reading tells; what was begun doesn't look whole."""
    path = megatron / "__1_0.distcp"
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(CheckpointError, match="can't be read"):
        to_hf(megatron, tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.partial").glob("*.safetensors"))
    assert "didn't end" in inspect(tmp_path / "out.partial").missing[0]


def test_an_existing_output_is_not_touched(whole: Path, hf: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    for convert, source in ((to_megatron, whole / "hf"), (to_hf, whole / "megatron")):
        with pytest.raises(CheckpointError, match="exists already; nothing was changed"):
            convert(source, hf, quiet=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="exists already"):
        to_megatron(whole / "hf", tmp_path / "dangling", quiet=True)
    assert snapshot(tmp_path) == before


def test_a_foreign_directory_at_the_partial_name_is_not_touched(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "precious").write_text("mine")
    with pytest.raises(CheckpointError, match="something else stands"):
        to_megatron(whole / "hf", tmp_path / "out", quiet=True)
    assert snapshot(tmp_path) == {"out.partial/precious": b"mine"}


def test_too_little_room_is_known_before(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "_SPARE", 1 << 60)
    for convert, source in ((to_megatron, whole / "hf"), (to_hf, whole / "megatron")):
        with pytest.raises(CheckpointError, match="too little room"):
            convert(source, tmp_path / "deep" / "out", quiet=True)


LIMITED = """
import resource, sys
from pathlib import Path
from megarl.convert.to_hf import to_hf
from megarl.convert.to_megatron import to_megatron
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    {call}
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("way", ["to_megatron", "to_hf"])
def test_a_disk_that_fills_up(way: str, whole: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the kernel refuses the same writes. The same command then goes on."""
    source, size = (whole / "hf", "file_bytes") if way == "to_megatron" else (whole / "megatron", "shard_bytes")
    out = tmp_path / "out"
    call = f"{way}(Path({str(source)!r}), Path({str(out)!r}), {size}=60_000, quiet=True)"
    script = LIMITED.format(limit=50_000, call=call)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("CheckpointError a file may not become so large"), done.stdout + done.stderr
    assert "decoder.layers." in done.stdout if way == "to_megatron" else "model-00001-of-" in done.stdout
    assert "run the same command" in done.stdout
    assert not out.exists() and "didn't end" in inspect(tmp_path / "out.partial").missing[0]
    if way == "to_megatron":
        to_megatron(source, out, file_bytes=60_000, quiet=True)
        to_hf(out, tmp_path / "back", quiet=True)
    else:
        to_hf(source, out, shard_bytes=60_000, quiet=True)
    found = out if way == "to_hf" else tmp_path / "back"
    assert_same_tensors(tensors(whole / "one"), tensors(found))


@pytest.mark.parametrize("way", ["to_megatron", "to_hf"])
def test_a_full_disk(way: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, where this user may mount it: full while it is written, though there was room at the start."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("only root may mount a small disk")
    monkeypatch.setattr(aside, "_SPARE", -(1 << 40))
    try:
        with pytest.raises(CheckpointError) as caught:
            if way == "to_megatron":
                to_megatron(whole / "hf", place / "out", file_bytes=60_000, quiet=True)
            else:
                to_hf(whole / "megatron", place / "out", shard_bytes=60_000, quiet=True)
        assert "the disk is full" in str(caught.value) and f"{place}/out.partial/" in str(caught.value)
        assert not (place / "out").exists()
        if way == "to_megatron":  # what was finished is kept, and more room is all that it takes
            kept = len(list((place / "out.partial").glob("*.distcp")))
            assert kept > 1
            subprocess.run(["mount", "-o", "remount,size=4m", str(place)], check=True)
            to_megatron(whole / "hf", place / "out", file_bytes=60_000, quiet=True)
            to_hf(place / "out", tmp_path / "back", quiet=True)
            assert_same_tensors(tensors(whole / "one"), tensors(tmp_path / "back"))
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_runs_checkpoint_needs_a_tokenizer(megatron: Path, tmp_path: Path) -> None:
    shutil.rmtree(megatron / "hf")
    with pytest.raises(ConfigError, match="--tokenizer"):
        to_hf(megatron, tmp_path / "out", quiet=True)
    with pytest.raises(ConfigError, match="no such directory"):
        to_hf(megatron, tmp_path / "out", tokenizer=tmp_path / "nowhere", quiet=True)
    assert not list(tmp_path.glob("out*"))


def test_the_tokenizer_of_a_run_is_that_of_its_model(megatron: Path, whole: Path, tmp_path: Path) -> None:
    """RUN/config.yaml names it; a critic may have its own."""
    shutil.rmtree(megatron / "hf")
    for role, model in (("actor", "policy"), ("critic", "judge")):
        shutil.copytree(megatron, tmp_path / "run" / "checkpoints" / "step_3" / role)
        (tmp_path / model).mkdir()
        (tmp_path / model / "tokenizer.json").write_text(model)
    recipe = {"model": str(tmp_path / "policy"), "critic": {"model": str(tmp_path / "judge")}, "actor": {"dtype": "float32"}}
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(recipe))
    for role, model in (("actor", "policy"), ("critic", "judge")):
        to_hf(tmp_path / "run" / "checkpoints" / "step_3" / role, tmp_path / f"{role}-hf", quiet=True)
        assert (tmp_path / f"{role}-hf" / "tokenizer.json").read_text() == model
    shutil.rmtree(tmp_path / "policy")
    with pytest.raises(ConfigError, match="the run began with .*policy, which isn't there"):
        to_hf(tmp_path / "run" / "checkpoints" / "step_3" / "actor", tmp_path / "again", quiet=True)


def test_inspect_names_the_tensors_of_an_unknown_family(hf: Path) -> None:
    edit(hf, model_type="novel")
    found = inspect(hf)
    assert "unsupported model family" in found.missing[0]
    assert "model.layers.N.self_attn.v_proj.weight [28, 40] F32, 6 times" in found.unknown
    assert found.parameters == sum(t.numel() for t in tensors(hf).values())
    assert any("no table:" in line for line in found.lines())
