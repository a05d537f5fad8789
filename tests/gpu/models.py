"""A random model that suits the GPU's kernels (heads of 64), and sequences for it."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.types import Ragged
from tests.megatron import models

VOCAB = 509  # prime: the vocabulary is padded

# (prompt, response): a single token, one long among short ones, multiples of 64 and their neighbours.
LENGTHS = [(1, 1), (400, 113), (2, 1), (63, 1), (64, 64), (65, 128), (7, 250)]


def small_qwen2(directory: Path, *, tied: bool = True) -> Path:
    """Weights rounded to bfloat16, so that both sides of a comparison start from the same numbers."""
    return models.random_qwen2(directory, vocab=VOCAB, hidden=256, ffn=640, spread=0.08, positions=1024, tied=tied, dtype=torch.bfloat16)


def small_mixture(directory: Path) -> Path:
    """Every expert sees every token: among fewer, bfloat16's rounding would choose others than float32's, and nothing could be compared."""
    return models.random_mixture(
        directory,
        spread=0.08,
        dtype=torch.bfloat16,
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )


def sequences() -> tuple[Ragged, Ragged]:
    return models.sequences(LENGTHS, vocab=VOCAB)
