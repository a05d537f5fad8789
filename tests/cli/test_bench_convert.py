"""``megarl bench convert``: what it reports of a real, small measurement, and its memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.controller.bench_convert import table
from megarl.errors import EXIT_DONE, EXIT_USER


def test_a_small_measurement(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Memory is bounded by two files of the model, of which there are four. Rates of so few bytes are noise, and are only looked at."""
    assert main(["bench", "convert", "--gib", "0.5", "--rounds", "1", "--dir", str(tmp_path), "--json"]) == EXIT_DONE
    found = json.loads(capfd.readouterr().out)
    assert 0.4 * 2**30 < found["model_bytes"] < 0.6 * 2**30
    for kind in ("plain", "to_megatron", "to_hf"):
        assert found["rate"][kind] == pytest.approx(found["model_bytes"] / found["seconds"][kind][0])
        assert found["ratio"][kind] == pytest.approx(found["rate"][kind] / found["rate"]["plain"])
    for kind in ("to_megatron", "to_hf"):
        assert (16 << 20) < found["peak_bytes"][kind] < 2 * found["file_bytes"]
    assert not list(tmp_path.iterdir())
    assert table(found)[-1].startswith("target 0.7: ")


def test_no_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "convert", "--gib", "1e6", "--dir", str(tmp_path)]) == EXIT_USER
    assert "no room" in capsys.readouterr().err
