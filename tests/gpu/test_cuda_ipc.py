"""Parameters opened by another process on the GPU are those bytes, and stay those while their owner changes them."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from megarl.device import device_id
from megarl.errors import SyncError
from megarl.weights.cuda_ipc import export_tensors, in_one_buffer, open_exported

SPECS = {
    "odd": ((3, 5, 7), torch.bfloat16),
    "one": ((1,), torch.float32),
    "large": ((4099, 1021), torch.bfloat16),
}


def own(pipe: Any) -> None:
    """The trainer: two buffers, one of them of several tensors. Answers each message with the bytes that the tensors hold."""
    tensors = in_one_buffer(SPECS, torch.device("cuda", 0)) | {"alone": torch.empty(129, 3, device="cuda")}
    manifest = export_tensors(tensors)
    pipe.send(manifest)
    while (seed := pipe.recv()) is not None:
        torch.manual_seed(seed)
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape))
        torch.cuda.synchronize()
        pipe.send({name: bytes_of(tensor) for name, tensor in tensors.items()})


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def test_two_processes() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    owner = context.Process(target=own, args=(there,), daemon=True)
    owner.start()
    try:
        assert here.poll(60)
        manifest = here.recv()
        assert plain(manifest)
        assert len(manifest["buffers"]) == 2
        opened = open_exported(manifest)
        seen = []
        for seed in (1, 2, 3):
            here.send(seed)
            assert here.poll(60)
            expected = here.recv()
            got = {name: bytes_of(tensor) for name, tensor in opened.items()}
            assert got == expected
            seen.append(got["odd"])
        assert len(set(seen)) == 3, "the owner's changes must show"
        del opened
    finally:
        here.send(None)
        owner.join(timeout=20)
        if owner.is_alive():
            owner.kill()


def plain(value: Any) -> bool:
    """Numbers, strings and bytes in dicts, lists and tuples: nothing that has to be unpickled."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(plain(v) for v in value)
    return value is None or isinstance(value, (int, float, str, bytes))


def test_another_gpu_is_refused() -> None:
    manifest = {"kind": "cuda", "device": "GPU 00000000-0000-0000-0000-000000000000", "buffers": [], "tensors": {}}
    with pytest.raises(SyncError, match=f"lie on another GPU(.|\n)*{device_id()}"):
        open_exported(manifest)


def test_a_dead_owner_is_an_error() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    owner = context.Process(target=own, args=(there,), daemon=True)
    owner.start()
    assert here.poll(60)
    manifest = here.recv()
    owner.kill()
    owner.join(timeout=20)
    with pytest.raises(SyncError, match="can't be opened"):
        open_exported(manifest)
