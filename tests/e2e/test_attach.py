"""Runs on a Ray cluster that others started: relative paths hold, what a run took is given back however it ends, the cluster lives on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.heads import Head, head_node, joined_environment
from tests.e2e.demo import ROOT, metrics

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CPUS = 4

# What an operator may have in the shell where the cluster is started; none of it may reach a run's numbers.
OPERATORS = {"PATH": "/usr/bin:/bin", "HOME": "/root", "OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_OFFLINE": "0"}

STATE = """
import json, sys
import ray
from ray._private.state import actors
ray.init(address=sys.argv[1], log_to_driver=False)
print("state " + json.dumps({
    "actors": sorted(actor["State"] for actor in actors().values()),
    "groups": sorted(group["state"] for group in ray.util.placement_group_table().values()),
    "free": ray.available_resources().get("CPU"),
}))
"""

CHECK = """
import json, sys
import ray
from megarl.cluster.nodes import check_nodes
from megarl.cluster.placement import start_cluster
from megarl.errors import MegarlError
try:
    start_cluster(sys.argv[1])
    paths, token, env = json.loads(sys.argv[2])
    print("differences", check_nodes(paths, token, env, 60))
except MegarlError as error:
    print(type(error).__name__, error)
    sys.exit(error.exit_code)
"""

OTHER_VERSION = """
import json, sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
said = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", b"cluster"))
client.internal_kv_put(b"CLUSTER_METADATA", json.dumps(said | {sys.argv[2]: "2.1.0"}).encode(), True, b"cluster")
"""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    place = tmp_path_factory.mktemp("operator")
    with head_node(place / "log", CPUS, OPERATORS, place) as found:
        yield found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which a user works: data, model, a reward function and a plugin."""
    place = tmp_path_factory.mktemp("user")
    prepare = [sys.executable, ROOT / "recipes" / "bench" / "prepare.py", "C0", "--out", place / "bench"]
    subprocess.run(prepare, check=True, timeout=120)
    shutil.copy(ROOT / "recipes" / "bench" / "C0.yaml", place)
    shutil.copy(ROOT / "recipes" / "bench" / "S0.yaml", place)
    shutil.copy(ROOT / "recipes" / "bench" / "reward.py", place / "my_reward.py")
    (place / "bad_reward.py").write_text("def compute_score(*args, **kwargs):\n    raise ValueError('no score today')\n")
    shutil.copy(ROOT / "tests" / "e2e" / "plugin_estimator.py", place / "my_plugin.py")
    return place


def start(place: Path, address: str, run_dir: str, *, reward: str = "my_reward.py", steps: int = 1) -> subprocess.Popen[str]:
    """``megarl train`` in ``place``; every path is relative."""
    changes = {
        "model": "bench/model",
        "data.train_files": "[bench/train.parquet]",
        "reward.path": reward,
        "reward.on_failure": "abort",
        "plugins": "[my_plugin]",
        "algorithm.advantage_estimator": "test_plain_score",
        "cluster.address": address,
        "cluster.placement": "separate",
        "run.dir": run_dir,
        "run.total_steps": steps,
        "run.save_every_steps": 0,
        "run.export_hf": "true",
    }
    command = [sys.executable, "-m", "megarl.cli.main", "train", "C0.yaml", *(f"{key}={value}" for key, value in changes.items())]
    return subprocess.Popen(
        command,
        cwd=place,
        env=joined_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_as_from_a_terminal,  # noqa: PLW1509 - this process has no threads of its own
    )


def _as_from_a_terminal() -> None:
    """Where these tests are a shell's background job, they are told to ignore Ctrl-C, and so would be what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finished(process: subprocess.Popen[str], code: int) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, out + err
    return out + err


def check_given_back(head: Head, before: set[int]) -> None:
    """The cluster lives, and within half a minute nothing of a run is left: no slot, no actor, no process."""
    deadline = time.monotonic() + 30
    while True:
        done = subprocess.run(
            [sys.executable, "-c", STATE, head.address], capture_output=True, text=True, timeout=60, check=True, env=joined_environment()
        )
        state = json.loads(done.stdout.rpartition("state ")[2])
        left = [p for p in head.descendants() - before if _works(p)]
        if set(state["actors"]) <= {"DEAD"} and set(state["groups"]) <= {"REMOVED"} and state["free"] == CPUS and not left:
            break
        assert time.monotonic() < deadline, (state, left)
        time.sleep(0.5)
    assert head.process.poll() is None


def _works(pid: int) -> bool:
    """Ray keeps idle processes of its own for the next run; all others must go."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(title) and not title.startswith("ray::IDLE") and "default_worker.py" not in title


