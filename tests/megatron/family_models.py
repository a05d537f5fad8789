"""Tiny random models of the dense families, of awkward shapes, as Hugging Face directories: one for each thing that can go wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.megatron.models import VOCAB, save_with_noise

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA = {"head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20, "tie_word_embeddings": True}


def _longrope(original: int) -> dict[str, Any]:
    return {
        "partial_rotary_factor": 0.8,  # 8 of a head's 10 dimensions
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": [1.0, 1.1, 1.3, 1.7],
            "long_factor": [1.0, 2.0, 3.5, 6.0],
        },
    }


# name -> (model_type, what differs from the common configuration)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 rope": ("llama", {"rope_parameters": _LLAMA3, "num_key_value_heads": 1}),
    "linear rope and biases": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}, "attention_bias": True, "mlp_bias": True},
    ),
    "yarn": ("llama", {"rope_parameters": _YARN, "num_hidden_layers": 3}),
    "window": ("mistral", {"sliding_window": 7, "head_dim": 12}),
    "window of one": ("mistral", {"sliding_window": 1, "num_hidden_layers": 2}),
    "windowed qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "longrope short": ("phi3", {"sliding_window": 9} | _longrope(80)),
    "longrope long": ("phi3", {"sliding_window": None} | _longrope(16)),
    "parallel": ("gpt_neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.4}}),
    "neox in sequence": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5} | _GEMMA),
    "gemma2 of three layers": (
        "gemma2",
        {"num_hidden_layers": 3, "attn_logit_softcapping": None, "final_logit_softcapping": 2.5, "num_key_value_heads": 1} | _GEMMA,
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 5,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
            "rope_parameters": {
                _SLIDING: {"rope_type": "default", "rope_theta": 50.0},
                _FULL: {"rope_type": "linear", "rope_theta": 2000.0, "factor": 4.0},
            },
        }
        | _GEMMA,
    ),
}  # fmt: skip


def random_family(directory: Path, model_type: str, *, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """Write a model of family ``model_type`` with random weights, and norms and biases that are not 1 and 0."""
    torch.manual_seed(0)
    return save_with_noise(AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)), directory, dtype)


def build(directory: Path, name: str) -> Path:
    """Write model ``name`` of :data:`CONFIGS` into ``directory``."""
    model_type, special = CONFIGS[name]
    return random_family(directory, model_type, **_COMMON | special)


def builder(root: Path) -> Callable[[str], Path]:
    """Build each model once, under ``root``."""

    def get(name: str) -> Path:
        directory = root / name.replace(" ", "_")
        return directory if directory.exists() else build(directory, name)

    return get
