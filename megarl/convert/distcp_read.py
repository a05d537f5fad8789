"""Reading a Megatron distributed checkpoint box by box, in one process, by torch's public reader. Nothing in it is run."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from megarl.errors import CheckpointError, explain
from megarl.weights.regions import Box, as_slices, box_shape, carry, intersect

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
        metadata = read_metadata(directory)
        self._files = FileSystemReader(directory)
        self._files.set_up_storage_reader(metadata, is_coordinator=True)
        self.stored = {index: info for index, info in metadata.storage_data.items()}
        self.tensors = {
            key: StoredTensor(tuple(m.size), m.properties.dtype, tuple(_chunk_box(c) for c in m.chunks))
            for key, m in metadata.state_dict_metadata.items()
            if isinstance(m, TensorStorageMetadata)
        }
        self._by_place: dict[tuple[str, int], dict[tuple[int, ...], list[Box]]] = {}

    def chunks(self, key: str, box: Box, leading: int) -> list[Box]:
        """The chunks of tensor ``key`` that meet ``box``, whose first ``leading`` dimensions are one element each."""
        where = (key, leading)
        if where not in self._by_place:
            places: dict[tuple[int, ...], list[Box]] = defaultdict(list)
            for chunk in self.tensors[key].chunks:
                for place in _places(chunk[:leading]):
                    places[place].append(chunk)
            self._by_place[where] = places
        found = self._by_place[where].get(tuple(start for start, _ in box[:leading]), [])
        return [chunk for chunk in found if intersect(chunk, box) is not None]

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
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, AssertionError, KeyError) as error:
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


def _chunk_box(chunk: ChunkStorageMetadata) -> Box:
    return tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _places(leading: Box) -> Iterator[tuple[int, ...]]:
    if not leading:
        yield ()
        return
    for first in range(*leading[0]):
        for rest in _places(leading[1:]):
            yield (first, *rest)


def read_metadata(directory: Path) -> Metadata:
    """The table of contents of a checkpoint. It is a pickle: only plain records of torch's own are made from it, nothing is run.

    Raises CheckpointError where it is missing, damaged, or asks for anything else.
    """
    path = directory / METADATA
    try:
        with open(path, "rb") as file:
            found = _Plain(file).load()
    except FileNotFoundError as error:
        raise CheckpointError(
            explain(
                "no Megatron distributed checkpoint here",
                where=str(directory),
                expected=f"{METADATA} and *.distcp files",
                do="name the directory that holds them, as RUN/checkpoints/step_N/actor",
            )
        ) from error
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError, ImportError) as error:
        raise CheckpointError(
            explain("the checkpoint's table of contents is damaged", where=str(path), got=error, do="copy the checkpoint again")
        ) from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, Mapping):
        raise CheckpointError(explain("the checkpoint's table of contents is of another form", where=str(path), got=type(found).__name__))
    return found


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
