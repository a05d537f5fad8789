"""Mistral (arXiv:2310.06825): Llama's shape; in older ones each layer sees a window of the newest tokens alone."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.weights.families.dense import dense_family
from megarl.weights.families.read import size_of


def window_everywhere(hf_config: Mapping) -> tuple[int | None, ...]:
    """``sliding_window`` in every layer; null or missing: none."""
    if hf_config.get("sliding_window") is None:
        return ()
    return (size_of(hf_config, "sliding_window"),) * size_of(hf_config, "num_hidden_layers")


def _windows(hf_config: Mapping) -> tuple[int | None, ...]:
    # transformers takes a missing key for 4096, and null for none.
    return window_everywhere({"sliding_window": 4096} | dict(hf_config))


MISTRAL = dense_family("mistral", windows=_windows)
