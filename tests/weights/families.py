"""A tiny random model of each family, as transformers makes and saves it. Odd sizes, nothing square, no power of two that needn't be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 61  # prime: padded under every tensor-parallel size
_COMMON = {"vocab_size": VOCAB, "num_hidden_layers": 6, "num_attention_heads": 4, "max_position_embeddings": 96, "initializer_range": 0.15}
_DENSE = {"hidden_size": 40, "intermediate_size": 44, "num_key_value_heads": 2}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 24}  # fmt: skip
_MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
_LATENT = {
    "hidden_size": 40, "intermediate_size": 44, "kv_lora_rank": 22, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14,
    "num_key_value_heads": 4, "n_shared_experts": 2, "first_k_dense_replace": 2, "n_routed_experts": 6,
}  # fmt: skip

# name -> (model_type, configuration)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _DENSE | {"rope_parameters": _LLAMA3}),
    "llama biases": ("llama", _DENSE | {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    "mistral": ("mistral", _DENSE | {"sliding_window": 9, "head_dim": 10}),
    "qwen2": ("qwen2", _DENSE | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", _DENSE | {"head_dim": 14}),
    "qwen3_moe": ("qwen3_moe", _DENSE | _MIXTURE | {"num_experts": 6, "head_dim": 14, "norm_topk_prob": True}),
    "mixtral": ("mixtral", _DENSE | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "phi3": ("phi3", _DENSE | {"pad_token_id": 0, "tie_word_embeddings": True}),
    "gpt_neox": ("gpt_neox", {"hidden_size": 40, "intermediate_size": 52}),
    "gemma2": ("gemma2", _DENSE | {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 9}),
    "gemma3": ("gemma3_text", _DENSE | {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 9, "sliding_window_pattern": 3}),
    "seed_oss": ("seed_oss", _DENSE | {"head_dim": 14}),
    "deepseek_v2": ("deepseek_v2", _LATENT | _MIXTURE | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", _LATENT | _MIXTURE | {"q_lora_rank": 20, "n_group": 3, "topk_group": 2, "num_nextn_predict_layers": 0}),
}  # fmt: skip


def save_model(name: str, directory: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Path:
    """Weights whose norms and biases are not 1 and 0; a router bias that is not 0 and float32 whatever ``dtype``."""
    torch.manual_seed(seed)
    model_type, sizes = MODELS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(_COMMON | sizes | changes)), dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(dtype)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.data = 0.1 * torch.randn(buffer.shape)
    model.save_pretrained(directory)
    return directory
