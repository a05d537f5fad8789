"""Mean reward on held-out prompts, sampled as in training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.controller.context import Context, sample_requests
from megarl.controller.residency import to_generation, to_training
from megarl.rewards.policy import apply_failure_policy

_EVALUATION = 0x45564131  # its own stream of sample seeds, disjoint from the steps'


@dataclass(frozen=True)
class Evaluation:
    """A measured mean reward, over how many prompts, its standard error, and how many reward calls failed and are not in it."""

    reward: float
    prompts: int
    standard_error: float
    failed: int = 0

    def __str__(self) -> str:
        failed = f" ({self.failed} reward calls failed)" if self.failed else ""
        return f"{self.reward:.3f} ± {self.standard_error:.3f} over {self.prompts} held-out prompts{failed}"


def evaluate(run: Context, *, log_name: str | None = None) -> Evaluation:
    """Sample one response to each held-out prompt at the training temperature, with the actor's weights as they are now.

    Every call draws from the same seeds, so that two evaluations differ by the weights alone. Failed reward calls are treated as in
    training (``reward.on_failure``, ``reward.max_failed_share``), and their number is part of the result.
    """
    config, groups = run.config, run.groups
    to_generation(run)
    requests, prompt_of = sample_requests(np.arange(config.data.val_prompts), 1, seed=config.run.seed, step=_EVALUATION)
    path = str(run.paths.val_prompts)
    batch, _ = groups.rollout.generate_sequences(requests, prompt_of, path, run.sampling).result()
    to_training(run)
    log_path = str(run.paths.root / "rollouts" / f"{log_name}.parquet") if log_name else None
    scores, _ = groups.rewards.score(batch, path, log_path=log_path, log_count=config.run.log_rollouts).result()
    kept = apply_failure_policy(scores, batch.info.group, config.reward.on_failure, config.reward.max_failed_share)
    reward = kept.score[kept.keep]
    return Evaluation(float(reward.mean()), len(reward), float(reward.std(ddof=1) / np.sqrt(len(reward))), kept.failed)
