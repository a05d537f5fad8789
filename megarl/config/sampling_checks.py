"""What can be wrong with how responses are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config.schema import RolloutConfig
from megarl.errors import ConfigError, explain

MIN_TEMPERATURE = 0.01  # vLLM takes what is lower for this (and 0 for greedy) without an error; the trainer would not


def check_sampling(rollout: RolloutConfig) -> None:
    """Raise ConfigError for stop tokens that nothing reads, or that are no token."""
    wanted = [name for name in ("stop_token_ids", "stop_tokens") if getattr(rollout, name)]
    if rollout.ignore_eos and wanted:
        raise ConfigError(
            explain(
                "no token ends a response, and yet stop tokens are named",
                where="rollout.ignore_eos",
                got=f"ignore_eos: true, {', '.join(f'{name}: {list(getattr(rollout, name))}' for name in wanted)}",
                expected="one of the two",
                do=f"set rollout.ignore_eos to false, or rollout.{wanted[0]} to []",
            )
        )
    for name, holds, expected in (
        ("stop_token_ids", lambda token: token >= 0, "token ids, 0 or more"),
        ("stop_tokens", lambda text: text != "", "texts of one token"),
    ):
        given: Sequence[Any] = getattr(rollout, name)
        for item in given:
            if not holds(item):
                raise ConfigError(explain("no stop token", where=f"rollout.{name}", got=repr(item), expected=expected))
            if given.count(item) > 1:
                raise ConfigError(explain("a stop token twice", where=f"rollout.{name}", got=repr(item), do="name it once"))


def check_stop_ids(rollout: RolloutConfig, vocabulary: int) -> None:
    """Raise ConfigError for a stop token that the model (``vocabulary``: its vocab_size) can never draw."""
    outside = [token for token in rollout.stop_token_ids if token >= vocabulary]
    if outside:
        raise ConfigError(
            explain(
                "a stop token outside the model's vocabulary",
                where="rollout.stop_token_ids",
                got=", ".join(map(str, outside)),
                expected=f"0 to {vocabulary - 1}",
                do="look the id up in the model's tokenizer.json, or name the token's text in rollout.stop_tokens",
            )
        )
