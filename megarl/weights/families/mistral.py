"""Mistral (arXiv:2310.06825): Llama's shape; in older ones each layer sees a window of the newest tokens alone."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.weights.families.dense import dense_family
from megarl.weights.families.read import cannot, layers_of, size_of, sliding_layers, with_defaults


def window_everywhere(hf_config: Mapping) -> tuple[int | None, ...]:
    """``sliding_window`` in every layer; null: none. What a missing key means differs by family."""
    hf_config = with_defaults(hf_config)
    window = None if hf_config["sliding_window"] is None else size_of(hf_config, "sliding_window")
    everywhere = [window is not None] * layers_of(hf_config)
    if list(sliding_layers(hf_config, everywhere)) != everywhere:  # transformers doesn't read it here, and others do
        raise cannot("layer_types", hf_config["layer_types"], f"the same in every layer, as sliding_window = {window}")
    return () if window is None else (window,) * len(everywhere)


MISTRAL = dense_family("mistral", windows=window_everywhere)
