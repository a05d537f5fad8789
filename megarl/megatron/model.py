"""Build this rank's part of a model, one chunk or several, from a Hugging Face configuration and a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.device import compute_device
from megarl.megatron.cpu import on_compute_device
from megarl.megatron.head import ValueHead
from megarl.megatron.layers import block_spec, fusions
from megarl.megatron.mla import LatentConfig, latent_block_spec, latent_kwargs
from megarl.megatron.rope import Rotary, rotary_sets
from megarl.types import Layout, Rank
from megarl.weights.architecture import Architecture
from megarl.weights.dtypes import DTYPES
from megarl.weights.families import model_family
from megarl.weights.sizes import padded_vocab_size
from megarl.weights.stages import deal_layers


@dataclass(frozen=True)
class Role:
    """What one model is for: a value, so that actor, critic and reference share all code."""

    head: str  # "lm": logits over the vocabulary | "value": one number per token
    trainable: bool
    dtype: str = "float32"
    longest: int | None = None  # tokens of the longest sequence that it is given; None: max_position_embeddings (``rope.rotary_sets``)


def transformer_config(
    hf_config: dict[str, Any], family_kwargs: dict[str, Any], architecture: Architecture, rank: Rank, dtype: torch.dtype, spec: str
) -> TransformerConfig:
    """Megatron's configuration. Whatever differs between machines or could change numbers silently is said here, once."""
    layout = rank.layout
    latent = family_kwargs.get("multi_latent_attention", False)
    kwargs = fusions(spec) | {"softmax_scale": architecture.attention_scale}
    kwargs |= latent_kwargs(hf_config, family_kwargs) if latent else family_kwargs
    # Fused with their bias there are SwiGLU and approximations of others alone.
    kwargs["bias_activation_fusion"] &= kwargs["activation_func"] is F.silu and kwargs["gated_linear_unit"]
    return (LatentConfig if latent else TransformerConfig)(
        **kwargs,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        pipeline_model_parallel_layout=_pipeline_layout(family_kwargs["num_layers"], layout),
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Losses arrive divided by the whole mini-batch's denominator; this keeps Megatron from dividing again by micro-batches or DP.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,  # packed micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # demanded beside variable_seq_lengths, also by dense models
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=False,
        perform_initialization=False,  # every weight is loaded
    )


def _pipeline_layout(layers: int, layout: Layout) -> list[list[str]] | None:
    """What megatron-core has to be told where chunks have unequal numbers of layers: the content of each, as a token meets them."""
    dealt = deal_layers(layers, layout)
    if len({len(chunk) for chunk in dealt}) == 1:
        return None
    named = [["decoder"] * len(chunk) for chunk in dealt]
    return [["embedding", *named[0]], *named[1:-1], [*named[-1], "loss"]]


@dataclass(frozen=True)
class _Blueprint:
    """What all chunks of a model are built from."""

    config: TransformerConfig
    model_kwargs: dict[str, Any]  # of GPTModel
    architecture: Architecture
    rotaries: dict[str | None, Rotary]  # applied by attention; none: megatron-core applies them
    frequencies: torch.Tensor | None  # of megatron-core's rotary positions; None: as it computes them from a base
    role: Role
    spec: str


def build_model(hf_config: dict[str, Any], rank: Rank, role: Role, spec: str) -> list[GPTModel]:
    """This rank's model chunks (one, unless the pipeline is interleaved), on this rank's device, with weights still to be loaded.

    ``spec``: "local" or "te" layers. All chunks share one configuration, as megatron-core's schedules expect.
    """
    blueprint = _blueprint(hf_config, rank, role, spec)
    return [_build_chunk(blueprint, rank, chunk) for chunk in range(rank.layout.virtual_pipeline)]


