"""The demo, cut to seconds: same recipe, same parts, few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "demo-cpu.yaml"
DEADLINE_S = 280

# Numbers of a run that depend on the clock or on memory, or on how Ray packs a reply; all others must repeat bit for bit.
CLOCK = ("timing", "perf/time_per_step", "perf/throughput", "perf/cpu_memory_used_gb", "controller/")


def prepare(out: Path) -> Path:
    """The demo's data and model."""
    subprocess.run([sys.executable, ROOT / "recipes" / "demo" / "prepare.py", "--out", out], check=True, timeout=120)
    return out


def short(data: Path, run_dir: Path, **changes: Any) -> list[str]:
    """Overrides that make the demo short: five supervised steps, four PPO steps of 32 samples, two mini-batches each."""
    values: dict[str, Any] = {
        "model": data / "model",
        "data.train_files": f"[{data / 'train.parquet'}]",
        "data.val_files": f"[{data / 'val.parquet'}]",
        "data.val_prompts": 32,
        "warm_start.train_files": f"[{data / 'sft.parquet'}]",
        "warm_start.samples_per_step": 32,
        "warm_start.stop_reward_min": 0.0,
        "warm_start.stop_reward_max": 1.0,
        "rollout.prompts_per_step": 32,
        "actor.samples_per_mini_batch": 16,
        "actor.optim.lr": 3e-4,
        "critic.samples_per_mini_batch": 16,
        "reward.path": ROOT / "tests" / "e2e" / "graded_reward.py",
        "run.dir": run_dir,
        "run.total_steps": 4,
        "run.save_every_steps": 2,
        "run.eval_every_steps": 0,
    }
    return [f"{key}={value}" for key, value in {**values, **changes}.items()]


def train(overrides: list[str], deadline_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    """``megarl train`` as a user runs it."""
    command = [sys.executable, "-m", "megarl.cli.main", "train", str(RECIPE), *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(CLOCK)} for line in lines]
