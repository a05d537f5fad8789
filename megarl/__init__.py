"""megarl: RLHF of large language models on Ray, Megatron and vLLM."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Names to use from Python -> where each stands. They are imported when they are first used: `import megarl` itself brings nothing along.
_EXPORTS = {
    "DataProto": "megarl.data.proto",
    "RLHFDataset": "megarl.data.rlhf_dataset",
    "RayResourcePool": "megarl.compat.pools",
    "RayClassWithInitArgs": "megarl.compat.pools",
    "ActorRolloutWorker": "megarl.compat.pools",
    "CriticWorker": "megarl.compat.pools",
    "RefPolicyWorker": "megarl.compat.pools",
    "RayWorkerGroup": "megarl.compat.worker_group",
    "RayPPOTrainer": "megarl.compat.trainer",
    "compute_advantage": "megarl.compat.functions",
    "apply_kl_penalty": "megarl.compat.functions",
    "AdaptiveKLController": "megarl.compat.kl_controller",
}

__all__ = [
    "ActorRolloutWorker",
    "AdaptiveKLController",
    "CriticWorker",
    "DataProto",
    "RLHFDataset",
    "RayClassWithInitArgs",
    "RayPPOTrainer",
    "RayResourcePool",
    "RayWorkerGroup",
    "RefPolicyWorker",
    "__version__",
    "apply_kl_penalty",
    "compute_advantage",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'megarl' has no attribute '{name}'")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
