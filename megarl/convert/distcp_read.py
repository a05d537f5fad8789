"""Reading a Megatron distributed checkpoint box by box, in one process, by torch's public reader. Nothing in it is run."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from megarl.errors import CheckpointError, explain
from megarl.weights.regions import Box, as_slices, box_shape, carry, intersect, whole

METADATA = ".metadata"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Box, ...]


class Reader:
    """The tensors of a Megatron distributed checkpoint."""

    def __init__(self, directory: Path):
        """Read the table of contents. Raises CheckpointError where there is none, or a damaged one."""
        self.directory = directory
        self.tensors, self.stored = read_contents(directory)
        self._files = FileSystemReader(directory)
        self._files.set_up_storage_reader(Metadata({}, storage_data=self.stored), is_coordinator=True)
        self._by_place: dict[tuple[str, int], dict[tuple[int, ...], list[Box]]] = {}

    def chunks(self, key: str, box: Box, leading: int) -> list[Box]:
        """The chunks of tensor ``key`` that meet ``box``, whose first ``leading`` dimensions are one element each."""
        where = (key, leading)
        if where not in self._by_place:
            places: dict[tuple[int, ...], list[Box]] = defaultdict(list)
            stored = self.tensors[key]
            for chunk in stored.chunks:
                inside = intersect(chunk, whole(stored.shape))  # a damaged one may lead far out of it
                for place in _places(inside[:leading]) if inside is not None else ():
                    places[place].append(chunk)
            self._by_place[where] = places
        found = self._by_place[where].get(tuple(start for start, _ in box[:leading]), [])
        return [chunk for chunk in found if intersect(chunk, box) is not None]

    def file_of(self, key: str, chunk: Box) -> str | None:
        """The file that holds a chunk of tensor ``key``; None where the table of contents names none."""
        found = self.stored.get(MetadataIndex(key, torch.Size([start for start, _ in chunk])))
        return None if found is None else found.relative_path

    def read(self, key: str, box: Box, chunks: Sequence[Box], out: torch.Tensor) -> None:
        """Fill ``out`` with ``box`` of tensor ``key`` from ``chunks``, each read once; numbers are cast to out's dtype."""
        items = []
        for chunk in chunks:
            common = intersect(chunk, box)
            if common is None:
                continue
            into = carry(common, box, tuple((0, stop - start) for start, stop in box))
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(key),
                    dest_offsets=torch.Size([start for start, _ in into]),
                    storage_index=MetadataIndex(key, torch.Size([start for start, _ in chunk])),
                    storage_offsets=torch.Size([c[0] - o[0] for c, o in zip(common, chunk, strict=True)]),
                    lengths=torch.Size(box_shape(common)),
                )
            )
        try:
            self._files.read_data(LoadPlan(items), _Into(out)).wait()
        except Exception as error:  # damaged bytes have torch's loader raise anything
            raise CheckpointError(
                explain(
                    "a tensor of the checkpoint can't be read",
                    where=f"{key} in {self.directory}",
                    got=str(error).splitlines()[0] if str(error) else type(error).__name__,
                    do="copy the checkpoint again, or take another one",
                )
            ) from error


