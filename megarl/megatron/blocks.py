"""Decoder layers that megatron-core lacks: how attention and MLP are added to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megarl.weights.architecture import PARALLEL, SANDWICH


class ParallelLayer(TransformerLayer):
    """x += attention(N1(x)) + mlp(N2(x)): both read the same residual stream (GPT-NeoX, arXiv:2204.06745)."""

    def forward(self, hidden_states: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, None]:
        """[T, 1, hidden] -> the same, and no context."""
        attended = _attend(self, hidden_states, inputs)
        changed = _with_bias(self.mlp(self.pre_mlp_layernorm(hidden_states)))
        return hidden_states + attended + changed, None


@dataclass
class SandwichSubmodules(TransformerLayerSubmodules):
    """megatron-core's, and the norms behind attention and MLP."""

    post_attention_layernorm: Any = IdentityOp
    post_mlp_layernorm: Any = IdentityOp


class SandwichLayer(TransformerLayer):
    """x += N2(attention(N1(x))); x += N4(mlp(N3(x))): norms before and behind (Gemma 2, arXiv:2408.00118)."""

    def __init__(self, config: TransformerConfig, submodules: SandwichSubmodules, **kwargs: Any):
        super().__init__(config=config, submodules=submodules, **kwargs)
        size = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_attention_layernorm = submodules.post_attention_layernorm(**size)
        self.post_mlp_layernorm = submodules.post_mlp_layernorm(**size)

    def forward(self, hidden_states: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, None]:
        """[T, 1, hidden] -> the same, and no context."""
        hidden_states = hidden_states + self.post_attention_layernorm(_attend(self, hidden_states, inputs))
        changed = _with_bias(self.mlp(self.pre_mlp_layernorm(hidden_states)))
        return hidden_states + self.post_mlp_layernorm(changed), None


def _attend(layer: TransformerLayer, hidden: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    return _with_bias(
        layer.self_attention(
            layer.input_layernorm(hidden),
            attention_mask=inputs.get("attention_mask"),
            rotary_pos_emb=inputs.get("rotary_pos_emb"),
            packed_seq_params=inputs.get("packed_seq_params"),
        )
    )


def _with_bias(pair: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    """Megatron's row-parallel layers leave their bias to whoever adds up."""
    output, bias = pair
    return output if bias is None else output + bias


def with_block(layer: ModuleSpec, block: str, norm: Any) -> ModuleSpec:
    """megatron-core's sequential ``layer`` as one of kind ``block`` (``megarl.weights.architecture``); ``norm`` makes what it lacks."""
    if block == PARALLEL:
        return ModuleSpec(module=ParallelLayer, submodules=layer.submodules)
    if block == SANDWICH:
        parts = {field.name: getattr(layer.submodules, field.name) for field in fields(layer.submodules)}
        parts |= {"post_attention_layernorm": norm, "post_mlp_layernorm": norm}
        return ModuleSpec(module=SandwichLayer, submodules=SandwichSubmodules(**parts))
    return layer
