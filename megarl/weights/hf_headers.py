"""Which tensor of a Hugging Face directory is in which file, and where in it: by the index and the files' headers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megarl.config.model_checks import INDEX, WEIGHTS, read_index, weight_files
from megarl.config.safetensors_header import Entry, read_header
from megarl.errors import ModelError, explain


class Headers:
    """The entries of a directory; the header of a file is read when one of its tensors is asked for."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._read: dict[str, dict[str, Entry]] = {}

    @cached_property
    def file_of(self) -> dict[str, str]:
        """Tensor name -> file name. Raises ModelError for a damaged index, or a damaged single file."""
        if (self.directory / INDEX).is_file():
            return read_index(self.directory / INDEX)
        return dict.fromkeys(self.of_file(WEIGHTS), WEIGHTS)

    def of_file(self, file: str) -> dict[str, Entry]:
        """All entries of one file. Raises ModelError where it is missing or damaged."""
        if file not in self._read:
            path = self.directory / file
            try:
                self._read[file] = read_header(path)
            except (FileNotFoundError, IsADirectoryError) as error:
                raise ModelError(
                    explain("a weight file is missing", where=str(path), do="check that the model directory is complete")
                ) from error
            except OSError as error:
                raise unreadable(path, error) from error
        return self._read[file]

    def entry(self, tensor: str) -> Entry:
        """The entry of a tensor that the index names. Raises ModelError where the file lacks it."""
        file = self.file_of[tensor]
        found = self.of_file(file)
        if tensor not in found:
            raise _not_there(self.directory / file, tensor, len(found))
        return found[tensor]


@dataclass
class Scan:
    """What a whole directory holds, and what is wrong with it."""

    files: dict[str, int] = field(default_factory=dict)  # file -> bytes
    entries: dict[str, Entry] = field(default_factory=dict)
    unlisted: list[tuple[str, str]] = field(default_factory=list)  # (tensor, file): it is there, and the index doesn't say so
    problems: list[ModelError] = field(default_factory=list)


def scan(directory: Path) -> Scan:
    """Read index and headers. Problems are collected, so that a user sees all of them."""
    found, headers = Scan(), Headers(directory)
    try:
        names, listed = weight_files(directory), read_index(directory / INDEX) if (directory / INDEX).is_file() else None
    except (ModelError, OSError) as error:
        found.problems.append(error if isinstance(error, ModelError) else unreadable(directory, error))
        return found
    for file in names:
        try:
            entries = headers.of_file(file)
        except ModelError as error:
            found.problems.append(error)
            continue
        found.files[file] = (directory / file).stat().st_size
        for tensor, entry in entries.items():
            if listed is None or listed.get(tensor) == file:
                found.entries[tensor] = entry
            else:
                found.unlisted.append((tensor, file))
        missing = [tensor for tensor, place in (listed or {}).items() if place == file and tensor not in entries]
        found.problems += [_not_there(directory / file, tensor, len(entries)) for tensor in missing]
    return found


def unreadable(path: Path, error: OSError) -> ModelError:
    """The error of a file or directory that may not be read."""
    return ModelError(explain("a model can't be read", where=str(path), got=error, do="mend its permissions, or copy it again"))


def _not_there(path: Path, tensor: str, others: int) -> ModelError:
    return ModelError(
        explain(
            "a tensor is not in the file that the index names",
            where=str(path),
            got=f"{others} other tensors",
            expected=tensor,
            do="copy the model directory again",
        )
    )
