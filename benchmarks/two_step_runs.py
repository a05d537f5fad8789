"""Start everything, do two PPO steps, stop; again and again. Shows whether a start is dependable, and what it costs.

    python recipes/demo/prepare.py && python benchmarks/two_step_runs.py [--runs 10] [--out runs/two-steps]

Prints one line a run: exit code, seconds until all processes were ready, seconds of the whole run, peak memory of all processes.
Gate: every run ends with code 0, ready within 90 s, under 10 GiB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from megarl.controller.child import run_to_end

READY_S, MEMORY_GIB = 90, 10
SHORT = ["warm_start.enabled=false", "run.total_steps=2", "run.save_every_steps=0", "run.eval_every_steps=0", "data.val_prompts=32"]


def one_run(directory: Path) -> dict[str, float]:
    """Run once; what it measured."""
    shutil.rmtree(directory, ignore_errors=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "megarl.cli.main", "train", "recipes/demo-cpu.yaml", f"run.dir={directory}", *SHORT]
    code = run_to_end(command)
    record = directory / "run.json"
    facts = json.loads(record.read_text()) if record.is_file() else {}  # refused before it started
    memory = sum(process["rss_peak"] for process in facts.get("memory", {}).values()) / 2**30
    return {
        "code": code,
        "ready_s": facts.get("start_s", float("inf")),
        "seconds": time.monotonic() - began,
        "memory_gib": memory,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/two-steps"))
    args = parser.parse_args()
    passed = 0
    for number in range(1, args.runs + 1):
        run = one_run(args.out)
        good = run["code"] == 0 and run["ready_s"] <= READY_S and run["memory_gib"] <= MEMORY_GIB
        passed += good
        print(
            f"run {number}: code {run['code']}, ready after {run['ready_s']:.1f} s, whole run {run['seconds']:.1f} s, "
            f"workers' peak memory {run['memory_gib']:.2f} GiB{'' if good else '  FAILED'}",
            flush=True,
        )
    print(f"{passed} of {args.runs} runs passed")
    return 0 if passed == args.runs else 1


if __name__ == "__main__":
    sys.exit(main())
