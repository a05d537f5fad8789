"""Tiny random models of awkward shapes, as Hugging Face directories: Qwen2, and a mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megarl.types import Ragged

VOCAB = 61  # prime: padded under every tensor-parallel size

# Lengths (prompt, response) that break naive packing: single tokens, one long among many short, a multiple of 16 and its neighbours.
HOSTILE_LENGTHS = {
    "ones": [(1, 1)] * 5,
    "alone": [(1, 1)],
    "one long": [(1, 2), (40, 23), (2, 1), (1, 1)],
    "around 16": [(8, 8), (8, 7), (8, 9), (15, 1), (1, 15), (16, 16)],
    "odd total": [(3, 30), (7, 3), (1, 1)],
    "long prompts": [(60, 1), (1, 3), (33, 2), (2, 2), (47, 1)],
}


def random_qwen2(
    directory: Path,
    *,
    vocab: int,
    hidden: int,
    ffn: int,
    spread: float,
    positions: int = 128,
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """4 layers, 4 heads over 2 groups; biases and norms that are not 0 and 1, and weights of ``spread``, so that a wrong one shows."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        initializer_range=spread,
    )
    return save_with_noise(Qwen2ForCausalLM(config), directory, dtype)


def save_with_noise(model: PreTrainedModel, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Add noise to biases and norms, so that they are not 0 and 1, and write the model as ``dtype``."""
    model.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(directory)
    return directory


def tiny_qwen2(directory: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """Heads of 16."""
    return random_qwen2(directory, vocab=VOCAB, hidden=64, ffn=96, spread=0.15, tied=tied, seed=seed)


def random_mixture(directory: Path, *, spread: float, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
    """Qwen3-MoE with 4 layers, 4 heads over 2 groups."""
    torch.manual_seed(seed)
    common = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": spread}
    return save_with_noise(Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **sizes)), directory, dtype)


def tiny_mixture(directory: Path, *, norm_topk_prob: bool = True) -> Path:
    """6 experts of which 2 see a token; heads of 12, whose sum is not the hidden size."""
    return random_mixture(
        directory,
        spread=0.15,
        vocab_size=VOCAB,
        hidden_size=40,
        intermediate_size=56,
        moe_intermediate_size=24,
        head_dim=12,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=norm_topk_prob,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )


def by_expert(gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By names on disk, where tables name them. In memory transformers stacks the experts, and calls GPT-NeoX's embed_out lm_head."""
    found = {}
    if any(name.startswith("gpt_neox.") for name in gradients):
        gradients = {name.replace("lm_head", "embed_out"): gradient for name, gradient in gradients.items()}
    for name, gradient in gradients.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e, both in enumerate(gradient):
                found[f"{stem}.{e}.gate_proj.weight"], found[f"{stem}.{e}.up_proj.weight"] = np.split(both, 2)
        elif last == "down_proj":
            found |= {f"{stem}.{e}.down_proj.weight": one for e, one in enumerate(gradient)}
        else:
            found[name] = gradient
    return found


def sequences(lengths: list[tuple[int, int]], seed: int = 0, vocab: int = VOCAB) -> tuple[Ragged, Ragged]:
    """Random prompts and responses of these lengths."""
    rng = np.random.default_rng(seed)
    prompts = Ragged.from_list([rng.integers(0, vocab, size=p) for p, _ in lengths], np.int32)
    responses = Ragged.from_list([rng.integers(0, vocab, size=r) for _, r in lengths], np.int32)
    return prompts, responses