def test_runs_one_after_another_and_each_gives_back_what_it_took(head: Head, place: Path) -> None:
    before = head.descendants()
    said = finished(start(place, head.address, "runs/one"), 0)
    assert "done: 1 steps" in said and "warning: node" not in said
    assert (place / "runs" / "one" / "model" / "config.json").is_file()
    assert metrics(place / "runs" / "one")[0]["actor/grad_norm"] > 0
    check_given_back(head, before)

    interrupted = start(place, head.address, "runs/two", steps=500)
    log = place / "runs" / "two" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.is_file() and log.read_text()):
        assert interrupted.poll() is None and time.monotonic() < deadline, interrupted.communicate()
        time.sleep(0.2)
    interrupted.send_signal(signal.SIGINT)
    assert "interrupted" in finished(interrupted, 130)
    check_given_back(head, before)

    said = finished(start(place, head.address, "runs/three", reward="bad_reward.py"), 3)
    assert "no score today" in said
    check_given_back(head, before)

    said = finished(start(place, head.address, "runs/one", steps=2), 0)
    assert "resumed from" in said and "done: 2 steps" in said
    check_given_back(head, before)


def check(head: Head, cwd: Path, paths: dict[str, str], token: tuple[str, str], env: dict[str, str]) -> tuple[int, str]:
    command = [sys.executable, "-c", CHECK, head.address, json.dumps([paths, token, env])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=joined_environment())
    return done.returncode, done.stdout + done.stderr


def test_what_a_node_must_have_in_common(head: Head, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("mine")
    token = (str(tmp_path / "lock"), "mine")
    code, said = check(head, tmp_path, {"run.dir": str(tmp_path)}, token, {})
    assert (code, "differences []" in said) == (0, True), said

    code, said = check(head, tmp_path, {"model": "/nowhere/model"}, token, {})
    assert code == 2 and "missing there: model = /nowhere/model" in said and "file system that all nodes share" in said
    code, said = check(head, tmp_path, {}, (token[0], "another's"), {})
    assert code == 2 and "lock, as this run wrote it" in said

    shutil.copytree(ROOT / "megarl", tmp_path / "old" / "megarl", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "old" / "megarl" / "types.py", "a") as stream:
        stream.write("\n# older\n")
    code, said = check(head, tmp_path, {}, token, {"PYTHONPATH": str(tmp_path / "old")})
    assert code == 2 and "a node of the cluster has another megarl" in said and str(tmp_path / "old" / "megarl") in said

    (tmp_path / "none" / "megarl").mkdir(parents=True)
    (tmp_path / "none" / "megarl" / "__init__.py").write_text("")
    code, said = check(head, tmp_path, {}, token, {"PYTHONPATH": str(tmp_path / "none")})
    assert code == 2 and "a node of the cluster can't run megarl (in node" in said and "got:      AttributeError: module 'megarl" in said, (
        said
    )


def test_a_cluster_that_this_process_can_not_work_with(head: Head, place: Path) -> None:
    """Comes last: it has the head say that it is of another version, as heads of other versions do."""
    said = finished(start(place, f"ray://{head.address}", "runs/client"), 2)
    assert "cluster.address=auto" in said and not (place / "runs" / "client" / "metrics.jsonl").exists()
    for part, what in (("python_version", "Python: 2.1.0"), ("ray_version", "cluster has Ray version 2.1.0")):
        command = [sys.executable, "-c", OTHER_VERSION, head.address, part]
        subprocess.run(command, check=True, timeout=60, env=joined_environment())
        said = finished(start(place, head.address, "runs/old"), 2)
        assert "the Ray cluster was started with another Ray or Python" in said and what in said, said
    assert head.process.poll() is None
