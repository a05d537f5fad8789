"""Llama 2 (arXiv:2307.09288) and models of its exact shape: no biases. The scaled rotary positions of Llama 3.1 are refused."""

from __future__ import annotations

from megarl.weights.families.dense import dense_family

LLAMA = dense_family("llama", qkv_bias=False)
