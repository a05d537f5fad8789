"""Safetensors files in the making: laid out at full size first, then filled by plain writes in any order."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megarl.config.model_checks import INDEX, WEIGHTS
from megarl.convert.memory import WRITE_BYTES, start_writing
from megarl.convert.source import CODE_OF, Entry, as_bytes, runs
from megarl.weights.regions import Region, box_shape

PART = ".part"  # behind a file's name until the whole directory is done


@dataclass(frozen=True)
class Laid:
    """Files of a directory: where each tensor will be."""

    entries: Mapping[str, Entry]
    headers: Mapping[str, bytes]  # file -> its first bytes
    sizes: Mapping[str, int]  # file -> bytes

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def lay_out(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], shard_bytes: int) -> Laid:
    """Deal tensors in order to files of at most ``shard_bytes``, unless one tensor is larger, under the names that transformers gives."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtypes[name].itemsize
        if groups[-1] and used + size > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    entries, headers, sizes = {}, {}, {}
    for i, group in enumerate(groups, start=1):
        file = WEIGHTS if len(groups) == 1 else f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        header, end = {"__metadata__": {"format": "pt"}}, 0
        # Wider elements first, so that each tensor begins at a multiple of its element's size.
        for name in sorted(group, key=lambda n: -dtypes[n].itemsize):
            begin, end = end, end + prod(shapes[name]) * dtypes[name].itemsize
            header[name] = {"dtype": CODE_OF[dtypes[name]], "shape": list(shapes[name]), "data_offsets": [begin, end]}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        headers[file] = len(encoded).to_bytes(8, "little") + encoded
        sizes[file] = len(headers[file]) + end
        for name in group:
            at = len(headers[file]) + header[name]["data_offsets"][0]
            entries[name] = Entry(file, CODE_OF[dtypes[name]], shapes[name], at)
    return Laid(entries, headers, sizes)


def index_of(laid: Laid) -> dict | None:
    """Content of the index; None for one file, which needs none."""
    if len(laid.sizes) == 1:
        return None
    weight_map = {name: entry.file for name, entry in laid.entries.items()}
    return {"metadata": {"total_size": sum(entry.nbytes for entry in laid.entries.values())}, "weight_map": weight_map}


class HfWriter:
    """Fills the files of a directory; a context manager, which closes them."""

    def __init__(self, directory: Path, laid: Laid):
        self.directory, self._laid = directory, laid
        self._files = ExitStack()
        self._open: dict[str, int] = {}
        self._dirty: set[str] = set()

    def __enter__(self) -> HfWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def create(self) -> None:
        """Make the files at full size, with their headers, where they aren't there."""
        for file, size in self._laid.sizes.items():
            path = self.path(file)
            with _named(str(path)), open(path, "r+b" if path.exists() else "x+b", buffering=0) as stream:
                os.posix_fallocate(stream.fileno(), 0, size)  # a full disk is known now
                stream.write(self._laid.headers[file])

    def laid_out(self) -> bool:
        """Whether all files are there, at full size."""
        return all(self.path(f).is_file() and self.path(f).stat().st_size == size for f, size in self._laid.sizes.items())

    def path(self, file: str) -> Path:
        """A file of the directory: under the name that it has while it is filled, unless it has its own already."""
        named = self.directory / file
        return named if named.exists() else self.directory / (file + PART)

    def write(self, region: Region, numbers: torch.Tensor) -> None:
        """Write a box of a tensor; numbers are cast to the file's dtype."""
        entry = self._laid.entries[region.name]
        numbers = numbers.to(_dtype(entry)).reshape(box_shape(region.box))
        for part, first, _count in runs(region.box, entry.shape):
            view, done = memoryview(as_bytes(numbers[part].contiguous())), 0
            at, file = entry.offset + first * numbers.element_size(), self._descriptor(entry.file)
            with _named(f"{self.path(entry.file)}, {region.name}"):
                while done < len(view):
                    done += os.pwrite(file, view[done : done + WRITE_BYTES], at + done)
            start_writing(file, at, done)

    def flush(self) -> None:
        """Return when what was written is on disk."""
        for file in self._dirty:
            with _named(str(self.path(file))):
                os.fsync(self._open[file])
        self._dirty.clear()

    def finish(self) -> None:
        """Give the files their names."""
        for file in self._laid.sizes:
            os.rename(self.path(file), self.directory / file)

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            self._open[file] = os.open(self.path(file), os.O_RDWR)
            self._files.callback(os.close, self._open[file])
        self._dirty.add(file)
        return self._open[file]


@contextmanager
def _named(file: str) -> Iterator[None]:
    """Say in an OSError which file it was, and which tensor: the kernel doesn't."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, file) from error


def _dtype(entry: Entry) -> torch.dtype:
    return next(dtype for dtype, code in CODE_OF.items() if code == entry.code)


def write_index(directory: Path, laid: Laid) -> None:
    """Write the index, where the directory needs one."""
    if (index := index_of(laid)) is not None:
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
