"""Parameters of one process opened by another on the same GPU, where they lie (CUDA IPC): nothing is copied to hand them over.

What travels are plain fields, so that no process unpickles what another made. The buffers are those that the trainer computes with:
Megatron's parameter buffer under the distributed optimizer, else one that :func:`in_one_buffer` made.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from megarl.device import device_id, device_of_id
from megarl.errors import SyncError, explain
from megarl.weights.dtypes import DTYPE_NAMES, DTYPES

ALIGNMENT = 256  # bytes; what cudaMalloc gives, and more than any vector load wants


def in_one_buffer(specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> dict[str, torch.Tensor]:
    """Uninitialised tensors of ``name -> (shape, dtype)``, end to end in one allocation: one handle opens them all."""
    offsets, end = {}, 0  # bytes
    for name, (shape, dtype) in specs.items():
        offsets[name] = end
        end += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    flat = torch.empty(end, dtype=torch.uint8, device=device)
    return {
        name: flat[offsets[name] : offsets[name] + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for name, (shape, dtype) in specs.items()
    }


def export_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What :func:`open_exported` needs, as plain fields: handles of the buffers, and where in them each tensor lies.

    For one process to open once; it may keep the buffers open, and sees what is written into them from then on.
    """
    buffers: dict[int, tuple[Any, ...]] = {}
    table: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise SyncError(explain("a parameter is not contiguous", where=name, got=f"strides {tensor.stride()}"))
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        if where not in buffers:
            # (device number, handle, bytes, offset in the allocation, reference counter, its offset, event, whether to wait for it)
            buffers[where] = tuple(storage._share_cuda_())
        table[name] = {
            "buffer": list(buffers).index(where),
            "offset": tensor.storage_offset() * tensor.element_size(),
            "shape": list(tensor.shape),
            "dtype": DTYPE_NAMES[tensor.dtype],
        }
    return {"kind": "cuda", "token": uuid.uuid4().hex, "device": device_id(), "buffers": list(buffers.values()), "tensors": table}


def open_exported(manifest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Another process's tensors; read them only, they are its live parameters. They stay open while a tensor of them lives.

    Raises SyncError when they lie on a GPU that this process doesn't see.
    """
    device = device_of_id(manifest["device"])
    if device is None:
        raise SyncError(
            explain(
                "the parameters of a training process lie on another GPU",
                where="weights from trainer to engine",
                got=manifest["device"],
                expected=device_id(),
                do="set cluster.placement to colocated, with as many engine ranks as training ranks",
            )
        )
    flats = [_open_buffer(fields, device) for fields in manifest["buffers"]]
    opened = {}
    for name, entry in manifest["tensors"].items():
        dtype = DTYPES[entry["dtype"]]
        raw = flats[entry["buffer"]][entry["offset"] : entry["offset"] + prod(entry["shape"]) * dtype.itemsize]
        opened[name] = raw.view(dtype).view(entry["shape"])
    return opened


def _open_buffer(fields: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """The bytes of one buffer. The number by which its owner calls the GPU is replaced by this process's own."""
    torch.cuda.init()
    try:
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *fields[1:])
    except RuntimeError as error:
        raise SyncError(
            explain(
                "the parameters of a training process can't be opened",
                got=str(error).splitlines()[0],
                do="the process died or reloaded its model; restart its group and sync again",
            )
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
