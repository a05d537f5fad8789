"""Mean reward on held-out prompts, sampled as in training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.controller.context import Context, sample_requests
from megarl.errors import DataError, explain

_EVALUATION = 0x45564131  # its own stream of sample seeds, disjoint from the steps'


@dataclass(frozen=True)
class Evaluation:
    """A measured mean reward, how many prompts it is over, and its standard error."""

    reward: float
    prompts: int
    standard_error: float

    def __str__(self) -> str:
        return f"{self.reward:.3f} ± {self.standard_error:.3f} over {self.prompts} held-out prompts"


def evaluate(run: Context, *, log_name: str | None = None) -> Evaluation:
    """Sample one response to each held-out prompt at the training temperature, with the actor's weights as they are now.

    Every call draws from the same seeds, so that two evaluations differ by the weights alone. A failed reward call is an error here:
    a mean over the rest would be another number.
    """
    config, groups = run.config, run.groups
    groups.rollout.sync_weights(groups.actor, "actor", run.version)
    requests, prompt_of = sample_requests(np.arange(config.data.val_prompts), 1, seed=config.run.seed, step=_EVALUATION)
    path = str(run.paths.val_prompts)
    batch, _ = groups.rollout.generate_sequences(requests, prompt_of, path, run.sampling).result()
    log_path = str(run.paths.root / "rollouts" / f"{log_name}.parquet") if log_name else None
    scores, _ = groups.rewards.score(batch, path, log_path=log_path, log_count=config.run.log_rollouts).result()
    failed = [i for i, status in enumerate(scores.status) if status != "ok"]
    if failed:
        raise DataError(
            explain(
                f"{len(failed)} of {len(scores.status)} reward calls failed in an evaluation",
                where=config.reward.path,
                got=scores.message[:1],
                do="mend the reward function",
            )
        )
    count = len(scores.score)
    return Evaluation(float(scores.score.mean()), count, float(scores.score.std(ddof=1) / np.sqrt(count)))
