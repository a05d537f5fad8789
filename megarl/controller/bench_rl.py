"""``megarl bench rl``: a workload of recipes/bench, timed phase by phase and set against what the hardware allows."""

from __future__ import annotations

import json
import shlex
import sys
import time
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from megarl.config.checks import check_config
from megarl.config.load import load_config
from megarl.config.model_sizes import model_directories
from megarl.config.schema import Config
from megarl.controller.bench_rl_table import tables
from megarl.controller.child import run_to_end
from megarl.errors import EXIT_DONE, ConfigError, WorkerError, explain
from megarl.observe.metric_names import AFTER_THE_STEP
from megarl.observe.metrics import read_metrics
from megarl.plan.limits import Workload, find_hardware, left_out, phase_bounds
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.sizes import ModelSizes

RECIPES = Path("recipes/bench")

# In the order of a step. Phases that a run measures and that are not named here come after them.
PHASES = (
    "sync_weights", "gen", "sleep", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "controller"
)  # fmt: skip
_STAGE = "sync_"  # timing_s/sync_X is a part of timing_s/sync_weights

Steps = list[dict[str, Any]]


def bench_rl(
    workload: str, warmup: int, steps: int, out: str = "runs/bench-rl", as_json: bool = False, overrides: list[str] | None = None
) -> int:
    """Make what the workload needs, run ``warmup`` + ``steps`` steps of it and print the figures of the latter.

    They are also written to ``out``/WORKLOAD.json, with every step's own. Raises ConfigError for a workload that there is no recipe
    of, and for one whose run directory exists; WorkerError when the run fails.
    """
    if warmup < 0 or steps < 1:
        raise ConfigError(explain("nothing to time", got=f"{warmup} warm-up and {steps} timed steps", expected="0 or more, and 1 or more"))
    recipe, directory = find_recipe(workload), Path(out) / workload
    if (directory / "metrics.jsonl").exists():
        raise ConfigError(
            explain(
                "the run directory of this workload has steps already; the figures would be those of a resume",
                where=str(directory),
                do="remove it when no run goes on in it, or name another place by --out",
            )
        )
    given = list(overrides or [])
    for key in ("run.dir", "run.total_steps"):
        if any(override.partition("=")[0] == key for override in given):
            raise ConfigError(explain(f"{key} is the benchmark's own", got=given, do="use --out, --warmup and --steps"))
    fixed = [f"run.dir={directory}", f"run.total_steps={warmup + steps}"]
    config = load_config(recipe, given + fixed)
    check_config(config)

    _run([sys.executable, str(RECIPES / "prepare.py"), workload], f"preparing workload {workload}")
    command = ["train", str(recipe), *given, *fixed]
    began = time.monotonic()
    _run([sys.executable, "-m", "megarl.cli.main", *command], f"workload {workload}", where=str(directory))
    result = summarise(config, directory, warmup)
    asked = ["megarl", "bench", "rl", "--workload", workload, "--warmup", str(warmup), "--steps", str(steps), "--out", out, *given]
    result |= {
        "workload": workload,
        "command": shlex.join(asked),
        "train_command": shlex.join(["megarl", *command]),
        "seconds": time.monotonic() - began,
    }
    text = json.dumps(result, indent=1)
    directory.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    print(text if as_json else "\n".join(tables(result)))
    return EXIT_DONE


def find_recipe(workload: str) -> Path:
    """The recipe of a workload by its name. Raises ConfigError that names those there are."""
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    if workload not in names:
        do = "name one of them" if names else "run the command where the directory recipes/ is"
        raise ConfigError(
            explain(f"no workload {workload}", where=str(RECIPES), got=workload, expected=", ".join(names) or "recipes", do=do)
        )
    return RECIPES / f"{workload}.yaml"


def _run(command: list[str], what: str, where: str = "") -> None:
    """Run to the end. Raises ConfigError or WorkerError, as the command's own exit code says."""
    code = run_to_end(command)
    if code != EXIT_DONE:
        kind = ConfigError if code == ConfigError.exit_code else WorkerError
        raise kind(explain(f"{what} ended with code {code}", where=where, do="look at its output above, and at the logs of its run"))


def summarise(config: Config, directory: Path, warmup: int) -> dict[str, Any]:
    """What a run of ``config`` in ``directory`` measured, its first ``warmup`` steps left out."""
    facts = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    lines = read_metrics(directory)
    timed = lines[warmup:]
    if len(lines) != config.run.total_steps or not timed:
        raise WorkerError(
            explain("the run has not all of its steps", where=str(directory), got=len(lines), expected=config.run.total_steps)
        )
    device = facts.get("fingerprint", {}).get("device", "unknown")
    work = workload_of(config)
    bounds, reason = bounds_of(config, work, device, timed)
    return {
        "device": device,
        "versions": facts.get("versions", {}) | {k: v for k, v in facts.get("fingerprint", {}).items() if k != "device"},
        "warmup": warmup,
        "steps": len(timed),
        "phases": phases_of(timed, bounds or {}),
        "stages": {name: spread([s.get(f"timing_s/{name}", 0.0) for s in timed]) for name in _names(timed) if _is_stage(name)},
        "bounds": bounds,
        "no_bounds_because": reason,
        "not_in_step_bound": sorted(left_out(work)) if bounds else [],
        "throughput": throughput(timed),
        "guards": guards(work, timed),
        "memory": facts.get("memory", {}),
        "start_s": facts.get("start_s"),
        "start_by_component_s": facts.get("start_by_component_s", {}),
        "metrics": lines,
    }


