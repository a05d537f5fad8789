"""A random model that suits the GPU's kernels (heads of 64), and sequences for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.types import Ragged
from tests.megatron import mixtures, models
from tests.megatron.family_models import random_family

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


_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 80, "sliding_window": 100, "tie_word_embeddings": True}

# Of each thing that Transformer Engine's layers must be told, or can't do: name -> (model_type, what is its own).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "yarn": (
        "llama",
        {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 256},
            "initializer_range": 0.06,  # sharp enough with the factor of its scores
        },
    ),
    "window": ("mistral", {"sliding_window": 100}),
    "longrope": (
        "phi3",
        {
            "sliding_window": 200,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "short_factor": [1.0 + 0.05 * i for i in range(24)],
                "long_factor": [2.0 + 0.05 * i for i in range(24)],
            },
        },
    ),
    "parallel": ("gpt_neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0} | _GEMMA),
    "gemma3": (
        "gemma3_text",
        {
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
            "rope_parameters": {
                _SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
                _FULL: {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
            },
        }
        | _GEMMA,
    ),
}

FAMILIES["large heads"] = (FAMILIES["gemma3"][0], FAMILIES["gemma3"][1] | {"head_dim": 256, "query_pre_attn_scalar": 256})


def small_family(directory: Path, name: str) -> Path:
    """A model of :data:`FAMILIES`: 4 layers, 4 heads of 64 over 2 groups."""
    model_type, special = FAMILIES[name]
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return random_family(directory, model_type, dtype=torch.bfloat16, **common | special)


# Head sizes of DeepSeek's own models. Every expert sees every token, for the reason above.
_LATENT = {
    "intermediate_size": 640,
    "moe_intermediate_size": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "rope_parameters": mixtures.YARN | {"factor": 4.0, "original_max_position_embeddings": 256},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "v3": {"q_lora_rank": 192, "n_group": 1, "topk_group": 1} | _LATENT,
    "v2 lite": _LATENT,
    "mixtral": {"intermediate_size": 128, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 4},
}


def small_mixture_of(directory: Path, name: str) -> Path:
    """A DeepSeek or Mixtral model of ``tests.megatron.mixtures`` in sizes that suit a GPU: 3 layers, 4 heads."""
    common = {"vocab_size": VOCAB, "hidden_size": 256, "max_position_embeddings": 1024, "initializer_range": 0.08, "rms_norm_eps": 1e-5}
    return mixtures.make(name, directory, dtype=torch.bfloat16, **common | MIXTURES[name])


def sequences() -> tuple[Ragged, Ragged]:
    return models.sequences(LENGTHS, vocab=VOCAB)
