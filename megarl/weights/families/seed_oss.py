"""Seed-OSS: Llama's shape with heads of a size of their own, and biases on query, key and value alone."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.weights.families.dense import Biases, dense_family


def _biases(hf_config: Mapping) -> Biases:
    return Biases(
        qkv=bool(hf_config.get("attention_bias", True)),
        projection=bool(hf_config.get("attention_out_bias", False)),
        mlp=bool(hf_config.get("mlp_bias", False)),
    )


SEED_OSS = dense_family("seed_oss", biases=_biases)