def workload_of(config: Config) -> Workload:
    """The recipe's step in the terms of the bounds, every sequence at full length."""
    rollout, actor, critic = config.rollout, config.actor, config.critic
    samples = rollout.prompts_per_step * rollout.responses_per_prompt
    return Workload(
        samples=samples,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=rollout.max_response_tokens,
        responses_per_prompt=rollout.responses_per_prompt,
        actor_steps=samples // actor.samples_per_mini_batch,
        actor_epochs=actor.epochs_per_step,
        critic_steps=samples // critic.samples_per_mini_batch,
        critic_epochs=critic.epochs_per_step,
        reference=config.algorithm.kl.where != "none",
        critic="critic.model" in model_directories(config),
    )


def bounds_of(config: Config, work: Workload, device: str, timed: Steps) -> tuple[dict[str, float] | None, str]:
    """Least seconds by phase, or else why none can be told: bounds hold for one known GPU, bfloat16 and full lengths."""
    hardware = find_hardware(device)
    if hardware is None:
        return None, f"the rates of this device were never measured: {device}"
    parts = [config.actor, config.critic] if work.critic else [config.actor]
    processes = [prod(getattr(p.layout, size) for size in ("tensor", "pipeline", "context", "data")) for p in parts]
    processes.append(config.rollout.engines * config.rollout.tensor_parallel)
    if any(count != 1 for count in processes) or config.cluster.placement != "colocated":
        return None, "they are those of one GPU that all models share, and this run has more"
    types = {config.rollout.dtype, *(part.dtype for part in parts)}
    if types != {"bfloat16"}:
        return None, f"they hold for bfloat16, and this run has {', '.join(sorted(types))}"
    full = {"prompt_length": work.prompt_tokens, "response_length": work.response_tokens}
    if any(step[f"{name}/{end}"] != tokens for step in timed for name, tokens in full.items() for end in ("min", "max")):
        return None, "they hold for sequences of full length, and some were shorter"
    if any(kept_samples(step) != work.samples for step in timed):
        return None, "they hold for all samples of a step, and some were dropped"
    actor, reference, *critic = (_sizes(directory) for directory in model_directories(config).values())
    return phase_bounds(work, hardware, actor, reference, critic[0] if critic else None), ""


def _sizes(directory: str) -> ModelSizes:
    hf_config = read_hf_config(directory)
    return model_family(hf_config).sizes(hf_config)


def phases_of(timed: Steps, bounds: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Seconds of each phase, of what no phase names (``rest``) and of the whole ``step``, with bounds where there are any.

    ``rest`` is below 0 where phases run side by side: each is counted in full.
    """
    measured = [name for name in _names(timed) if name not in ("step", *AFTER_THE_STEP) and not _is_stage(name)]
    names = [*(name for name in PHASES if name in measured), *(name for name in measured if name not in PHASES)]
    seconds = {name: [s.get(f"timing_s/{name}", 0.0) for s in timed] for name in names}
    steps = [s["timing_s/step"] for s in timed]
    seconds["rest"] = [whole - sum(parts) for whole, *parts in zip(steps, *seconds.values(), strict=True)]
    seconds["step"] = steps
    return {name: spread(values) | _against(bounds.get(name), median(values)) for name, values in seconds.items()}


def _against(bound: float | None, seconds: float) -> dict[str, float | None]:
    return {"bound": bound, "ratio": seconds / bound if bound else None}


def _names(timed: Steps) -> list[str]:
    return list(dict.fromkeys(key.removeprefix("timing_s/") for step in timed for key in step if key.startswith("timing_s/")))


def _is_stage(name: str) -> bool:
    return name.startswith(_STAGE) and name != "sync_weights"


def spread(values: list[float]) -> dict[str, Any]:
    """Median, smallest and largest of the timed steps, and each of them."""
    return {"median": median(values), "min": min(values), "max": max(values), "values": values}


def kept_samples(step: dict[str, Any]) -> int:
    """Samples that went into training: a step logs their tokens together, and the mean of each."""
    return round(step["perf/total_num_tokens"] / (step["prompt_length/mean"] + step["response_length/mean"]))


def throughput(timed: Steps) -> dict[str, dict[str, Any]]:
    """Tokens a second: prompts and responses over the step; responses over the step, and over generation alone."""
    generated = [s["response_length/mean"] * kept_samples(s) for s in timed]
    steps = [s["timing_s/step"] for s in timed]
    return {
        "tokens_per_s": spread([s["perf/total_num_tokens"] / whole for s, whole in zip(timed, steps, strict=True)]),
        "generated_tokens_per_s": spread([tokens / whole for tokens, whole in zip(generated, steps, strict=True)]),
        "generated_tokens_per_gen_s": spread([tokens / s["timing_s/gen"] for tokens, s in zip(generated, timed, strict=True)]),
    }


def guards(work: Workload, timed: Steps) -> dict[str, Any]:
    """What must agree between two runs before their times may be compared; None where a run did not log it."""
    return {
        "samples": [kept_samples(s) for s in timed],
        "optimizer_steps": work.actor_steps * work.actor_epochs,
        "critic_optimizer_steps": work.critic_steps * work.critic_epochs if work.critic else 0,
        "tokens": [s["perf/total_num_tokens"] for s in timed],
        "response_tokens_trained": [s["response_length/mean"] * kept_samples(s) * work.actor_epochs for s in timed],
        "log_prob_gap_mean": _worst(timed, "training/rollout_logprobs_diff_mean"),
        "log_prob_gap_max": _worst(timed, "training/rollout_logprobs_diff_max"),
        "prob_gap_mean": _worst(timed, "training/rollout_probs_diff_mean"),
        "reward_failed_share": _worst(timed, "reward/failed_share"),
        "grad_norm": [s.get("actor/grad_norm") for s in timed],
    }


def _worst(timed: Steps, name: str) -> float | None:
    found = [s[name] for s in timed if s.get(name) is not None]
    return max(found) if found else None
