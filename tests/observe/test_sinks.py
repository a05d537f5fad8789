"""Sinks receive the lines of metrics.jsonl, each step once, also over a resume; and no failure of theirs reaches the run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.observe.metrics import MetricsLog
from megarl.observe.sinks import Sinks, check_sinks, follow

OFFLINE = {"WANDB_MODE": "offline", "WANDB_PROJECT": "test", "WANDB_SILENT": "true"}


def line(step: int, shift: float = 0.0) -> dict[str, float]:
    return {"critic/score/mean": step / 10 + shift, "actor/grad_norm": float("nan") if step == 2 else 1.0}


def in_tensorboard(run_dir: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def in_wandb(run_dir: Path) -> dict[str, dict[int, float]]:
    """What the offline files of a run hold."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, dict[int, float]] = defaultdict(dict)
    for file in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            for name in items.keys() & set(line(1)):
                found[name][items["_step"]] = items[name]
    return found


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log behind wandb's header of 7 bytes: blocks of 32 KiB, in them (checksum, length, kind, part)."""
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # what is left of a block is too short for a record
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of a record, or its last part
            yield whole
            whole = b""


READERS = {"tensorboard": in_tensorboard, "wandb": in_wandb}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_each_step_once_and_again_after_a_resume(tmp_path: Path, name: str) -> None:
    log = MetricsLog(tmp_path)
    sinks = Sinks(tmp_path, [name], after=0, environment=OFFLINE)
    for step in (1, 2, 3):
        log.write(step, line(step))
    assert sinks.close() == []
    found = READERS[name](tmp_path)
    assert found["critic/score/mean"] == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})
    assert found["actor/grad_norm"] == {1: 1.0, 3: 1.0}, "what is not finite is left out"

    log = MetricsLog(tmp_path, resume_from=3)
    sinks = Sinks(tmp_path, [name], after=3, environment=OFFLINE)
    log.write(4, line(4))
    assert sinks.close() == []
    assert READERS[name](tmp_path)["critic/score/mean"] == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})


@pytest.mark.slow
def test_tensorboard_forgets_steps_that_are_done_again(tmp_path: Path) -> None:
    for after, steps, shift in ((0, (1, 2, 3), 0.0), (1, (2, 3), 5.0)):
        log = MetricsLog(tmp_path, resume_from=after)
        sinks = Sinks(tmp_path, ["tensorboard"], after=after, environment={})
        for step in steps:
            log.write(step, line(step, shift))
        assert sinks.close() == []
    assert in_tensorboard(tmp_path)["critic/score/mean"] == pytest.approx({1: 0.1, 2: 5.2, 3: 5.3})


@pytest.mark.slow
def test_a_sink_that_is_named_later_gets_the_steps_before(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in (1, 2):
        log.write(step, line(step))
    assert Sinks(tmp_path, ["tensorboard"], after=2, environment={}).close() == []
    assert set(in_tensorboard(tmp_path)["critic/score/mean"]) == {1, 2}


def test_a_dying_sink_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file where the sink wants a directory")
    sinks = Sinks(tmp_path, ["tensorboard"], after=0, environment={})
    said: list[str] = []
    deadline = time.monotonic() + 60
    while not said and time.monotonic() < deadline:
        said = sinks.warnings()
        time.sleep(0.05)
    assert len(said) == 1
    assert "sink tensorboard ended with code 1; the run goes on" in said[0]
    assert sinks.warnings() == [] and sinks.close() == []
    assert "tensorboard" in (tmp_path / "logs" / "sink-tensorboard.log").read_text()


def test_a_hanging_sink_is_killed(tmp_path: Path) -> None:
    sinks = Sinks(tmp_path, ["tensorboard"], after=0, environment={})
    pid = sinks._processes["tensorboard"].pid
    os.kill(pid, signal.SIGSTOP)
    (said,) = sinks.close(timeout_s=1)
    assert "did not end within 1 s" in said


@pytest.mark.parametrize(("name", "says"), [("tensorbord", "tensorboard | wandb")])
def test_unknown_sinks_are_refused(name: str, says: str) -> None:
    check_sinks(["tensorboard", "wandb"])
    with pytest.raises(ConfigError, match=says.replace("|", r"\|")):
        check_sinks([name])


def test_a_line_that_is_not_whole_yet_waits(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2')
    assert list(follow(file, None)) == [{"step": 1}]
