"""Random models that suit the GPU's kernels (head size 64), and sequences for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megarl.types import Ragged

VOCAB = 509  # prime: the vocabulary is padded

# (prompt, response): a single token, one long among short ones, multiples of 64 and their neighbours.
LENGTHS = [(1, 1), (400, 113), (2, 1), (63, 1), (64, 64), (65, 128), (7, 250)]


def small_qwen2(directory: Path, *, tied: bool = True) -> Path:
    """4 layers, hidden 256, 4 heads over 2 groups, weights rounded to bfloat16, so that both sides start from the same numbers."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.08,
    )
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def sequences(lengths: list[tuple[int, int]] = LENGTHS, seed: int = 0) -> tuple[Ragged, Ragged]:
    rng = np.random.default_rng(seed)
    prompts = Ragged.from_list([rng.integers(0, VOCAB, size=p) for p, _ in lengths], np.int32)
    responses = Ragged.from_list([rng.integers(0, VOCAB, size=r) for _, r in lengths], np.int32)
    return prompts, responses
