"""Megatron's Adam, and the one step that refuses what is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megarl.device import compute_device
from megarl.megatron.cpu import on_compute_device


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam (arXiv:1412.6980) with decoupled weight decay (arXiv:1711.05101)."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    distributed: bool = False


def build_optimizer(chunks: list[Any], settings: OptimizerSettings, dtype: str) -> Any:
    """The optimizer of wrapped model chunks. bfloat16 parameters get float32 master weights."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.lr,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        bf16=dtype == "bfloat16",
        params_dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32,
        use_distributed_optimizer=settings.distributed,
    )
    with on_compute_device():
        optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    _fill_fresh_state(optimizer)
    return optimizer


def _fill_fresh_state(optimizer: Any) -> None:
    """Give Adam the state that it otherwise makes at its first step.

    Without it a checkpoint taken before that step (the critic warms up first) lacks the moments, and no later run could load it.
    """
    for part in optimizer.chained_optimizers:
        fill = _fill_torch if isinstance(part.optimizer, torch.optim.AdamW) else _fill_fused
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                fill(part.optimizer, group, parameter)


def _fill_torch(adam: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
    adam.state[parameter] = {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _fill_fused(adam: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
    """Transformer Engine's FusedAdam counts steps by group."""
    adam.initialize_state(parameter, store_param_remainders=False)
    group.setdefault("step", 0)


def optimizer_step(optimizer: Any, lr: float, *, finite: bool) -> tuple[float, bool]:
    """Clip and apply; returns (gradient norm before clipping, applied).

    Nothing is applied when ``finite`` is false or the norm is not finite. Every rank computes the same norm, and ``finite`` comes from
    sums that all ranks share, so that all of them take the same branch.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    with on_compute_device():
        overflow = optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        flag = torch.tensor(float(finite and not overflow and math.isfinite(norm)), device=compute_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        if not flag.item():
            return norm, False
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters and part.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=norm)
        return norm, bool(optimizer.step_with_ready_grads())
