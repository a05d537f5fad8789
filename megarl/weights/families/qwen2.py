"""Qwen2 and Qwen2.5 (arXiv:2407.10671): biases on query, key and value; perhaps windows in the upper layers."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.weights.families.dense import Biases, dense_family
from megarl.weights.families.read import size_of, sliding_layers


def windows_above(hf_config: Mapping) -> tuple[int | None, ...]:
    """With ``use_sliding_window``: a window in the layers from ``max_window_layers`` on, or where ``layer_types`` says so."""
    if not hf_config.get("use_sliding_window", False):
        return ()
    layers, first = size_of(hf_config, "num_hidden_layers"), hf_config.get("max_window_layers", 28)
    sliding = sliding_layers(hf_config, [layer >= first for layer in range(layers)])
    window = size_of(hf_config, "sliding_window", 4096)
    return tuple(window if s else None for s in sliding)


QWEN2 = dense_family("qwen2", biases=lambda hf_config: Biases(qkv=True), windows=windows_above)
