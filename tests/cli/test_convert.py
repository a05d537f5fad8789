"""``megarl convert`` and the scripts of tools/convert, as users call them."""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli.convert import size_in_bytes
from megarl.cli.main import main
from megarl.convert.progress import Progress, duration, size
from megarl.errors import EXIT_DATA, EXIT_DONE, EXIT_USER
from tests.convert.directories import assert_same_tensors, snapshot, tensors
from tests.weights.families import save_model

TOOLS = Path(__file__).parents[2] / "tools" / "convert"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2", tmp_path_factory.mktemp("model") / "hf")


def test_there_and_back_by_the_scripts(model: Path, tmp_path: Path) -> None:
    there = [sys.executable, TOOLS / "hf_to_megatron.py", "--hf", model, "--out", tmp_path / "megatron", "--verify"]
    done = subprocess.run(there, capture_output=True, text=True, timeout=60, check=True)
    elements = sum(t.numel() for t in tensors(model).values())
    assert done.stdout.splitlines() == [f"verified: {elements:,} elements are equal bit for bit", str(tmp_path / "megatron")]
    assert "to Megatron: " in done.stderr and "(100%)" in done.stderr and "B/s" in done.stderr
    back = [sys.executable, TOOLS / "megatron_to_hf.py", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back", "--verify"]
    done = subprocess.run(back, capture_output=True, text=True, timeout=60, check=True)
    assert f"verified: {elements:,} elements" in done.stdout
    assert_same_tensors(tensors(model), tensors(tmp_path / "back"))


def test_a_dry_run_tells_of_every_tensor_once_and_writes_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(model)
    assert main(["convert", "to-megatron", "--hf", str(model), "--out", str(tmp_path / "megatron"), "--dry-run"]) == EXIT_DONE
    lines = capsys.readouterr().out.splitlines()
    names = list(tensors(model))
    told = [line.split(" ")[0] for line in lines if " -> " in line]
    assert sorted(told) == sorted(names)
    down = next(line for line in lines if line.startswith("model.layers.3.mlp.down_proj.weight "))
    assert down == "model.layers.3.mlp.down_proj.weight [40, 44] float32 -> decoder.layers.mlp.linear_fc2.weight[3:4, 0:40, 0:44]"
    query = next(line for line in lines if line.startswith("model.layers.0.self_attn.q_proj.weight "))
    assert "decoder.layers.self_attention.linear_qkv.weight[0:1, 0:20, 0:40] and 1 more boxes, 1,600 elements" in query
    assert lines[-2] == f"coverage: {len(names)} tensors used exactly once, 0 dropped, none left over"
    assert "nothing was written" in lines[-1]
    assert snapshot(model) == before and not list(tmp_path.iterdir())


def test_a_dry_run_back(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["convert", "to-megatron", "--hf", str(model), "--out", str(tmp_path / "megatron")])
    before = snapshot(tmp_path)
    capsys.readouterr()
    command = ["convert", "to-hf", "--megatron", str(tmp_path / "megatron"), "--out", str(tmp_path / "back"), "--dry-run"]
    assert main([*command, "--shard-size", "30kB", "--dtype", "bfloat16"]) == EXIT_DONE
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split(" -> ")[1].split(" ")[0] for line in lines if " -> " in line) == sorted(tensors(model))
    assert any(re.search(r"model.norm.weight \[40\] bfloat16 in model-(\d+)-of-\1.safetensors$", line) for line in lines)
    assert snapshot(tmp_path) == before


def test_what_is_dropped_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    source = save_model("qwen2", tmp_path / "hf")
    kept = tensors(source)
    save_file(kept | {"lm_head.weight": kept["model.embed_tokens.weight"].clone()}, source / "model.safetensors")
    assert main(["convert", "to-megatron", "--hf", str(source), "--out", str(tmp_path / "out"), "--dry-run"]) == EXIT_DONE
    out = capsys.readouterr().out
    assert "lm_head.weight dropped: tied: equal to the embedding" in out and "1 dropped" in out
    assert main(["convert", "to-megatron", "--hf", str(source), "--out", str(tmp_path / "out")]) == EXIT_DONE
    assert "left out: lm_head.weight: tied: equal to the embedding" in capsys.readouterr().out


def test_inspect(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["convert", "to-megatron", "--hf", str(model), "--out", str(tmp_path / "megatron")])
    capsys.readouterr()
    elements = sum(t.numel() for t in tensors(model).values())
    for directory, kind in ((model, "Hugging Face"), (tmp_path / "megatron", "Megatron")):
        assert main(["convert", "inspect", str(directory)]) == EXIT_DONE
        text = capsys.readouterr().out
        assert kind in text and "qwen2, 6 layers, language model" in text and f"{elements:,} in" in text and "nothing is missing" in text
        assert main(["convert", "inspect", str(directory), "--json"]) == EXIT_DONE
        found = json.loads(capsys.readouterr().out)
        assert (found["family"], found["layers"], found["parameters"]) == ("qwen2", 6, elements)
        assert found["dtypes"] == {"float32": 4 * elements} and found["missing"] == []
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-1])
    assert main(["convert", "inspect", str(broken)]) == EXIT_DATA
    assert "NOT WHOLE" in capsys.readouterr().out


def test_inspect_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step_3" / "actor").mkdir(parents=True)
    (tmp_path / "step_3" / "actor" / ".metadata").write_bytes(b"")
    assert main(["convert", "inspect", str(tmp_path / "step_3")]) == EXIT_USER
    assert "name one of its roles: actor" in capsys.readouterr().err
    assert main(["convert", "inspect", str(tmp_path / "nowhere")]) == EXIT_USER
    assert "no such directory" in capsys.readouterr().err


def test_errors_end_with_their_code(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "to-megatron", "--hf", str(tmp_path), "--out", str(tmp_path / "out")]) == EXIT_USER
    assert "config.json is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["convert", "to-hf", "--megatron", str(model), "--out", str(tmp_path / "out"), "--shard-size", "many"])
    assert "is no size" in capsys.readouterr().err


def test_sizes() -> None:
    assert [size_in_bytes(t) for t in ("5GB", "500 mb", "2GiB", "1.5k", "17")] == [5 * 10**9, 5 * 10**8, 2**31, 1500, 17]
    for text in ("", "GB", "-1GB", "5 parsecs", "0"):
        with pytest.raises(argparse.ArgumentTypeError):
            size_in_bytes(text)
    assert [size(n) for n in (999, 1500, 5e9, 2.5e12)] == ["999 B", "1.50 kB", "5.00 GB", "2.50 TB"]
    assert [duration(s) for s in (4.04, 200, 3720)] == ["4.0 s", "3 min 20 s", "1 h 02 min"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("megarl.convert.progress.time.monotonic", lambda: now[0])
    for stream, expected in ((Terminal(), 6), (io.StringIO(), 1)):
        now[0] = 0.0
        progress = Progress("to Megatron", total=10**9, done=5 * 10**8, stream=stream)
        for _ in range(50):  # five seconds
            now[0] += 0.1
            progress.add(4 * 10**6)
        progress.finish()
        text = stream.getvalue()
        shown = text.count("\r") if isinstance(stream, Terminal) else text.count("\n")
        assert expected - 1 <= shown <= expected
        assert text.count("\n") == 1
        assert "700.00 MB of 1.00 GB (70%), 40.00 MB/s, 7.5 s left" in text
