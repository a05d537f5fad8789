"""A user's own advantage estimator, as a recipe's ``plugins`` names it: the score itself, for every token."""

from __future__ import annotations

from megarl.algo.advantages import AdvantageInputs, Advantages, register_advantage_estimator
from megarl.algo.ragged import sample_of_token
from megarl.config.schema import AlgorithmConfig


@register_advantage_estimator("test_plain_score")
def plain_score(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    return Advantages(inputs.scores.float()[sample_of_token(inputs.offsets)])
