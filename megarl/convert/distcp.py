"""Writing a Megatron distributed checkpoint piece by piece, in one process, by torch's public writer; a planner says what each piece is."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from megarl.convert.memory import WRITE_BYTES, Memory, start_writing
from megarl.weights.regions import Box, box_shape


@dataclass(frozen=True)
class Piece:
    """One box of a tensor of the checkpoint, written at once."""

    key: str
    box: Box
    global_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(box_shape(self.box)) * self.dtype.itemsize


class Writer(FileSystemWriter):
    """Writes pieces of a checkpoint, one file a call, into ``directory``, of a checkpoint that will be called ``name``."""

    def __init__(self, directory: Path, name: str):
        # Reading ahead is for tensors on a GPU; without it pieces are made one by one, as they are written.
        super().__init__(directory, single_file_per_rank=True, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
        self.fs = self._streams = _NotingFileSystem()
        self._name = name

    def storage_meta(self) -> StorageMeta:
        """Where the checkpoint will be, and not where it is being written."""
        return StorageMeta(checkpoint_id=self._name, save_id=self.save_id)

    def write(self, prefix: str, pieces: Sequence[Piece], fill: Callable[[int, torch.Tensor], None]) -> list[WriteResult]:
        """Write ``pieces`` end to end into the file ``<prefix>0.distcp``, durably. ``fill(i, tensor)`` puts piece i into a tensor.

        Raises OSError, whose file name also says which tensor it was, for what the disk refuses.
        """
        items = [_write_item(i, piece) for i, piece in enumerate(pieces)]
        plan, filler = SavePlan(items=items, storage_data=_prefix(prefix)), _Filler(pieces, fill)
        self._streams.refused = None
        try:
            with _without_checksums():
                return self.write_data(plan, filler).wait()
        except (OSError, RuntimeError) as error:
            refused = self._streams.refused  # torch.save says something else of it
            if refused is None:
                raise
            where = f"{self.path / prefix}0.distcp, {filler.current}"
            raise OSError(refused.errno, refused.strerror, where) from error


class _NotingFileSystem(FileSystem):
    """Keeps what the disk refused, which is lost on its way through torch.save; starts writing early."""

    def __init__(self) -> None:
        self.refused: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            yield _NotingStream(stream, self) if "w" in mode else stream  # type: ignore[misc]


class _NotingStream:
    """What the writer needs of a file."""

    def __init__(self, stream: io.IOBase, owner: _NotingFileSystem):
        self._stream, self._owner, self._started = stream, owner, 0  # bytes that the kernel was told to write
        self.tell, self.fileno, self.close = stream.tell, stream.fileno, stream.close

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), WRITE_BYTES):
            self._noting(self._stream.write, view[start : start + WRITE_BYTES])
        return len(view)

    def flush(self) -> None:
        self._noting(self._stream.flush)
        end = self.tell()
        start_writing(self.fileno(), self._started, end - self._started)
        self._started = end

    def _noting(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except OSError as error:
            self._owner.refused = error
            raise


def _prefix(prefix: str) -> Any:
    from torch.distributed.checkpoint.filesystem import _StoragePrefix  # what write_data expects; torch gives it no public name

    return _StoragePrefix(prefix)


@contextmanager
def _without_checksums() -> Iterator[None]:
    """torch.save without a CRC32 of each tensor: nobody reads it, and computing it takes as long as writing."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _write_item(number: int, piece: Piece) -> WriteItem:
    offsets = torch.Size([start for start, _ in piece.box])
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box_shape(piece.box)))
    return WriteItem(
        index=MetadataIndex(piece.key, offsets, number),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=piece.dtype), size=torch.Size(piece.global_shape)),
    )


class _Filler(SavePlanner):
    """Gives the writer one piece at a time, in memory that the next piece of its size uses again.

    The writer is done with a piece when it asks for another one, but refers to it until its file is done.
    """

    def __init__(self, pieces: Sequence[Piece], fill: Callable[[int, torch.Tensor], None]):
        self._pieces, self._fill, self._memory = pieces, fill, Memory()
        self.current = ""  # key of the piece that is being written

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        piece = self._pieces[write_item.index.index]
        self.current = piece.key
        tensor = self._memory.tensor(box_shape(piece.box), piece.dtype)
        self._fill(write_item.index.index, tensor)
        return tensor

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the plan is made by Writer.write")

    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError("the plan is made by Writer.write")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise NotImplementedError("the plan is made by Writer.write")

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise NotImplementedError("the plan is made by Writer.write")


def metadata_of(pieces: Sequence[Piece]) -> Metadata:
    """The checkpoint's table of contents, for :meth:`Writer.finish`, which adds where each piece is."""
    tensors: dict[str, TensorStorageMetadata] = {}
    for piece in pieces:
        if piece.key not in tensors:
            tensors[piece.key] = TensorStorageMetadata(TensorProperties(dtype=piece.dtype), torch.Size(piece.global_shape), [])
        chunk = ChunkStorageMetadata(torch.Size([start for start, _ in piece.box]), torch.Size(box_shape(piece.box)))
        tensors[piece.key].chunks.append(chunk)
    return Metadata(state_dict_metadata=dict(tensors))
