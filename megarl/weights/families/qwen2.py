"""Qwen2 and Qwen2.5 (arXiv:2407.10671): biases on query, key and value."""

from __future__ import annotations

from megarl.weights.families.dense import dense_family

QWEN2 = dense_family("qwen2", qkv_bias=True)
