"""The process groups of one Megatron worker group."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megarl.device import comm_backend, pin_cpu_threads, use_own_device
from megarl.errors import WorkerError, explain
from megarl.megatron import cpu, p2p
from megarl.types import Layout, Rank


def join(rank: int, layout: Layout, store: dist.Store, timeout_s: float, seed: int) -> Rank:
    """Join the worker group as ``rank`` of ``layout.world_size`` and build Megatron's process groups.

    ``store`` is the group's rendezvous; ``timeout_s`` bounds every collective.
    """
    pin_cpu_threads(1)
    cpu.install()
    p2p.install()
    use_own_device()
    dist.init_process_group(comm_backend(), store=store, world_size=layout.world_size, rank=rank, timeout=timedelta(seconds=timeout_s))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    # Dropout is 0 everywhere, so nothing draws from the tracker; its inference form needs no CUDA generator.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)
    found = Rank(rank, layout)
    _check_place(found)
    return found


def _check_place(rank: Rank) -> None:
    """Our arithmetic of ranks, by which the controller sends work and plans weights, must be megatron-core's."""
    theirs = {
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "context": parallel_state.get_context_parallel_rank(),
        "data": parallel_state.get_data_parallel_rank(),
        "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
        "expert": parallel_state.get_expert_model_parallel_rank(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_rank(),
        "expert_data": parallel_state.get_expert_data_parallel_rank(),
    }
    ours = {name: getattr(rank, name) for name in theirs}
    if ours != theirs:
        raise WorkerError(
            explain(
                "megatron-core places a rank elsewhere than megarl does",
                where=f"rank {rank.index} of {rank.layout}",
                got=theirs,
                expected=ours,
                do="use a tested version of megatron-core (megarl.megatron.cpu.TESTED_VERSIONS)",
            )
        )


def leave() -> None:
    """Tear the process groups down; safe to call twice."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
