"""Which layers a model is built from: Transformer Engine's on a GPU where it is installed, else megatron-core's own with ours in them.

Both read the same weight tables; the names of a few parameters differ (``megarl.weights.table.Row.te``). Checkpoints of either have the
same keys: megatron-core's local spec maps its names to Transformer Engine's, ``sharded_state_dict_keys_map``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.megatron.attention import PackedAttention, engine_is_right
from megarl.megatron.blocks import with_block
from megarl.megatron.norm import norm_class
from megarl.megatron.rope import Rotary
from megarl.weights.architecture import Architecture


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


def block_spec(
    config: TransformerConfig, spec: str, layers: Iterable[int], architecture: Architecture, rotaries: Mapping[str | None, Rotary]
) -> TransformerBlockSubmodules:
    """One layer specification for each of a model chunk's ``layers``, counted over the whole model, and the norm after the last.

    Given as a whole block, and not as one layer, since layers differ, and the block would otherwise choose its last norm by itself.
    ``rotaries``: sets of rotary positions that attention applies (``Architecture.rope`` names a layer's); none where megatron-core does.
    """
    make, norm = (_te_layer, _te_norm()) if spec == "te" else (_local_layer, norm_class(config))
    specs = [with_block(make(config, architecture, rotaries, layer), architecture.block, norm) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _te_norm() -> Any:
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _is_mixture(config: TransformerConfig, layer: int) -> bool:
    """Whether layer ``layer`` has experts. ``moe_layer_freq`` says it for each, or every how many."""
    if not config.num_moe_experts:
        return False
    frequency = config.moe_layer_freq
    return layer % frequency == 0 if isinstance(frequency, int) else bool(frequency[layer])


def _te_layer(config: TransformerConfig, architecture: Architecture, rotaries: Mapping[str | None, Rotary], layer: int) -> Any:
    mixture = _is_mixture(config, layer)
    made = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if mixture else None,
        moe_grouped_gemm=mixture,
        qk_layernorm=config.qk_layernorm,
    )
    needs = _attention_needs(architecture, rotaries, layer)
    by_rings = needs["window"] and config.context_parallel_size > 1
    if needs["softcap"] or by_rings or not engine_is_right(config.kv_channels, config.kv_channels):
        # Transformer Engine has no soft-capping, under context parallelism by rings no windows, and wrong gradients of large heads.
        made.submodules.self_attention.submodules.core_attention = partial(PackedAttention, **needs)
    elif any(needs.values()):
        from megarl.megatron.te_attention import EngineAttention

        made.submodules.self_attention.submodules.core_attention = partial(EngineAttention, window=needs["window"], rotary=needs["rotary"])
    return made


def _local_layer(config: TransformerConfig, architecture: Architecture, rotaries: Mapping[str | None, Rotary], layer: int) -> Any:
    mixture = _is_mixture(config, layer)
    made = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if mixture else None,
        moe_grouped_gemm=False,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
    )
    norm, parts = norm_class(config), made.submodules
    parts.input_layernorm = norm
    parts.pre_mlp_layernorm = norm
    attention = parts.self_attention.submodules
    attention.core_attention = partial(PackedAttention, **_attention_needs(architecture, rotaries, layer))
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    if mixture:  # Transformer Engine's mixture has this norm by itself, not fused into a first linear layer
        parts.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    return made


def _attention_needs(architecture: Architecture, rotaries: Mapping[str | None, Rotary], layer: int) -> dict[str, Any]:
    """What the attention of layer ``layer`` computes beyond a plain softmax."""
    return {
        "window": architecture.window(layer),
        "softcap": architecture.attention_softcap,
        "rotary": rotaries[architecture.rope(layer)] if rotaries else None,
    }
