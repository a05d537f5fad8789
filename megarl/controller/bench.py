"""``megarl bench demo``: the demo with several seeds, and what it costs. Every figure is measured by the runs themselves."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from megarl.controller.child import run_to_end
from megarl.errors import EXIT_DONE, ConfigError, WorkerError, explain

RECIPE = "recipes/demo-cpu.yaml"
PHASES = ("sync_weights", "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "controller")


def bench_demo(seeds: int, out: str = "runs/bench-demo", as_json: bool = False, overrides: list[str] | None = None) -> int:
    """Run the demo once a seed, one after the other, and print rewards, step time by phase, start-up and memory."""
    results = [_run(seed, Path(out) / f"seed-{seed}", overrides or []) for seed in range(seeds)]
    print(json.dumps(results, indent=1) if as_json else "\n".join(tables(results)))
    return EXIT_DONE


def _run(seed: int, directory: Path, overrides: list[str]) -> dict[str, Any]:
    if directory.exists():
        raise ConfigError(
            explain(
                "the run directory of this seed exists; its figures would be those of a resume",
                where=str(directory),
                do="remove it, or name another place by --out",
            )
        )
    began = time.monotonic()
    command = [sys.executable, "-m", "megarl.cli.main", "train", RECIPE, f"run.seed={seed}", f"run.dir={directory}", *overrides]
    code = run_to_end(command)
    if code != EXIT_DONE:
        raise WorkerError(explain(f"the demo with seed {seed} ended with code {code}", where=str(directory), do="look at its logs"))
    return summarise(seed, directory, time.monotonic() - began)


def summarise(seed: int, directory: Path, seconds: float) -> dict[str, Any]:
    """What one run of the demo measured."""
    facts = json.loads((directory / "run.json").read_text())
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    settled = steps[1:] or steps  # the first step warms caches up
    return {
        "seed": seed,
        "seconds": seconds,
        "steps": len(steps),
        "before": facts["eval_start"]["reward"],
        "after": facts["eval_end"]["reward"],
        "standard_error": facts["eval_end"]["standard_error"],
        "step_s": median(s["timing_s/step"] for s in settled),
        "phases_s": {p: median(s.get(f"timing_s/{p}", 0.0) for s in settled) for p in PHASES},
        "controller_share": median(s["timing_share/controller"] for s in settled),
        "log_prob_gap": max(s["training/rollout_logprobs_diff_max"] for s in steps),
        "start_s": facts["start_s"],
        "start_by_component_s": facts["start_by_component_s"],
        "rss_peak_mib": {name: f["rss_peak"] / 2**20 for name, f in facts["memory"].items()},
    }


def tables(results: list[dict[str, Any]]) -> list[str]:
    """The figures as Markdown tables."""
    lines = [
        "| seed | before PPO | after PPO | steps | seconds a step | controller | log-prob gap | whole run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r['seed']} | {r['before']:.3f} | {r['after']:.3f} ± {r['standard_error']:.3f} | {r['steps']} | {r['step_s']:.2f} | "
            f"{r['controller_share']:.1%} | {r['log_prob_gap']:.1e} | {r['seconds']:.0f} s |"
        )
    last = results[-1]
    lines += ["", "| phase | seconds (median) | share of the step |", "|---|---|---|"]
    lines += [f"| {phase} | {seconds:.3f} | {seconds / last['step_s']:.1%} |" for phase, seconds in last["phases_s"].items()]
    lines += ["", "| process | ready after | peak memory |", "|---|---|---|"]
    for name, mib in last["rss_peak_mib"].items():
        ready = last["start_by_component_s"].get(name)
        lines.append(f"| {name} | {'' if ready is None else f'{ready:.1f} s'} | {mib:.0f} MiB |")
    lines.append(f"| all | {last['start_s']:.1f} s | {sum(last['rss_peak_mib'].values()):.0f} MiB |")
    return lines
