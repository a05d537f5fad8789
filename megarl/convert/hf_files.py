"""Safetensors files in the making: laid out at full size first, then filled by plain writes in any order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from megarl.convert.memory import WRITE_BYTES, start_writing
from megarl.weights.casts import cast
from megarl.weights.hf_layout import Laid
from megarl.weights.hf_source import CODES, as_bytes, runs
from megarl.weights.regions import Region, box_shape

PART = ".part"  # behind a file's name until the whole directory is done


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
        """Write a box of a tensor; numbers are cast to the file's dtype. Raises ModelError for one that has no room in it."""
        entry = self._laid.entries[region.name]
        numbers = cast(numbers, CODES[entry.code], region.name).reshape(box_shape(region.box))
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
