"""Parameters in memory that another process of the same user and host can map: an anonymous file (memfd).

It has no name in any file system, so it vanishes with the last process that maps it and a killed trainer leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from math import prod

import torch

from megarl.errors import SyncError, explain
from megarl.weights.dtypes import DTYPE_NAMES, DTYPES

ALIGNMENT = 64  # bytes; a cache line, and the widest vector load


class SharedParameters:
    """Named tensors, end to end in one memfd of this process."""

    def __init__(self, fd: int, size: int, table: dict[str, dict]):
        self._fd = fd
        self._size = size
        self._table = table
        self.tensors = _views(mmap.mmap(fd, size), table)  # name -> tensor; views of the shared memory

    @classmethod
    def create(cls, specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> "SharedParameters":
        """Memory for tensors of ``name -> (shape, dtype)``, filled with zeros, each at a multiple of 64 bytes."""
        table: dict[str, dict] = {}
        end = 0  # bytes
        for name, (shape, dtype) in specs.items():
            table[name] = {"offset": end, "shape": list(shape), "dtype": DTYPE_NAMES[dtype]}
            end += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        size = max(end, ALIGNMENT)
        fd = os.memfd_create("megarl-parameters")
        os.ftruncate(fd, size)
        return cls(fd, size, table)

    def manifest(self) -> dict:
        """What :func:`open_shared` needs, as plain fields. Valid while this process lives and :meth:`close` wasn't called."""
        status = os.fstat(self._fd)
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return {"kind": "memfd", "path": path, "inode": status.st_ino, "bytes": self._size, "tensors": self._table}

    def close(self) -> None:
        """Let no further process in. The memory goes when the last view of it, here or elsewhere, is dropped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.tensors = {}


def open_shared(manifest: Mapping) -> dict[str, torch.Tensor]:
    """Another process's :class:`SharedParameters` as tensors; read them only, they are its live parameters.

    The memory stays mapped while a view lives. Raises SyncError when the owner is gone or its id is another process by now.
    """
    try:
        fd = os.open(manifest["path"], os.O_RDWR)
    except OSError as error:
        raise SyncError(
            explain(
                "the shared parameters of a training process can't be opened",
                where=manifest["path"],
                got=error,
                do="the process died or runs on another host; restart its group and sync again",
            )
        ) from error
    try:
        status = os.fstat(fd)
        # A process id is used again after its owner's death: the inode tells.
        if (status.st_ino, status.st_size) != (manifest["inode"], manifest["bytes"]):
            raise SyncError(
                explain(
                    "the shared parameters are not those of the manifest",
                    where=manifest["path"],
                    got=f"inode {status.st_ino}, {status.st_size} bytes",
                    expected=f"inode {manifest['inode']}, {manifest['bytes']} bytes",
                )
            )
        memory = mmap.mmap(fd, manifest["bytes"])
    finally:
        os.close(fd)
    return _views(memory, manifest["tensors"])


def _views(memory: mmap.mmap, table: Mapping[str, Mapping]) -> dict[str, torch.Tensor]:
    """Tensors over ``memory``, which they keep alive."""
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    views = {}
    for name, entry in table.items():
        dtype = DTYPES[entry["dtype"]]
        count = prod(entry["shape"])
        raw = flat[entry["offset"] : entry["offset"] + count * dtype.itemsize]
        views[name] = raw.view(dtype).view(entry["shape"])
    return views
