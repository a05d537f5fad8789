"""Supervised steps before PPO, on the same Megatron engine, until the sampled reward is where the recipe wants PPO to begin."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megarl.config.schema import WarmStartConfig
from megarl.controller.context import Context
from megarl.controller.evaluate import Evaluation, evaluate
from megarl.controller.roles import load_actor
from megarl.data.cursor import PromptCursor
from megarl.data.proto import DataProto, Piece
from megarl.data.supervised import SupervisedHandle, SupervisedPairs
from megarl.errors import DivergedError, explain
from megarl.megatron.losses import SupervisedLossSpec
from megarl.types import SampleInfo


def warm_start(run: Context, say: Callable[[str], None]) -> Evaluation:
    """Train the actor on the recipe's pairs, and export it as the model that PPO starts from (actor, reference, critic).

    Stops at the first measured mean reward in [stop_reward_min, stop_reward_max]. Raises DivergedError when ``max_steps`` don't reach
    it, or when a measurement jumps over it: PPO would start elsewhere than the recipe says.
    """
    config = run.config.warm_start
    load_actor(run.groups, run.config, run.config.model, lr=config.lr)
    run.version += 1
    pairs = SupervisedPairs.open(run.paths.supervised)
    measured: Evaluation | None = None
    cursor = PromptCursor(len(pairs), shuffle=True, seed=run.config.run.seed)
    for step in range(1, config.max_steps + 1):
        pace = _pace(config, measured)
        batch = _batch(run, pairs, cursor.take(config.samples_per_step))
        result = run.groups.actor.train_step(
            "actor", batch, range(len(batch)), SupervisedLossSpec(), lr=pace.lr, phase="warm start"
        ).result()
        run.version += 1
        if step % pace.measure_every:
            continue
        measured = evaluate(run)
        say(f"warm start {step}: loss {result.sums['loss']:.3f}, reward {measured}")
        if measured.reward > config.stop_reward_max:
            raise DivergedError(
                explain(
                    "the warm start jumped over its stopping range",
                    where=f"warm start, step {step}",
                    got=measured,
                    expected=f"{config.stop_reward_min} to {config.stop_reward_max}",
                    do="lower warm_start.lr or warm_start.eval_every_steps",
                )
            )
        if measured.reward >= config.stop_reward_min:
            _export(run)
            return measured
    raise DivergedError(
        explain(
            f"the warm start did not reach its stopping range in {config.max_steps} steps",
            got=measured,
            expected=f"{config.stop_reward_min} to {config.stop_reward_max}",
            do="raise warm_start.max_steps or warm_start.lr",
        )
    )


@dataclass(frozen=True)
class Pace:
    """How fast the warm start goes on."""

    lr: float
    measure_every: int  # steps


def _pace(config: WarmStartConfig, measured: Evaluation | None) -> Pace:
    """Fast and rarely measured far below the stopping range, slow and often measured near it.

    Sampled rewards rise late and steeply (0.15 in two steps were seen): at full speed a run may jump over the range. And far below it
    a measurement, which costs more than a supervised step, says nothing new.
    """
    if measured is not None and measured.reward > config.stop_reward_min / 5:
        return Pace(config.lr / 4, config.eval_every_steps)
    return Pace(config.lr, 5 * config.eval_every_steps)


def _batch(run: Context, pairs: SupervisedPairs, rows: np.ndarray) -> DataProto:
    prompt, response = pairs.lengths(rows)
    ids = np.arange(len(rows))
    info = SampleInfo(ids, rows, ids, prompt, response, np.zeros(len(rows), dtype=bool))
    handle = SupervisedHandle(str(run.paths.supervised), tuple(int(r) for r in rows))
    piece = [Piece(tuple(range(len(rows))), handle)]
    return DataProto(info, {}).with_column("prompts", piece).with_column("responses", piece)


def _export(run: Context) -> None:
    target = run.paths.warm_start_model
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    run.groups.actor.export("actor", str(target.with_name("writing")), str(target), run.config.model)