class _Into(LoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, out: torch.Tensor):
        self._out = out

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        box = tuple((start, start + length) for start, length in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return self._out[as_slices(box)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the tensor is a view of ours."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError("only tensors are asked for")

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the plan is made by Reader.read")

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError("the plan is made by Reader.read")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError("the plan is made by Reader.read")

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError("the plan is made by Reader.read")


def _places(leading: Box) -> Iterator[tuple[int, ...]]:
    if not leading:
        yield ()
        return
    for first in range(*leading[0]):
        for rest in _places(leading[1:]):
            yield (first, *rest)


def read_contents(directory: Path) -> tuple[dict[str, StoredTensor], dict[MetadataIndex, Any]]:
    """The tensors of a checkpoint, and where each chunk is: torch's own records, whose fields were looked at.

    The table of contents is a pickle: only plain records of torch's own are made from it, nothing is run. Raises CheckpointError where it
    is missing, damaged, or asks for anything else.
    """
    path = directory / METADATA
    try:
        data = path.read_bytes()
        _check_opcodes(data)
        found = _Plain(io.BytesIO(data)).load()
        return _contents(found)
    except (FileNotFoundError, NotADirectoryError) as error:
        there = "" if directory.is_dir() else "a file" if directory.exists() else "no such directory"
        raise CheckpointError(
            explain(
                "no Megatron distributed checkpoint here",
                where=str(directory),
                got=there or None,
                expected=f"{METADATA} and *.distcp files",
                do="name the directory that holds them, as RUN/checkpoints/step_N/actor",
            )
        ) from error
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            explain(
                "the checkpoint's table of contents is damaged",
                where=str(path),
                got=f"{type(error).__name__}: {error}",
                do="copy the checkpoint again",
            )
        ) from error


def _contents(found: Any) -> tuple[dict[str, StoredTensor], dict[MetadataIndex, Any]]:
    """What :func:`read_contents` returns. All that is taken from the records goes through here: a damaged pickle may put anything there.

    Raises any error for a field that isn't what it should be.
    """
    if not isinstance(found, Metadata):
        raise ValueError(f"not a table of contents but {type(found).__name__}")
    tensors = {}
    for key, meta in found.state_dict_metadata.items():
        if not isinstance(key, str):
            raise ValueError(f"not a name: {key!r}")
        if isinstance(meta, TensorStorageMetadata):
            tensors[key] = _stored_tensor(key, meta)
    for index, info in found.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(index.fqn, str):
            raise ValueError(f"not a place of a tensor: {index!r}")
        if index.offset is not None:
            _numbers(index.offset, f"offset of {index.fqn}")
        _numbers((info.offset, info.length), f"place of {index.fqn}")
        _check_file(info.relative_path, index.fqn)
        if info.transform_descriptors:
            raise ValueError(f"{index.fqn} is stored by {info.transform_descriptors!r}, which this megarl doesn't undo")
    return tensors, dict(found.storage_data)


def _stored_tensor(key: str, meta: TensorStorageMetadata) -> StoredTensor:
    shape, dtype = _numbers(meta.size, f"shape of {key}"), meta.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype of {key}: {dtype!r}")
    chunks = []
    for chunk in meta.chunks:
        first, sizes = _numbers(chunk.offsets, f"a chunk of {key}"), _numbers(chunk.sizes, f"a chunk of {key}")
        if not isinstance(chunk, ChunkStorageMetadata) or not len(first) == len(sizes) == len(shape):
            raise ValueError(f"a chunk of {key}, of shape {shape}: {chunk!r}")
        chunks.append(tuple((start, start + size) for start, size in zip(first, sizes, strict=True)))
    return StoredTensor(shape, dtype, tuple(chunks))


def _numbers(values: Any, what: str) -> tuple[int, ...]:
    """Sizes or offsets, none of them negative."""
    if not isinstance(values, (tuple, list)) or any(type(value) is not int or value < 0 for value in values) or prod(values) >= 1 << 63:
        raise ValueError(f"{what}: {values!r}")
    return tuple(values)


def _check_file(name: Any, key: str) -> None:
    """Raise ValueError unless a file lies below the checkpoint."""
    place = PurePosixPath(name) if isinstance(name, str) and name and "\0" not in name else None
    if place is None or place.is_absolute() or ".." in place.parts:
        raise ValueError(f"{key} would be read from {name!r}, which is no file of the checkpoint")


_RECORDS = {
    "torch": {"Size", *(str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    },
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class _Plain(pickle.Unpickler):
    """Makes records of the listed classes alone."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no record of a checkpoint")


_ARGUMENTS = {ord(opcode.code): opcode.arg.n if opcode.arg else 0 for opcode in pickletools.opcodes}
_PREFIXES = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4, pickletools.TAKEN_FROM_ARGUMENT4U: 4,
             pickletools.TAKEN_FROM_ARGUMENT8U: 8}  # fmt: skip
_LONG_PUT, _PUT, _STOP = (ord(code) for code in "rp.")
_TWO_LINES = b"ic"


def _check_opcodes(data: bytes) -> None:
    """Raise ValueError for a pickle that would number its memo beyond its own length: the loader takes memory for every number below."""
    at, end = 0, len(data)
    while at < end:
        opcode = data[at]
        length = _ARGUMENTS.get(opcode)
        if length is None:
            raise ValueError(f"no pickle from byte {at} on")
        at += 1
        if length == pickletools.UP_TO_NEWLINE:
            stop = data.find(b"\n", at) + 1
            if stop == 0 or (opcode == _PUT and (not data[at : stop - 1].isdigit() or int(data[at : stop - 1]) > end)):
                raise ValueError(f"no pickle from byte {at} on")
            if opcode in _TWO_LINES:
                stop = data.find(b"\n", stop) + 1 or end
            at = stop
        elif length < 0:
            size = _PREFIXES[length]
            at += size + int.from_bytes(data[at : at + size], "little")
        else:
            if opcode == _LONG_PUT and int.from_bytes(data[at : at + 4], "little") > end:
                raise ValueError(f"no pickle from byte {at} on")
            at += length
        if opcode == _STOP:
            return
    raise EOFError("it breaks off")
