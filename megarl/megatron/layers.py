"""Which layers a model is built from: Transformer Engine's on a GPU where it is installed, else megatron-core's own with ours in them.

Both read the same weight tables; the names of a few parameters differ (``megarl.weights.table.Row.te``).
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.megatron.attention import PackedAttention
from megarl.megatron.norm import RMSNorm


def layer_spec(dtype: str, transformer_engine: bool) -> str:
    """What models of ``dtype`` are built from where Transformer Engine is installed or not: "te" or "local", the table's words.

    Transformer Engine's attention over packed sequences computes in bfloat16 alone.
    """
    return "te" if transformer_engine and dtype == "bfloat16" else "local"


def fusions(spec: str) -> dict[str, Any]:
    """Settings of Megatron's configuration that choose kernels. On a CPU every fusion is off: each of them names CUDA."""
    fused = spec == "te"
    return {
        "use_cpu_initialization": not fused,
        "bias_activation_fusion": fused,
        "apply_rope_fusion": fused,  # without it, rotary positions of packed sequences loop over them, with a device read in each layer
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "moe_grouped_gemm": fused,  # of mixtures of experts
        "gradient_accumulation_fusion": False,  # the output layer is megatron-core's own and would need apex for it
    }


def block_spec(config: TransformerConfig, spec: str, chunk: int | None) -> TransformerBlockSubmodules:
    """One layer specification for each layer of this stage's model chunk (None: it has one alone), and the norm after the last.

    Given as a whole block, and not as one layer, since the block would otherwise choose its last norm by itself.
    """
    layer, norm = (_te_layer if spec == "te" else _local_layer)(config)
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=chunk), layer_norm=norm)


def _te_layer(config: TransformerConfig) -> tuple[Any, Any]:
    from megatron.core.extensions.transformer_engine import TENorm

    experts = config.num_moe_experts
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=config.qk_layernorm
    )
    return layer, TENorm


def _local_layer(config: TransformerConfig) -> tuple[Any, Any]:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    parts = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return layer, RMSNorm
