"""Qwen3 (arXiv:2505.09388), dense: norms of each head's query and key instead of biases."""

from __future__ import annotations

from megarl.weights.families.dense import dense_family

QWEN3 = dense_family("qwen3", qk_norm=True)
