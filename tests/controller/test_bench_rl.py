"""The figures of ``megarl bench rl`` from a recorded run of C0, and the command itself, whole."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.controller import bench_rl as bench
from megarl.controller.bench_rl_table import tables
from megarl.errors import ConfigError, WorkerError

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "recorded" / "bench_rl"  # three steps of C0 on two cores of a CPU
STEPS = [json.loads(line) for line in (RECORDED / "metrics.jsonl").read_text().splitlines()]

Run = Callable[..., Path]


def c0(*overrides: str) -> Config:
    return load_config(ROOT / "recipes" / "bench" / "C0.yaml", ("run.total_steps=3", *overrides))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Writes the recorded run with changes: its device, and numbers of its last step."""

    def write(device: str = "cpu", lines: int = 3, **changes: float) -> Path:
        facts = json.loads((RECORDED / "run.json").read_text())
        facts["fingerprint"]["device"] = device
        (tmp_path / "run.json").write_text(json.dumps(facts))
        steps = [*STEPS[:-1], STEPS[-1] | changes][:lines]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        return tmp_path

    return write


@pytest.fixture
def on_gpu(tmp_path: Path) -> Config:
    """C0 as if for a GPU: bfloat16, and a model directory that has a config.json."""
    spec = importlib.util.spec_from_file_location("bench_prepare", ROOT / "recipes" / "bench" / "prepare.py")
    assert spec is not None and spec.loader is not None
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    prepare.model_config(prepare.TINY, eos=0, pad=1).save_pretrained(tmp_path / "model")
    return c0(f"model={tmp_path / 'model'}", "actor.dtype=bfloat16", "rollout.dtype=bfloat16")


def test_medians_and_spread_of_the_timed_steps(run: Run) -> None:
    result = bench.summarise(c0(), run(), warmup=1)
    assert (result["steps"], result["warmup"], len(result["metrics"])) == (2, 1, 3)
    gen = [STEPS[1]["timing_s/gen"], STEPS[2]["timing_s/gen"]]
    assert result["phases"]["gen"] == {
        "median": sum(gen) / 2, "min": min(gen), "max": max(gen), "values": gen, "bound": None, "ratio": None
    }  # fmt: skip
    assert list(result["phases"]) == [
        "sync_weights", "gen", "sleep", "reward", "old_log_prob", "ref", "adv", "update_actor", "controller", "rest", "step"
    ]  # fmt: skip
    assert list(result["stages"]) == [f"sync_{s}" for s in ("wake_weights", "open", "copy", "check", "process", "wake_cache")]


def test_phases_add_up_to_the_step(run: Run) -> None:
    phases = bench.summarise(c0(), run(), warmup=0)["phases"]
    for i, step in enumerate(STEPS):
        parts = sum(phase["values"][i] for name, phase in phases.items() if name != "step")
        assert parts == pytest.approx(step["timing_s/step"]) and phases["step"]["values"][i] == step["timing_s/step"]


def test_a_phase_that_nobody_knows_yet_is_shown_before_the_rest(run: Run) -> None:
    before = bench.summarise(c0(), run(), warmup=2)["phases"]
    found = bench.summarise(c0(), run(**{"timing_s/teach": 0.01, "timing_s/save_checkpoint": 9.0}), warmup=2)["phases"]
    assert list(found)[-3:] == ["teach", "rest", "step"]
    assert found["rest"]["median"] == pytest.approx(before["rest"]["median"] - 0.01)


def test_rates_and_guards(run: Run) -> None:
    result = bench.summarise(c0(), run(), warmup=2)
    step, gen = STEPS[2]["timing_s/step"], STEPS[2]["timing_s/gen"]
    rates = {name: rate["median"] for name, rate in result["throughput"].items()}
    assert rates == pytest.approx(
        {"tokens_per_s": 8192 / step, "generated_tokens_per_s": 4096 / step, "generated_tokens_per_gen_s": 4096 / gen}
    )
    guards = result["guards"]
    assert (guards["samples"], guards["optimizer_steps"], guards["critic_optimizer_steps"]) == ([128], 1, 0)
    assert (guards["tokens"], guards["response_tokens_trained"]) == ([8192.0], [4096.0])
    assert guards["log_prob_gap_max"] == STEPS[2]["training/rollout_logprobs_diff_max"] > 0
    assert guards["log_prob_gap_mean"] is None  # that run did not log it


def test_tables_of_an_unknown_device_tell_no_bounds(run: Run) -> None:
    result = bench.summarise(c0(), run(), warmup=1) | {"workload": "C0", "command": "megarl bench rl --workload C0", "seconds": 30.0}
    lines = tables(result)
    assert lines[0] == "Workload C0 on cpu: 2 steps after 1 to warm up"
    gen = result["phases"]["gen"]
    assert f"| gen | {gen['median']:.4f} | {gen['min']:.4f} - {gen['max']:.4f} | n/a | n/a |" in lines
    assert "No bounds: the rates of this device were never measured: cpu." in lines
    assert lines.index(next(line for line in lines if line.startswith("| - sync_wake_weights"))) == 5
    assert "| response tokens trained a step | 4,096 |" in lines
    assert "| log-prob gap of trainer and engine, mean | n/a |" in lines
    assert any(line.startswith("| actor rank 0 |") and line.endswith(" s | n/a | 0.85 GiB |") for line in lines)


