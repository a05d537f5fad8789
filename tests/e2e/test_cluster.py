"""Worker groups in one real cluster: what reaches the controller, deadlines, and writers that die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray

from megarl.checkpoint.store import CheckpointStore
from megarl.cluster.placement import Slots, check_capacity
from megarl.config.load import load_config
from megarl.controller.context import Context
from megarl.controller.run import save
from megarl.controller.step import ppo_step
from megarl.errors import PlacementError, WorkerError
from tests.e2e.demo import RECIPE, prepare, short
from tests.e2e.started import started

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    data = prepare(tmp_path_factory.mktemp("demo"))
    directory = tmp_path_factory.mktemp("runs") / "run"
    changes = {"warm_start.enabled": "false", "cluster.call_deadline_s": 20, "cluster.save_deadline_s": 20}
    yield from started(load_config(RECIPE, short(data, directory, **changes)))


def test_no_token_reaches_the_controller(run: Context) -> None:
    """What the controller fetches in a step doesn't grow with the tokens, and Ray brings none along unasked."""
    received = []
    for step, longest in enumerate((1, 8), start=1):
        run.sampling = replace(run.sampling, max_response_tokens=longest)
        metrics = ppo_step(run, step)
        run.step = step
        received.append(metrics["controller/bytes_received"])
        assert metrics["response_length/mean"] <= longest
    assert metrics["response_length/mean"] > 2, "the second step must have more tokens"
    assert received[0] == received[1]
    assert received[0] <= 100 * run.samples_per_step
    # Columns lie in the object store of a node, not in this process: Ray would inline small ones into the reply.
    batch, _ = run.groups.rollout.generate_sequences(*requests(run), str(run.paths.train_prompts), run.sampling).result()
    batch, _ = run.groups.actor.forward("actor", batch, {"log_probs": "log_probs"}, phase="test").result()
    refs = [piece.handle.ref for name in ("responses", "log_probs") for piece in batch.pieces(name)]
    assert all(place["node_ids"] for place in ray.experimental.get_object_locations(refs).values())


def requests(run: Context) -> tuple[list, np.ndarray]:
    from megarl.controller.context import sample_requests

    return sample_requests(np.arange(8), 1, seed=0, step=1)


def test_missing_slots_are_named(run: Context) -> None:
    with pytest.raises(PlacementError, match=r"needs 16 CPU and the cluster has [\d.]+: [\d.]+ missing(.|\n)*actor: 8 x 2"):
        check_capacity([Slots("actor", 8, 2.0)])


def test_save_and_dead_writer(run: Context, tmp_path: Path) -> None:
    """A writer killed in the middle ends in an error within the deadline, and the checkpoint before it stays whole."""
    store = CheckpointStore(tmp_path, keep=2)
    save(run, store, {"x": 1.0})
    run.step = 3
    victim = run.groups.critic.facts()["critic rank 1"]["pid"]
    os.kill(victim, signal.SIGSTOP)  # hung: the others wait for it inside the save
    began = time.monotonic()
    try:
        with pytest.raises(WorkerError, match=r"no answer within 20 s from (.*)critic rank 1"):
            save(run, store, {})
    finally:
        os.kill(victim, signal.SIGKILL)
    assert time.monotonic() - began < 60
    assert store.newest().step == 2


def test_dead_worker_is_named(run: Context) -> None:
    """After the test above, critic rank 1 is dead."""
    with pytest.raises(WorkerError, match="critic rank 1 died"):
        run.groups.critic.facts()
