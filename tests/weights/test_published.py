"""Published models: their tables have as many parameters as their authors say, from the keys of their own config.json."""

from __future__ import annotations

from math import prod

import pytest

from megarl.types import Layout, Rank
from megarl.weights.families import model_family


def _keys(model_type: str, hidden: int, ffn: int, layers: int, heads: int, vocab: int, positions: int, **more: object) -> dict:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
    } | more


_LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
_LONG = {"type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48}
_YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
         "original_max_position_embeddings": 4096}  # fmt: skip
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "query_pre_attn_scalar": 256}
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_scaling": _YARN}
_V3 = {
    "q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "num_key_value_heads": 128,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
_V2_LITE = {
    "q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
    "num_key_value_heads": 16,
}  # fmt: skip
_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}

# name -> (config.json as far as it says something, parameters as published)
PUBLISHED = {
    "Llama-3.1-8B": (_keys("llama", 4096, 14336, 32, 32, 128256, 131072, num_key_value_heads=8, rope_scaling=_LLAMA3), 8_030_261_248),
    "Llama-3.2-1B": (_keys("llama", 2048, 8192, 16, 32, 128256, 131072, num_key_value_heads=8, head_dim=64, rope_scaling=_LLAMA3,
                           tie_word_embeddings=True), 1_235_814_400),
    "Mistral-7B-v0.1": (_keys("mistral", 4096, 14336, 32, 32, 32000, 32768, num_key_value_heads=8, sliding_window=4096), 7_241_732_096),
    "Mixtral-8x7B": (_keys("mixtral", 4096, 14336, 32, 32, 32000, 32768, num_key_value_heads=8, num_local_experts=8,
                           num_experts_per_tok=2), 46_702_792_704),
    "Qwen2.5-0.5B": (_keys("qwen2", 896, 4864, 24, 14, 151936, 32768, num_key_value_heads=2, tie_word_embeddings=True), 494_032_768),
    "Qwen3-0.6B": (_keys("qwen3", 1024, 3072, 28, 16, 151936, 40960, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True),
                   596_049_920),
    "Qwen3-30B-A3B": (_keys("qwen3_moe", 2048, 6144, 48, 32, 151936, 40960, num_key_value_heads=4, head_dim=128, **_MOE), 30_532_122_624),
    "Phi-3-mini": (_keys("phi3", 3072, 8192, 32, 32, 32064, 131072, num_key_value_heads=32, rope_scaling=_LONG, sliding_window=262144),
                   3_821_079_552),
    "Phi-4-mini": (_keys("phi3", 3072, 8192, 32, 24, 200064, 131072, num_key_value_heads=8, rope_scaling=_LONG, partial_rotary_factor=0.75,
                         tie_word_embeddings=True), 3_836_021_760),
    "pythia-1b": (_keys("gpt_neox", 2048, 8192, 16, 8, 50304, 2048, rotary_pct=0.25, rotary_emb_base=10000, layer_norm_eps=1e-5,
                        use_parallel_residual=True), 1_011_781_632),
    "gemma-2-2b": (_keys("gemma2", 2304, 9216, 26, 8, 256000, 8192, num_key_value_heads=4, **_GEMMA), 2_614_341_888),
    "gemma-3-1b": (_keys("gemma3_text", 1152, 6912, 26, 4, 262144, 32768, num_key_value_heads=1, **_GEMMA), 999_885_952),
    "DeepSeek-V2-Lite": (_keys("deepseek_v2", 2048, 10944, 27, 16, 102400, 163840, **_LATENT, **_V2_LITE), 15_706_484_224),
    "DeepSeek-V3": (_keys("deepseek_v3", 7168, 18432, 61, 128, 129280, 163840, **_LATENT, **_V3), 671_026_419_200),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    c, published = PUBLISHED[name]
    family = model_family(c)
    family.check_computed(c)
    assert sum(prod(shape) for shape in family.hf_tensors(c).values()) == published


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("DeepSeek-V3", Layout(8, 16, 1, 1, 8, 1, 1, sequence_parallel=True)),  # 61 layers over 16 stages
        ("gemma-2-2b", Layout(8, 4)),  # 26 layers over 4 stages; 4 key/value heads over 8 ranks
        ("Qwen3-30B-A3B", Layout(4, 2, 1, 1, 8, 1, 2, sequence_parallel=True)),
    ],
)
def test_a_large_layout_holds_every_element_once(name: str, layout: Layout) -> None:
    c, published = PUBLISHED[name]
    held = 0
    for rank in (Rank(i, layout) for i in range(layout.world_size)):
        for shard in model_family(c).shard(c, rank).values():
            if shard.owned_by(rank):
                held += sum(prod(stop - start for start, stop in copy.source.box) for copy in shard.copies)
    assert held == published
