"""The recorder of one process: what it writes, that it costs nothing outside a window, and that nothing it meets is an error."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.profiling import Profiler, Recorded, Window, phase
from tests.e2e.demo import ROOT


class Worker:
    """As workers are: methods are phases."""

    def __init__(self) -> None:
        self.profiler = Profiler()

    @phase("double {}")
    def double(self, name: str, x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
        """Doc."""
        return x * 2**times

    @phase("fail")
    def fail(self) -> None:
        raise KeyError("of the work itself")


def record(tmp_path: Path, worker: Worker, **settings: bool) -> Recorded:
    worker.profiler.start(Window(str(tmp_path / "step_1"), "actor_rank_0", **settings))
    worker.double("actor", torch.ones(1000), times=3)
    return worker.profiler.stop()


def events(file: Path) -> list[dict]:
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        return json.load(stream)["traceEvents"]


def test_a_window_is_a_chrome_trace_with_named_ranges(tmp_path: Path) -> None:
    worker = Worker()
    for _ in range(2):  # a second window takes the first one's files' place
        assert record(tmp_path, worker) == Recorded([str(tmp_path / "step_1" / "actor_rank_0.json.gz")])
    found = events(tmp_path / "step_1" / "actor_rank_0.json.gz")
    (range_,) = (event for event in found if event.get("name") == "double actor" and event.get("cat") == "user_annotation")
    (kernel,) = (event for event in found if event.get("name") == "aten::mul")
    assert range_["ph"] == "X" and range_["ts"] <= kernel["ts"] <= range_["ts"] + range_["dur"]
    assert [path.name for path in (tmp_path / "step_1").iterdir()] == ["actor_rank_0.json.gz"], "nothing is left aside"


def test_stacks_are_in_it_when_asked_for(tmp_path: Path) -> None:
    record(tmp_path, Worker(), with_stack=True)
    assert any("test_profiler.py" in event.get("name", "") for event in events(tmp_path / "step_1" / "actor_rank_0.json.gz"))


def test_resident_memory_of_each_phase(tmp_path: Path) -> None:
    worker = Worker()
    worker.profiler.start(Window(str(tmp_path), "critic_rank_1", memory=True))
    kept = worker.double("critic", torch.ones(32 << 20))  # 128 MiB, and as much again while it is made
    with pytest.raises(KeyError, match="of the work itself"):
        worker.fail()
    found = worker.profiler.stop()
    assert [Path(file).name for file in found.files] == ["critic_rank_1.json.gz", "critic_rank_1.memory.json"]
    table = json.loads((tmp_path / "critic_rank_1.memory.json").read_text())
    assert "RSS" in table["unit"] and [row["phase"] for row in table["phases"]] == ["double critic", "fail"]
    assert 100 << 20 < table["phases"][0]["after"] - table["phases"][0]["before"] < 400 << 20
    del kept


def test_outside_a_window_nothing_happens(tmp_path: Path) -> None:
    worker = Worker()
    assert worker.double("actor", torch.ones(1)).item() == 2.0
    assert worker.profiler.stop() == Recorded()
    assert Worker.double.__doc__ == "Doc." and not list(tmp_path.iterdir())


def test_a_place_that_can_not_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "step_1").write_text("a file")
    worker = Worker()
    found = record(tmp_path, worker, memory=True)
    assert found.files == [] and len(found.failures) == 2
    assert "actor_rank_0: the profiler could not be started: FileExistsError" in found.failures[0]
    (tmp_path / "step_1").unlink()
    assert record(tmp_path, worker).failures == [], "the next window starts anew"


FULL = """
import resource, sys
from pathlib import Path
from megarl.profiling import Window
from tests.profiling.test_profiler import Worker, record
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
found = record(Path(sys.argv[1]), Worker())
print(found.files, found.failures)
"""


@pytest.mark.slow
def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    """PyTorch itself only logs that its file was cut off. Here no file may have more than 600 bytes."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[] ['actor_rank_0: the trace could not be written: OSError: "), done.stdout
    assert "is the disk full?" in done.stdout
    assert list((tmp_path / "step_1").iterdir()) == []
