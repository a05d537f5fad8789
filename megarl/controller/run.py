"""A whole run: prepare, start, warm up or resume, step, evaluate, export. ``megarl train`` is this."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from megarl.algo.kl import FixedKLController, kl_controller
from megarl.checkpoint.store import Checkpoint, CheckpointStore
from megarl.cluster.calls import wait_all
from megarl.cluster.nodes import check_nodes
from megarl.cluster.placement import CPU_WORKER_ENV, WORKER_ENV, start_cluster
from megarl.cluster.worker import import_plugins
from megarl.config.absolute import paths_of_workers, with_absolute_paths
from megarl.config.schema import Config
from megarl.controller.context import Context, Groups, RunPaths
from megarl.controller.evaluate import Evaluation, evaluate
from megarl.controller.prepare import Prepared, prepare
from megarl.controller.profile import ProfiledSteps
from megarl.controller.roles import load_roles, start_groups
from megarl.controller.run_directory import check_run_directory, claimed, read_facts
from megarl.controller.step import ppo_step
from megarl.controller.warm_start import warm_start
from megarl.data.cursor import PromptCursor
from megarl.errors import EXIT_DONE, CheckpointError, explain
from megarl.observe.metrics import MetricsLog
from megarl.observe.progress import Progress
from megarl.observe.report import write_report
from megarl.observe.sinks import Sinks, check_sinks
from megarl.types import SamplingSettings


def train(config: Config) -> int:
    """Run the recipe to its last step, from the newest checkpoint of its run directory if there is one; returns the exit code."""
    import_plugins(config.plugins)
    paths = RunPaths(Path(config.run.dir).resolve())
    check_sinks(config.run.sinks)
    check_run_directory(config, paths)  # before the lock puts a file into it
    with claimed(paths.root):
        prepared = prepare(config, paths)  # what can be wrong without a worker is found here
        for note in prepared.notes:
            print(note)
        store = CheckpointStore(paths.checkpoints, config.run.keep_checkpoints)
        found = newest_checkpoint(store, config)
        if found is not None and found.step >= config.run.total_steps and read_facts(paths).get("finished_step") == found.step:
            print(f"nothing to do: {found.path} is step {found.step} of {config.run.total_steps}, and everything was written")
            return EXIT_DONE
        return _run(with_absolute_paths(config), paths, prepared, store, found)


def newest_checkpoint(store: CheckpointStore, config: Config) -> Checkpoint | None:
    """The checkpoint to go on from. What was passed over is said, and a run all of whose checkpoints are damaged is not begun anew."""
    found, skipped = store.scan()
    for problem in skipped:
        print(f"warning: checkpoint passed over: {problem}")
    if found is None and skipped:
        raise CheckpointError(
            explain(
                "no whole checkpoint among those of this run", where=str(store.directory), got="; ".join(skipped), do="name another run.dir"
            )
        )
    if found is not None and config.warm_start.enabled and not (store.directory.parent / "warm_start" / "model" / "config.json").is_file():
        raise CheckpointError(
            explain(
                "the warm start's model is missing, and with it the reference of this run",
                where=str(store.directory.parent),
                expected="warm_start/model",
            )
        )
    return found


def _run(config: Config, paths: RunPaths, prepared: Prepared, store: CheckpointStore, found: Checkpoint | None) -> int:
    began = time.monotonic()
    leave = start_cluster(config.cluster.address)
    try:
        differences = check_nodes_for(config, paths) if config.cluster.address is not None else []
        groups, facts = start_groups(config, paths)
        for warning in [*differences, *facts["warnings"]]:
            print(f"warning: {warning}")
        print(f"started {_count_processes(groups)} worker processes in {time.monotonic() - began:.1f} s")
        _record(paths, {"start_s": time.monotonic() - began, "start_by_component_s": facts["start_by_component_s"]})
        run = new_context(config, paths, groups, prepared)
        begin(run, found)
        if found is None:
            _evaluate(run, "eval_start")
        loop(run, store, found)
        return finish(run, store)
    finally:
        leave()


def check_nodes_for(config: Config, paths: RunPaths) -> list[str]:
    """Can every node of a joined cluster do the run's work? Returns warnings. ``config``: with absolute paths, the run's lock held."""
    lock = paths.root / "lock"  # it names this process, so that a directory of the same name on another disk is told from this one
    env = WORKER_ENV | CPU_WORKER_ENV
    return check_nodes(paths_of_workers(config), (str(lock), lock.read_text(encoding="utf-8")), env, config.cluster.start_deadline_s)


def new_context(config: Config, paths: RunPaths, groups: Groups, prepared: Prepared) -> Context:
    """A run at step 0."""
    kl = config.algorithm.kl
    rollout = config.rollout
    stop_token_ids = () if rollout.ignore_eos else prepared.stop_token_ids
    return Context(
        config=config,
        paths=paths,
        groups=groups,
        cursor=PromptCursor(prepared.train_rows, shuffle=config.data.shuffle, seed=config.run.seed),
        kl=kl_controller(kl) if kl.where == "reward" else FixedKLController(0.0),
        sampling=SamplingSettings(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_response_tokens, stop_token_ids),
    )


def begin(run: Context, found: Checkpoint | None) -> None:
    """Bring the roles to where the run goes on: the warm start's model, then the newest checkpoint."""
    config, paths = run.config, run.paths
    model = config.model
    if config.warm_start.enabled:
        if not (paths.warm_start_model / "config.json").is_file():
            reached = warm_start(run, print)
            print(f"warm start done: reward {reached}; PPO starts from {paths.warm_start_model}")
        model = str(paths.warm_start_model)
    load_roles(run.groups, config, model)
    run.version += 1
    if found is not None:
        restore(run, found)
        print(f"resumed from {found.path}: step {found.step} of {config.run.total_steps} is done")