def _blueprint(hf_config: dict[str, Any], rank: Rank, role: Role, spec: str) -> _Blueprint:
    family = model_family(hf_config)
    kwargs, architecture = family.megatron_kwargs(hf_config), family.architecture(hf_config)
    model_kwargs = dict(kwargs["model"])
    model_kwargs["vocab_size"] = padded_vocab_size(model_kwargs["vocab_size"], rank.layout.tensor)
    if role.head == "value":
        model_kwargs["share_embeddings_and_output_weights"] = False
    config = transformer_config(hf_config, kwargs["transformer"], architecture, rank, DTYPES[role.dtype], spec)
    rotaries = {} if isinstance(config, LatentConfig) else rotary_sets(hf_config, architecture, role.longest)
    frequencies = None
    if None in rotaries and rotaries[None].factor == 1.0:  # megatron-core's own way, and its kernels, with other frequencies
        frequencies, rotaries = rotaries[None].frequencies, {}
    elif rotaries:
        model_kwargs["position_embedding_type"] = "none"
    return _Blueprint(config, model_kwargs, architecture, rotaries, frequencies, role, spec)


def _build_chunk(blueprint: _Blueprint, rank: Rank, chunk: int) -> GPTModel:
    config, role = blueprint.config, blueprint.role
    stage = chunk if rank.layout.virtual_pipeline > 1 else None
    with on_compute_device():
        model = GPTModel(
            config=config,
            transformer_layer_spec=_layers(blueprint, rank, chunk),
            pre_process=rank.holds("first", chunk),
            post_process=rank.holds("last", chunk),
            parallel_output=True,
            **blueprint.model_kwargs,
            scatter_embedding_sequence_parallel=True,
            vp_stage=stage,
        )
    if blueprint.frequencies is not None:
        model.rotary_pos_emb.inv_freq = blueprint.frequencies.to(model.rotary_pos_emb.inv_freq.device)
    _scale_edges(model, blueprint.architecture, role)
    if role.head == "value" and rank.holds("last", chunk):
        model.output_layer = ValueHead(config)
    _mark_tensor_parallel(model)
    model.to(compute_device())
    model.requires_grad_(role.trainable)
    model.train(role.trainable)
    return model


def _layers(blueprint: _Blueprint, rank: Rank, chunk: int) -> TransformerBlockSubmodules:
    config, spec = blueprint.config, blueprint.spec
    layers = deal_layers(config.num_layers, rank.layout)[chunk * rank.layout.pipeline + rank.pipeline]
    if isinstance(config, LatentConfig):
        return latent_block_spec(config, spec, layers)
    return block_spec(config, spec, layers, blueprint.architecture, blueprint.rotaries)


def _scale_edges(model: GPTModel, architecture: Architecture, role: Role) -> None:
    """Scale what leaves the embedding, and cap the logits that leave the output layer (Gemma)."""
    if architecture.embedding_scale is not None and model.pre_process:
        scale = float(torch.tensor(architecture.embedding_scale, dtype=DTYPES[role.dtype]))  # rounded first, as transformers does
        model.embedding.register_forward_hook(lambda _module, _inputs, embedded: embedded * scale)
    cap = architecture.output_softcap
    if cap is not None and model.post_process:  # a value head comes in this layer's place, and isn't capped
        model.output_layer.register_forward_hook(lambda _module, _inputs, output: (torch.tanh(output[0] / cap) * cap, output[1]))


def _mark_tensor_parallel(model: GPTModel) -> None:
    """Say of each weight that is cut over tensor-parallel ranks that it is.

    megatron-core does so while it initialises a weight, and not at all with ``perform_initialization=False``. An unmarked weight counts
    as a duplicate: the gradient norm, and with it clipping, would silently miss every rank but the first.
    """
    axes = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        axis = next((a for kind, a in axes.items() if isinstance(module, kind)), None)
        weight = getattr(module, "weight", None)
        if axis is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, axis, 1)


def wrap_for_training(chunks: list[GPTModel], *, distributed_optimizer: bool) -> list[DistributedDataParallel]:
    """Megatron's DDP: contiguous gradient buffers, summed (not averaged) over data-parallel and context-parallel ranks."""
    with on_compute_device():
        return [
            DistributedDataParallel(
                config=chunk.config,
                ddp_config=DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    overlap_grad_reduce=False,
                    use_distributed_optimizer=distributed_optimizer,
                    bucket_size=None,
                ),
                module=chunk,
            )
            for chunk in chunks
        ]


def unwrap(model: Any) -> GPTModel:
    """The model chunk inside a DDP wrapper, or itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model
