"""On a GPU a trace holds the kernels, and memory is PyTorch's own snapshot."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from megarl.profiling import Profiler, Window

pytestmark = pytest.mark.gpu


def test_kernels_and_allocations_are_recorded(tmp_path: Path) -> None:
    profiler = Profiler()
    for step in ("step_1", "step_2"):  # the history begins anew with each window
        profiler.start(Window(str(tmp_path / step), "actor_rank_0", memory=True))
        with profiler.phase("update actor"):
            x = torch.ones(1024, 1024, device="cuda")
            y = x @ x
        found = profiler.stop()
        assert found.failures == [] and [Path(file).name for file in found.files] == ["actor_rank_0.json.gz", "actor_rank_0.memory.pickle"]
        with gzip.open(tmp_path / step / "actor_rank_0.json.gz", "rt") as stream:
            events = json.load(stream)["traceEvents"]
        assert any(event.get("cat") == "kernel" for event in events), {event.get("cat") for event in events}
        assert any(event.get("name") == "update actor" for event in events)
        snapshot = pickle.loads((tmp_path / step / "actor_rank_0.memory.pickle").read_bytes())
        (history,) = (trace for trace in snapshot["device_traces"] if trace)
        sizes = [entry["size"] for entry in history if entry["action"] == "alloc"]
        assert sizes.count(4 << 20) == 2, sizes
        del x, y
