"""``RayPPOTrainer`` and what its loop calls."""

from megarl.compat.functions import apply_kl_penalty, compute_advantage
from megarl.compat.pools import ActorRolloutWorker, CriticWorker, RefPolicyWorker
from megarl.compat.trainer import RayPPOTrainer
from megarl.compat.worker_group import RayWorkerGroup

__all__ = [
    "ActorRolloutWorker",
    "CriticWorker",
    "RayPPOTrainer",
    "RayWorkerGroup",
    "RefPolicyWorker",
    "apply_kl_penalty",
    "compute_advantage",
]
