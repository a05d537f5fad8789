"""Qwen2 and Qwen2.5 (arXiv:2407.10671): biases on query, key and value; perhaps windows in the upper layers."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.weights.families.dense import Biases, dense_family
from megarl.weights.families.read import bool_of, layers_of, size_of, sliding_layers, windows_of, with_defaults


def windows_above(hf_config: Mapping) -> tuple[int | None, ...]:
    """With ``use_sliding_window``: a window in the layers from ``max_window_layers`` on, or where ``layer_types`` says so.

    Null is no window.
    """
    hf_config = with_defaults(hf_config)
    window = hf_config["sliding_window"] if bool_of(hf_config, "use_sliding_window") else None
    first = size_of(hf_config, "max_window_layers", least=0)
    above = [window is not None and layer >= first for layer in range(layers_of(hf_config))]
    return windows_of(hf_config, sliding_layers(hf_config, above), window)


QWEN2 = dense_family("qwen2", biases=lambda hf_config: Biases(qkv=True), windows=windows_above)
