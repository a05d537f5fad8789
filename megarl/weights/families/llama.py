"""Llama 2 (arXiv:2307.09288), Llama 3 (arXiv:2407.21783) and models of that shape, with biases where their config.json says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.weights.families.dense import Biases, dense_family
from megarl.weights.families.read import bool_of


def attention_biases(hf_config: Mapping) -> Biases:
    """``attention_bias``: of query, key, value and the projection behind them."""
    attention = bool_of(hf_config, "attention_bias", False)
    return Biases(qkv=attention, projection=attention)


def _biases(hf_config: Mapping) -> Biases:
    """Llama alone has ``mlp_bias`` beside it; its kin with ``attention_bias`` don't read that key."""
    return replace(attention_biases(hf_config), mlp=bool_of(hf_config, "mlp_bias", False))


LLAMA = dense_family("llama", biases=_biases)
