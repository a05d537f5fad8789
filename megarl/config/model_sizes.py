"""Do the recipe's models fit each other and its lengths? Known from their ``config.json`` alone, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.config.sampling_checks import check_stop_ids
from megarl.config.schema import Config, LayoutConfig
from megarl.errors import ModelError, explain


def model_directories(config: Config) -> dict[str, str]:
    """Key of the recipe -> Hugging Face directory, of every role that the recipe has; the actor's key, ``model``, comes first."""
    found = {"model": config.model, "reference": config.reference or config.model}
    if config.algorithm.advantage_estimator == "gae":
        found["critic.model"] = config.critic.model or config.model
    return found


def layout_of(config: Config, key: str) -> LayoutConfig:
    """The layout of the role at ``key`` of :func:`model_directories`. The reference is cut as the actor is."""
    return config.critic.layout if key == "critic.model" else config.actor.layout


def cuts_anything(config: Config) -> bool:
    """Whether any model of the recipe is spread over several ranks otherwise than as whole replicas."""
    layouts = [replace(layout_of(config, key), data=1) for key in model_directories(config)]
    return config.rollout.tensor_parallel > 1 or any(layout != LayoutConfig() for layout in layouts)


def check_model_sizes(config: Config, hf_configs: Mapping[str, Mapping[str, Any]]) -> None:
    """``hf_configs``: key of the recipe -> parsed ``config.json``, with ``model`` among them.

    Raises ModelError for another vocabulary than the actor's, and for samples longer than a model's positions. Both are of no account for
    a critic under ``critic.retokenize``: how many of its tokens a text has is known when the text is.
    """
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    vocabulary = _size(hf_configs["model"], "vocab_size", "model")
    check_stop_ids(config.rollout, vocabulary)
    for key, hf_config in hf_configs.items():
        got, positions = _size(hf_config, "vocab_size", key), _size(hf_config, "max_position_embeddings", key)
        if key == "critic.model" and config.critic.retokenize:
            continue
        if got != vocabulary:
            raise ModelError(
                explain(
                    "all roles read the actor's tokens, and this model has another vocabulary",
                    where=f"{key}: vocab_size",
                    got=got,
                    expected=f"{vocabulary}, as of model",
                    do=f"name a model of the actor's family in {key}" + (", or set critic.retokenize" if key == "critic.model" else ""),
                )
            )
        if positions < longest:
            raise ModelError(
                explain(
                    "the longest sample doesn't fit into the model's positions",
                    where=f"{key}: max_position_embeddings",
                    got=positions,
                    expected=f"at least {longest} = data.max_prompt_tokens + rollout.max_response_tokens",
                    do="lower one of the two, or use a model of longer context",
                )
            )


def _size(hf_config: Mapping[str, Any], name: str, key: str) -> int:
    value = hf_config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(explain(f"no {name} in the model's config.json", where=key, got=repr(value), expected="a positive integer"))
    return value
