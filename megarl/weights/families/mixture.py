"""What mixtures of experts share: a router sends each token to a few of many small MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.weights.families.dense import HF, MEGATRON
from megarl.weights.families.read import cannot, size_of
from megarl.weights.ops import copy_op, gate_up
from megarl.weights.sizes import ModelSizes
from megarl.weights.table import HfTensor, Row

_EXPERT = MEGATRON + "mlp.experts.local_experts.{expert}."
_TE = MEGATRON + "mlp.experts."


def expert_rows(hf: str, names: tuple[str, str, str]) -> tuple[Row, ...]:
    """The experts under ``hf``; ``names``: how the family calls gate, up and down."""
    gate, up, down = (HF + hf + "experts.{expert}." + name + ".weight" for name in names)
    stacked = HF + "mlp.experts."  # as transformers has them in memory, and some directories on disk
    return (
        Row(_EXPERT + "linear_fc1.weight",
            (HfTensor(gate, ("expert_ffn", "hidden")), HfTensor(up, ("expert_ffn", "hidden"))),
            gate_up, tensor_axis=0, expert=True, te=_TE + "linear_fc1.weight{expert}",
            stacked=HfTensor(stacked + "gate_up_proj", ("experts", "expert_ffn+expert_ffn", "hidden"))),
        Row(_EXPERT + "linear_fc2.weight", (HfTensor(down, ("hidden", "expert_ffn")),),
            copy_op, tensor_axis=1, expert=True, te=_TE + "linear_fc2.weight{expert}",
            stacked=HfTensor(stacked + "down_proj", ("experts", "hidden", "expert_ffn"))),
    )  # fmt: skip


def router_row(hf: str) -> Row:
    """The router's weight, whole on every rank."""
    dims = ("experts", "hidden")
    return Row(MEGATRON + "mlp.router.weight", (HfTensor(f"{HF}{hf}gate.weight", dims),), copy_op, None,
               stacked=HfTensor(f"{HF}mlp.gate.weight", dims))  # fmt: skip


def chosen_experts(hf_config: Mapping, sizes: ModelSizes) -> int:
    """``num_experts_per_tok``, at most the number of experts."""
    chosen = size_of(hf_config, "num_experts_per_tok")
    if chosen > sizes.experts:
        raise cannot("num_experts_per_tok", chosen, f"at most {sizes.experts}, the number of experts")
    return chosen


def mixture_kwargs(hf_config: Mapping, sizes: ModelSizes) -> dict[str, Any]:
    """Arguments of TransformerConfig for experts whose router takes a softmax, over the chosen ones alone."""
    return {
        "num_moe_experts": sizes.experts,
        "moe_ffn_hidden_size": sizes.expert_ffn,
        "moe_router_topk": chosen_experts(hf_config, sizes),
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",  # the auxiliary loss belongs to pretraining
        "moe_aux_loss_coeff": 0.0,
    }
