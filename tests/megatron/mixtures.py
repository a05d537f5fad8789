"""Tiny random DeepSeek and Mixtral models of awkward shapes, as Hugging Face directories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from megarl.weights.families import model_family
from tests.megatron.models import VOCAB

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "num_hidden_layers": 3,  # over two stages: 2 and 1, or 1 and 2
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-3,  # far from the one that the norms of the latents have
}
_LATENT = {
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_V2 = _COMMON | _LATENT | {"norm_topk_prob": False}
_V3 = _COMMON | _LATENT | {"q_lora_rank": 20, "n_group": 3, "topk_group": 2, "num_mtp_layers": 0}

MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "v3": (DeepseekV3Config, DeepseekV3ForCausalLM, _V3 | {"rope_parameters": YARN}),
    "v3 plain": (  # no latent query, positions not in pairs, weights not normalized, one group, no dense layer
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        _V3
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False}
        | {"rope_parameters": _PLAIN, "first_k_dense_replace": 0},
    ),
    "v2 lite": (DeepseekV2Config, DeepseekV2ForCausalLM, _V2 | {"q_lora_rank": None, "rope_parameters": YARN, "topk_method": "greedy"}),
    "v2": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        _V2 | {"q_lora_rank": 20, "rope_parameters": _PLAIN, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        _COMMON
        | {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 2}
        | {"sliding_window": None},
    ),
}
MODELS["v3 deep"] = (*MODELS["v3"][:2], MODELS["v3"][2] | {"num_hidden_layers": 5, "first_k_dense_replace": 2})
MODELS["v3 dense"] = (*MODELS["v3"][:2], MODELS["v3"][2] | {"first_k_dense_replace": 3})
MODELS["mixtral window"] = (*MODELS["mixtral"][:2], MODELS["mixtral"][2] | {"sliding_window": 7})


def make(name: str, directory: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Path:
    """One of :data:`MODELS`: norms are not 1, and the router's bias isn't 0 and is large enough to choose other experts."""
    torch.manual_seed(seed)
    config, model, settings = MODELS[name]
    made: PreTrainedModel = model(config(**(settings | changes))).float()
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if "norm" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for key, buffer in made.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    made.to(dtype)
    for key, buffer in made.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.data = buffer.float()  # as DeepSeek publishes it
    made.save_pretrained(directory)
    return directory


def by_table(hf_config: Mapping[str, Any], found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays under the names that transformers has in memory -> under those of the table, which are a directory's: experts are apart."""
    family = model_family(hf_config)
    stacked = family.stacked(hf_config)
    renamed = {}
    for name, shape in family.hf_tensors(hf_config).items():
        if name in stacked:
            region, _ = stacked[name]
            renamed[name] = found[region.name][tuple(slice(*b) for b in region.box)].reshape(shape)
        elif (here := name.replace("block_sparse_moe", "mlp").replace("embed_out", "lm_head")) in found:
            renamed[name] = found[here]
    return renamed
