"""What megatron-core lacks on a machine without CUDA, in one place.

megatron-core names ``torch.cuda`` where it means "the device of this rank". :func:`install` makes those names mean the CPU; it does
nothing where CUDA exists, and nothing of megatron-core is copied. Each entry was found by leaving it out; the reason stands beside it.
"""

from __future__ import annotations

import contextlib
import queue
from typing import Any

import megatron.core
import torch
from torch.overrides import TorchFunctionMode

from megarl.device import on_gpu

TESTED_VERSIONS = ("0.16.1", "0.19.2")

_CPU = torch.device("cpu")
_installed = False


class CudaMeansCpu(TorchFunctionMode):
    """Inside it ``device="cuda"``, ``.cuda()`` and CUDA type names mean the CPU, and memory is not pinned.

    A mode and not a patch, since it must reach tensor methods. It costs a Python call per operation, so that it is entered only around
    building the model, megatron-core's schedules, the optimizer's step and checkpoints.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(a) else a for a in args)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)  # gradient clipping and optimizers compare type names
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def on_compute_device() -> contextlib.AbstractContextManager[Any]:
    """Return what megatron-core's calls that name CUDA run in: :class:`CudaMeansCpu` on a CPU, nothing on a GPU."""
    return contextlib.nullcontext() if on_gpu() else CudaMeansCpu()


def check_version() -> str | None:
    """Return a warning when this megatron-core was never tested with megarl, else None."""
    # An environment inside a git repository gets that repository's commit appended by 0.19: "0.19.2+1a2b3c4".
    version = megatron.core.__version__.partition("+")[0]
    if version in TESTED_VERSIONS:
        return None
    return f"megatron-core {version} is untested with megarl (tested: {', '.join(TESTED_VERSIONS)}); numbers may differ"


def install() -> None:
    """Make megatron-core usable on a CPU; call once per process, before building a model. No-op where CUDA exists."""
    global _installed  # noqa: PLW0603 - the patched names are global to the process as well
    _name_missing_gemm()
    _name_missing_layers()
    if on_gpu() or _installed:
        return
    _installed = True
    torch.cuda.current_device = lambda: _CPU  # every buffer and parameter is created on "the current device"
    torch.cuda.synchronize = lambda device=None: None  # batched pipeline point-to-point waits for the device
    torch.cuda.current_stream = lambda device=None: _NullStream()
    torch.cuda.Stream = _NullStream  # type: ignore[misc,assignment]
    torch.cuda.Event = _NullEvent  # type: ignore[misc,assignment]
    _use_plain_results_queue()
    _split_sizes_on_the_cpu()
    _unequal_parts()


class _NullStream:
    """A CPU has one stream, and work on it is done when it returns."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> "_NullStream":
        return self

    def __exit__(self, *exc: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> "_NullEvent":
        return _NullEvent()

    def synchronize(self) -> None:
        pass


class _NullEvent(_NullStream):
    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True


def _name_missing_gemm() -> None:
    """The router asks whether Transformer Engine's matrix product is None, and 0.16 gives it no name where that isn't installed."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _name_missing_layers() -> None:
    """Latent attention asks whether its layers are Transformer Engine's, for which 0.16 has stand-ins where that isn't installed."""
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def _split_sizes_on_the_cpu() -> None:
    """Experts' all-to-all takes its split sizes as numpy arrays, into which megatron-core turns them only where they come from a GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def _unequal_parts() -> None:
    """gloo gathers and scatters equal parts alone, and experts that are cut themselves hold unequal numbers of tokens."""
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        filled = input_.new_zeros(max(sizes), *input_.shape[1:])
        filled[: len(input_)] = input_
        parts = [torch.empty_like(filled) for _ in sizes]
        torch.distributed.all_gather(parts, filled, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_parts(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_parts, reduce_parts


def _use_plain_results_queue() -> None:
    """The checkpoint writer takes its results queue from a multiprocessing manager: another process, 15 s for the first save."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue = queue.Queue()
    for name in ("get_write_results_queue", "_get_write_results_queue"):  # public since 0.19; private in 0.16
        if hasattr(filesystem_async, name):
            setattr(filesystem_async, name, lambda mp_mode="spawn": results)
