"""Learning rates over a run. Functions of the step alone, so that a resume needs no state."""

from __future__ import annotations

import math

from megarl.config.schema import OptimConfig


def learning_rate(optim: OptimConfig, step: int) -> float:
    """The rate of PPO step ``step``, counted from 1 over the steps in which the role learns.

    It rises linearly to ``lr`` over ``lr_warmup_steps``, then follows ``schedule`` down to ``lr_min`` at step ``schedule_steps``, and
    stays there: "constant" never falls, "linear" falls evenly, "cosine" along half a wave (arXiv:1608.03983, equation 5, one cycle).
    """
    if step < optim.lr_warmup_steps:
        return optim.lr * step / optim.lr_warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    fall = optim.schedule_steps - optim.lr_warmup_steps
    done = min(1.0, (step - optim.lr_warmup_steps) / fall)
    left = 1.0 - done if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return optim.lr_min + (optim.lr - optim.lr_min) * left