def test_tables_on_a_known_device_set_each_phase_against_its_bound(run: Run, on_gpu: Config) -> None:
    result = bench.summarise(on_gpu, run("NVIDIA H200"), warmup=1) | {"workload": "C0", "command": "", "seconds": 30.0}
    bounds = result["bounds"]
    assert bounds.keys() == {"sync_weights", "gen", "old_log_prob", "ref", "update_actor", "step"}
    assert bounds["step"] == pytest.approx(bounds["gen"] + bounds["ref"] + bounds["update_actor"])
    gen, adv = result["phases"]["gen"], result["phases"]["adv"]
    assert gen["bound"] == bounds["gen"] and gen["ratio"] == pytest.approx(gen["median"] / bounds["gen"])
    assert adv["bound"] is None and adv["ratio"] is None
    lines = tables(result)
    assert any(line.startswith("| gen |") and line.endswith(f"| {bounds['gen']:.4f} | {gen['ratio']:.2f} |") for line in lines)
    assert any(line.startswith("| adv |") and line.endswith("|  |  |") for line in lines)
    assert "No part of the step's bound: old_log_prob, sync_weights." in lines


def test_device_memory_is_shown_where_a_run_recorded_it(run: Run) -> None:
    directory = run()
    facts = json.loads((directory / "run.json").read_text())
    facts["memory"]["actor rank 0"]["device_peak"] = 3 * 2**29
    (directory / "run.json").write_text(json.dumps(facts))
    lines = tables(bench.summarise(c0(), directory, warmup=0) | {"workload": "C0", "command": "", "seconds": 1.0})
    assert any(line.startswith("| actor rank 0 |") and "| 1.50 GiB | 0.85 GiB |" in line for line in lines)


@pytest.mark.parametrize(
    ("overrides", "changes", "reason"),
    [
        (["actor.dtype=float32", "rollout.dtype=float32"], {}, "they hold for bfloat16, and this run has float32"),
        (["actor.layout.tensor=2"], {}, "one GPU"),
        (["rollout.engines=2"], {}, "one GPU"),
        (["cluster.placement=separate"], {}, "one GPU"),
        ([], {"response_length/min": 31.0}, "full length"),
        ([], {"prompt_length/min": 31.0}, "full length"),
        ([], {"perf/total_num_tokens": 8128.0}, "some were dropped"),
    ],
)
def test_bounds_are_told_only_where_they_hold(run: Run, on_gpu: Config, overrides: list[str], changes: dict[str, Any], reason: str) -> None:
    config = c0(f"model={on_gpu.model}", "actor.dtype=bfloat16", "rollout.dtype=bfloat16", *overrides)
    result = bench.summarise(config, run("NVIDIA H200", **changes), warmup=0)
    assert result["bounds"] is None and reason in result["no_bounds_because"]


def test_a_run_that_ended_early_has_no_figures(run: Run) -> None:
    with pytest.raises(WorkerError, match="not all of its steps"):
        bench.summarise(c0(), run(lines=2), warmup=1)


def test_a_workload_without_recipe_or_steps_or_with_old_figures_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match="C0, S0, S1, S4"):
        bench.bench_rl("S9", 1, 1)
    with pytest.raises(ConfigError, match="C0, S0, S1, S4"):
        bench.bench_rl("../demo-cpu", 1, 1)
    with pytest.raises(ConfigError, match="run.total_steps is the benchmark's own"):
        bench.bench_rl("C0", 1, 1, out=str(tmp_path), overrides=["run.total_steps=3"])
    with pytest.raises(ConfigError, match="nothing to time"):
        bench.bench_rl("C0", 1, 0)
    (tmp_path / "C0").mkdir()
    (tmp_path / "C0" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="those of a resume"):
        bench.bench_rl("C0", 1, 1, out=str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="where the directory recipes/ is"):
        bench.bench_rl("C0", 1, 1)


@pytest.mark.cluster
def test_the_command_prepares_runs_and_measures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl.cli.main", "bench", "rl", "--workload", "C0", "--warmup", "1", "--steps", "1", "--json"]
    ran = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=280, check=False, cwd=ROOT, env=os.environ
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert json.loads((tmp_path / "C0.json").read_text()) == result
    assert (result["steps"], len(result["metrics"])) == (1, 2)
    guards = result["guards"]
    assert (guards["samples"], guards["tokens"], guards["response_tokens_trained"]) == ([128], [8192.0], [4096.0])
    assert guards["log_prob_gap_max"] <= 1e-4 and guards["reward_failed_share"] == 0
    assert guards["grad_norm"][0] > 0  # noise in the rewards: advantages differ
    last = result["metrics"][-1]
    assert last["response_length/min"] == last["prompt_length/min"] == 32 and last["critic/advantages/max"] > 0
    for phase in ("sync_weights", "gen", "old_log_prob", "ref", "update_actor", "step"):
        assert result["phases"][phase]["median"] > 0
    assert "megarl bench rl --workload C0 --warmup 1 --steps 1" in result["command"]
    assert not list((tmp_path / "C0").glob("checkpoints/step_*")) and not (tmp_path / "C0" / "model").exists()
