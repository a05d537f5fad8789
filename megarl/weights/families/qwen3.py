"""Qwen3 (arXiv:2505.09388), dense: norms of each head's query and key instead of biases."""

from __future__ import annotations

from megarl.weights.families.dense import dense_family
from megarl.weights.families.llama import attention_biases
from megarl.weights.families.qwen2 import windows_above

QWEN3 = dense_family("qwen3", biases=attention_biases, qk_norm=True, windows=windows_above)
