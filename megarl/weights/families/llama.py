"""Llama 2 (arXiv:2307.09288), Llama 3 (arXiv:2407.21783) and models of that shape, with biases where their config.json says so."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.weights.families.dense import Biases, dense_family


def attention_biases(hf_config: Mapping) -> Biases:
    """``attention_bias``: of query, key, value and the projection behind them; ``mlp_bias``: of the MLP."""
    attention = bool(hf_config.get("attention_bias", False))
    return Biases(qkv=attention, projection=attention, mlp=bool(hf_config.get("mlp_bias", False)))


LLAMA = dense_family("llama", biases=attention_biases)
