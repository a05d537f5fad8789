"""The process groups of one Megatron worker group, and where this rank stands in them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megarl.device import comm_backend, pin_cpu_threads, use_own_device
from megarl.errors import ConfigError, explain
from megarl.megatron import cpu
from megarl.types import Layout


@dataclass(frozen=True)
class Rank:
    """Coordinates of this process in its worker group."""

    rank: int
    layout: Layout
    tensor: int
    pipeline: int
    data: int

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline == self.layout.pipeline - 1

    @property
    def reports(self) -> bool:
        """True on the one rank of each data-parallel replica that returns results: last stage, first tensor rank."""
        return self.is_last_stage and self.tensor == 0


def check_layout(layout: Layout, what: str) -> None:
    """Refuse layouts that this version can't run, before any process starts."""
    unsupported = {
        "virtual_pipeline": layout.virtual_pipeline,
        "context": layout.context,
        "expert": layout.expert,
        "expert_tensor": layout.expert_tensor,
    }
    for name, size in unsupported.items():
        if size != 1:
            raise ConfigError(
                explain(f"{what} asks for a layout that is not supported yet", where=f"{what}.layout.{name}", got=size, expected=1)
            )


def join(rank: int, layout: Layout, store: dist.Store, timeout_s: float, seed: int) -> Rank:
    """Join the worker group as ``rank`` of ``layout.world_size`` and build Megatron's process groups.

    ``store`` is the group's rendezvous; ``timeout_s`` bounds every collective. Rank order is Megatron's: tensor fastest, then context,
    data, pipeline.
    """
    pin_cpu_threads(1)
    cpu.install()
    use_own_device()
    dist.init_process_group(comm_backend(), store=store, world_size=layout.world_size, rank=rank, timeout=timedelta(seconds=timeout_s))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    # Dropout is 0 everywhere, so nothing draws from the tracker; its inference form needs no CUDA generator.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)
    return Rank(
        rank=rank,
        layout=layout,
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        data=parallel_state.get_data_parallel_rank(),
    )


def leave() -> None:
    """Tear the process groups down; safe to call twice."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