def loop(run: Context, store: CheckpointStore, found: Checkpoint | None) -> None:
    """PPO steps up to the last, with metrics, evaluations and checkpoints as the recipe asks."""
    config = run.config
    log = MetricsLog(run.paths.root, resume_from=run.step)
    if found is not None and log.last_step < found.step:  # the run died between its checkpoint and the line of that step
        metrics = found.state()["metrics"]
        if _due(config.run.eval_every_steps, found.step) and config.data.val_files and found.step < config.run.total_steps:
            metrics["val/reward/mean"] = evaluate(run, log_name=f"eval_{found.step}").reward
        log.write(found.step, metrics)
    sinks = Sinks(
        run.paths.root,
        config.run.sinks,
        after=run.step,
        environment={"WANDB_PROJECT": config.run.wandb_project, "WANDB_NAME": config.run.name},
    )
    progress = Progress(config.run.total_steps, done=run.step)
    profile = ProfiledSteps(config.profile, run.groups, run.paths.root / "profile", print)
    with progress:
        for step in range(run.step + 1, config.run.total_steps + 1):
            with profile.step(step):
                metrics = ppo_step(run, step)
            run.step = step
            last = step == config.run.total_steps
            if _due(config.run.save_every_steps, step) or (last and saves(config)):
                metrics["timing_s/save_checkpoint"] = save(run, store, metrics)
            if _due(config.run.eval_every_steps, step) and not last and config.data.val_files:
                began = time.monotonic()
                metrics["val/reward/mean"] = evaluate(run, log_name=f"eval_{step}").reward
                metrics["timing_s/testing"] = time.monotonic() - began
            log.write(step, metrics)
            progress.step(step, metrics)
            for warning in sinks.warnings():
                print(warning)
    for warning in sinks.close():
        print(warning)
    _record(run.paths, profile.close())


def saves(config: Config) -> bool:
    """Whether the run writes checkpoints at all."""
    return config.run.save_every_steps >= 0


def save(run: Context, store: CheckpointStore, metrics: dict[str, float]) -> float:
    """Write a checkpoint of the step just done; returns seconds. All calls have deadlines, so that a dead writer is an error.

    The step's metrics go with it: a run that dies before it logs them can still do so.
    """
    began = time.monotonic()
    groups = run.groups
    roles = {"actor": groups.actor} | ({"critic": groups.critic} if groups.critic is not None else {})
    with store.writing(run.step, tuple(roles)) as work:
        wait_all(*(group.save(role, str(work / role)) for role, group in roles.items()))
        store.commit(work, run.step, run.state_dict() | {"metrics": metrics})
    return time.monotonic() - began


def restore(run: Context, found: Checkpoint) -> None:
    """Load a checkpoint into roles and controller."""
    groups = run.groups
    roles = {"actor": groups.actor} | ({"critic": groups.critic} if groups.critic is not None else {})
    wait_all(*(group.restore(role, str(found.path / role)) for role, group in roles.items()))
    run.load_state_dict(found.state())


def finish(run: Context, store: CheckpointStore) -> int:
    """Evaluate and export the result, write the report, and say where everything is."""
    config, paths = run.config, run.paths
    last = _evaluate(run, "eval_end")
    if config.run.export_hf:
        run.groups.actor.export("actor", str(paths.final_model.with_name("writing_model")), str(paths.final_model), config.model)
    memory = {name: facts for group in run.groups.all() for name, facts in group.facts().items()}
    _record(paths, {"memory": memory, "eval_end": vars(last) if last else None})
    report = write_report(paths.root)
    checkpoint = store.require(run.step).path if saves(config) else "not saved"
    before = read_facts(paths).get("eval_start")
    reward = f"held-out reward {before['reward']:.3f} -> {last}" if last and before else "no held-out prompts"
    model = paths.final_model if config.run.export_hf else "not exported"
    _record(paths, {"finished_step": run.step})
    print(f"done: {run.step} steps; {reward}; checkpoint {checkpoint}; model {model}; report {report}")
    return EXIT_DONE


def _evaluate(run: Context, name: str) -> Evaluation | None:
    if not run.config.data.val_files:
        return None
    measured = evaluate(run, log_name=name)
    print(f"{'before' if name == 'eval_start' else 'after'} PPO: reward {measured}")
    _record(run.paths, {name: vars(measured)})
    return measured


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _count_processes(groups: Groups) -> int:
    return sum(len(g.workers) if hasattr(g, "workers") else 1 for g in groups.all())


def _record(paths: RunPaths, facts: dict[str, Any]) -> None:
    """Add facts to run.json, which the report reads."""
    file = paths.root / "run.json"
    aside = file.with_suffix(".writing")
    aside.write_text(json.dumps(read_facts(paths) | facts, indent=1))
    aside.replace(file)
