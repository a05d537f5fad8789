"""Build this rank's part of a model, one chunk or several, from a Hugging Face configuration and a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.device import compute_device
from megarl.megatron.cpu import on_compute_device
from megarl.megatron.head import ValueHead
from megarl.megatron.layers import block_spec, fusions
from megarl.types import Rank
from megarl.weights.dtypes import DTYPES
from megarl.weights.families import model_family
from megarl.weights.table import padded_vocab_size


@dataclass(frozen=True)
class Role:
    """What one model is for: a value, so that actor, critic and reference share all code."""

    head: str  # "lm": logits over the vocabulary | "value": one number per token
    trainable: bool
    dtype: str = "float32"


def transformer_config(family_kwargs: dict[str, Any], rank: Rank, dtype: torch.dtype, spec: str) -> TransformerConfig:
    """Megatron's configuration. Whatever differs between machines or could change numbers silently is said here, once."""
    layout = rank.layout
    return TransformerConfig(
        **family_kwargs,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
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
        **fusions(spec),
    )


def build_model(hf_config: dict[str, Any], rank: Rank, role: Role, spec: str) -> list[GPTModel]:
    """This rank's model chunks (one, unless the pipeline is interleaved), on this rank's device, with weights still to be loaded.

    ``spec``: "local" or "te" layers. All chunks share one configuration, as megatron-core's schedules expect.
    """
    kwargs = model_family(hf_config).megatron_kwargs(hf_config)
    model_kwargs = dict(kwargs["model"])
    model_kwargs["vocab_size"] = padded_vocab_size(model_kwargs["vocab_size"], rank.layout.tensor)
    if role.head == "value":
        model_kwargs["share_embeddings_and_output_weights"] = False
    config = transformer_config(kwargs["transformer"], rank, DTYPES[role.dtype], spec)
    return [_build_chunk(config, model_kwargs, rank, role, spec, chunk) for chunk in range(rank.layout.virtual_pipeline)]


def _build_chunk(config: TransformerConfig, model_kwargs: dict[str, Any], rank: Rank, role: Role, spec: str, chunk: int) -> GPTModel:
    stage = chunk if rank.layout.virtual_pipeline > 1 else None
    with on_compute_device():
        model = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, spec, stage),
            pre_process=rank.holds("first", chunk),
            post_process=rank.holds("last", chunk),
            parallel_output=True,
            **model_kwargs,
            scatter_embedding_sequence_parallel=True,
            vp_stage=stage,
        )
    if role.head == "value" and rank.holds("last", chunk):
        model.output_layer = ValueHead(config)
    _mark_tensor_parallel(model)
    model.to(compute_device())
    model.requires_grad_(role.trainable)
    model.train(role.trainable)
    return model


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
