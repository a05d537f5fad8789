"""The pool against functions that hang, die, fork, print and lie; all in real processes."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megarl.errors import ConfigError, DataError, WorkerError
from megarl.rewards.pool import RewardPool

# What a response asks for is what the function does; one file serves all tests, so that processes start once.
HOSTILE = """
import asyncio, os, re, signal, sys, threading, time
from pathlib import Path
import helper_of_reward

print("printed while imported")

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return ACTIONS[solution_str](ground_truth)

async def compute_async(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    if solution_str == "hang":
        await asyncio.sleep(1000)
    return {"score": len(solution_str), "is_async": True}

def spin(_):
    while True:
        pass

def deaf(_):
    for number in range(1, 64):
        if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
            signal.signal(number, signal.SIG_IGN)
    spin(_)

def stubborn(_):
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass

def chatty(_):
    print("x" * 100000)
    sys.stdout.write("\\x00\\x00\\x00\\x04null")
    sys.stdout.flush()
    os.write(1, b"raw")
    return 1

def fork_returns(_):
    os.fork()
    return 0.5

def fork_stays(pid_file):
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(5)

def fork_hangs(pid_file):
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    Path(pid_file).write_text(str(child))
    spin(None)

def scribble(_):
    for fd in range(3, 64):
        try:
            os.write(fd, b"\\xff" * 64)
        except OSError:
            pass
    return 1

def die_once(marker):
    if not Path(marker).exists():
        Path(marker).write_text("died")
        os._exit(9)
    return 0.75

class Odd:
    def __repr__(self):
        raise RuntimeError("no repr")

def throw(error):
    raise error

ACTIONS = {
    "one": lambda _: 1, "true": lambda _: True, "half": lambda _: 0.5, "read_stdin": lambda _: len(sys.stdin.read()),
    "dict": lambda _: {"score": 0.25, "length": 3, "note": "text", "right": False}, "list": lambda _: [0.125, 7],
    "helper": lambda _: helper_of_reward.VALUE, "extra_nan": lambda _: {"score": 1, "x": float("nan")},
    "spin": spin, "sleep": lambda _: time.sleep(1000), "deaf": deaf, "stubborn": stubborn,
    "regex": lambda _: re.match("(a+)+$", "a" * 60 + "b") or 0,
    "chatty": chatty, "fork_returns": fork_returns, "fork_stays": fork_stays, "fork_hangs": fork_hangs, "scribble": scribble,
    "raise": lambda _: 1 / 0, "exit": lambda _: sys.exit(0), "interrupt": lambda _: throw(KeyboardInterrupt()),
    "recursion": lambda _: ACTIONS["recursion"](_), "memory": lambda _: throw(MemoryError()), "os_exit": lambda _: os._exit(0),
    "segfault": lambda _: os.kill(os.getpid(), signal.SIGSEGV), "die_once": die_once,
    "nan": lambda _: float("nan"), "inf": lambda _: {"score": float("-inf")}, "none": lambda _: None, "text": lambda _: "1.0",
    "no_score": lambda _: {"acc": 1}, "empty_list": lambda _: [], "complex": lambda _: 1j, "huge": lambda _: 10**400,
    "object": lambda _: Odd(), "list_of_text": lambda _: ["1"],
}
"""
TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    (folder / "helper_of_reward.py").write_text("VALUE = 0.375")
    (folder / "reward.py").write_text(HOSTILE)
    return str(folder / "reward.py")


@pytest.fixture(scope="module")
def pool(reward_file):
    with RewardPool(reward_file, "compute_score", 3, TIMEOUT_S) as pool:
        yield pool


def item(what, ground_truth="truth"):
    return {"data_source": "test", "solution_str": what, "ground_truth": ground_truth, "extra_info": {"index": 1}}


GOOD = {"one": 1, "true": 1, "half": 0.5, "dict": 0.25, "list": 0.125, "helper": 0.375, "chatty": 1, "read_stdin": 0}


def test_scores_come_back_in_order(pool):
    scores = pool.score([item(what) for what in GOOD] * 5)
    assert scores.score.tolist() == [*GOOD.values()] * 5
    assert set(scores.status) == {"ok"}
    assert scores.message == ()


def test_numbers_beside_the_score_are_kept(pool):
    scores = pool.score([item("one"), item("dict"), item("extra_nan")])
    assert set(scores.extra) == {"length", "right", "x"}  # "note" is no number
    assert scores.extra["length"][1] == 3.0
    assert scores.extra["right"][1] == 0.0
    assert np.isnan(scores.extra["length"][0])
    assert scores.status == ("ok", "ok", "ok")


def test_a_hang_is_a_timeout_and_the_pool_goes_on(pool):
    hangs = ["spin", "sleep", "deaf", "stubborn", "regex"]
    began = time.monotonic()
    scores = pool.score([item("one"), *map(item, hangs), item("half")])
    assert time.monotonic() - began < len(hangs) * TIMEOUT_S + 5
    assert scores.status == ("ok", *["timeout"] * len(hangs), "ok")
    assert np.isnan(scores.score).tolist() == [status == "timeout" for status in scores.status]
    assert all("within 1 s" in message for message in scores.message)
    assert pool.score([item("one")] * 4).score.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise", "ZeroDivisionError"),
        ("exit", "SystemExit"),
        ("recursion", "RecursionError"),
        ("memory", "MemoryError"),
        ("object", "no repr"),
        ("os_exit", "exit code 0"),
        ("segfault", "signal 11"),
        ("interrupt", "the process died"),
        ("scribble", "wrote into the pool's pipe"),
        ("fork_stays", "exit code 5"),
    ],
)
def test_a_failure_is_an_error_and_says_why(pool, what, said):
    scores = pool.score([item(what), item("one")])
    assert scores.status == ("error", "ok")
    assert math.isnan(scores.score[0])
    assert said in scores.message[0]
    assert scores.message[0].startswith("item 0, error")


@pytest.mark.parametrize("what", ["nan", "inf", "none", "text", "no_score", "empty_list", "complex", "huge", "list_of_text"])
def test_what_is_no_finite_number_is_invalid(pool, what):
    scores = pool.score([item(what)])
    assert scores.status == ("invalid",)
    assert math.isnan(scores.score[0])
    assert "expected a finite number" in scores.message[0]


def test_a_process_that_died_is_asked_once_more(pool, tmp_path):
    assert pool.score([item("die_once", str(tmp_path / "marker"))]).score.tolist() == [0.75]
    assert (tmp_path / "marker").exists()


def test_a_fork_that_returns_does_not_answer_twice(pool):
    scores = pool.score([item("fork_returns"), item("one"), item("half")] * 4)
    assert scores.score.tolist() == [0.5, 1.0, 0.5] * 4


def test_forks_of_a_killed_process_are_killed_too(pool, tmp_path):
    pid_file = tmp_path / "pid"
    assert pool.score([item("fork_hangs", str(pid_file))]).status == ("timeout",)
    wait_until(lambda: not alive(int(pid_file.read_text())))


def test_async_functions(reward_file):
    with RewardPool(reward_file, "compute_async", 1, TIMEOUT_S) as pool:
        scores = pool.score([item("abc"), item("hang"), item("ab")])
    assert scores.status == ("ok", "timeout", "ok")
    assert scores.score[[0, 2]].tolist() == [3.0, 2.0]
    assert scores.extra["is_async"][0] == 1.0


def test_large_texts_pass_the_pipe(pool):
    big = "\ud83d\ude00 and a lone \ud800 " * 5_000
    assert pool.score([item("one", big), item("half", {"nested": [big]})]).score.tolist() == [1.0, 0.5]


def test_no_items_and_bad_items(pool):
    assert pool.score([]).score.shape == (0,)
    with pytest.raises(DataError, match="item 1 to score"):
        pool.score([item("one"), {"solution_str": "one"}])
    with pytest.raises(DataError, match="item 0 to score"):
        pool.score([item("one") | {"unknown": 1}])
    with pytest.raises(DataError, match="can't be sent"):
        pool.score([item("one", {1, 2})])
    assert pool.score([item("one")]).score.tolist() == [1.0]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "reward file not found"),
        ("def other(): pass", r"no function 'compute_score'[\s\S]*other"),
        ("compute_score = 3", "is no function"),
        ("def compute_score(data_source, solution_str): return 1", r"another signature[\s\S]*called by keyword"),
        ("def compute_score(prompt, data_source, solution_str, ground_truth, extra_info): return 1", "another signature"),
        ("def compute_score(:", "SyntaxError"),
        ("import a_package_that_is_not_there", "ModuleNotFoundError"),
        ("raise SystemExit(0)", "SystemExit"),
    ],
)
def test_a_bad_file_is_refused_at_construction(tmp_path, source, said):
    if source is not None:
        (tmp_path / "reward.py").write_text(source)
    with pytest.raises(ConfigError, match=said):
        RewardPool(str(tmp_path / "reward.py"), "compute_score", 1, TIMEOUT_S)


def test_a_file_that_kills_its_process_is_told(tmp_path):
    (tmp_path / "reward.py").write_text("import os\nos._exit(3)")
    with pytest.raises(WorkerError, match="did not start"):
        RewardPool(str(tmp_path / "reward.py"), "compute_score", 1, TIMEOUT_S)


def test_settings_out_of_range_are_refused(reward_file):
    for workers, timeout_s in ((0, 1.0), (1, 0.0), (1, math.inf)):
        with pytest.raises(ConfigError, match="out of range"):
            RewardPool(reward_file, "compute_score", workers, timeout_s)


def test_a_closed_pool_leaves_no_process(reward_file):
    pool = RewardPool(reward_file, "compute_score", 2, TIMEOUT_S)
    pids = [process._process.pid for process in pool._processes]
    pool.close()
    pool.close()
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(WorkerError, match="closed"):
        pool.score([item("one")])


def test_processes_end_when_their_pool_is_killed(reward_file):
    script = (
        "import sys, threading, time; from megarl.rewards.pool import RewardPool\n"
        f"pool = RewardPool({reward_file!r}, 'compute_score', 2, 1000.0)\n"
        f"threading.Thread(target=pool.score, args=([{item('sleep')!r}],), daemon=True).start()\n"
        "time.sleep(0.3); print(*(p._process.pid for p in pool._processes), flush=True); time.sleep(1000)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    wait_until(lambda: not any(alive(pid) for pid in pids))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # a zombie waits for its reaper only


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
