"""Read a Hugging Face directory into the shards of one rank, only the byte ranges that the rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarl.config.model_checks import INDEX as INDEX_FILE
from megarl.config.model_checks import WEIGHTS as SINGLE_FILE
from megarl.config.model_checks import read_index
from megarl.errors import ModelError, explain
from megarl.weights.hf_checks import check_finite
from megarl.weights.regions import Region, as_slices, volume
from megarl.weights.table import ParameterShard

__all__ = ["INDEX_FILE", "SINGLE_FILE", "check_parameters", "load_into", "tensor_files"]


def load_into(params: Mapping[str, torch.Tensor], shards: Mapping[str, ParameterShard], hf_dir: str | Path) -> tuple[str, ...]:
    """Fill ``params`` (name -> the rank's tensor) in place from a directory of safetensors; padding becomes zero.

    Numbers are cast to each parameter's dtype. Returns the parameters whose tensor the directory doesn't have and needn't (a
    value head over a language model): they are left as they are. Raises ModelError that names file and tensor when something
    is missing, has another shape or is not finite.
    """
    check_parameters(params, shards)
    absent = []
    with ExitStack() as files, torch.no_grad():
        reader = _Reader(Path(hf_dir), files)
        for name, shard in shards.items():
            if shard.optional and not all(tensor.name in reader.file_of for tensor in shard.hf_tensors):
                absent.append(name)
                continue
            for tensor in shard.hf_tensors:
                reader.check(tensor)
            parameter = params[name]
            if sum(volume(copy.target.box) for copy in shard.copies) != parameter.numel():
                parameter.zero_()
            for source, target in shard.copies:
                parameter[as_slices(target.box)] = reader.read(source).to(parameter.dtype)
    return tuple(absent)


def tensor_files(hf_dir: str | Path) -> dict[str, str]:
    """Tensor name -> file name of a directory of safetensors. Raises ModelError for none, or a damaged one."""
    with ExitStack() as files:
        return _Reader(Path(hf_dir), files).file_of


def check_parameters(params: Mapping[str, torch.Tensor], shards: Mapping[str, ParameterShard]) -> None:
    """Raise ModelError unless ``params`` are those of ``shards``, name by name and shape by shape."""
    if params.keys() != shards.keys():
        raise ModelError(
            explain(
                "the parameters of the model are not those of its table",
                where="megarl/weights/families",
                got=f"only in the model: {sorted(params.keys() - shards.keys())}",
                expected=f"also in the model: {sorted(shards.keys() - params.keys())}",
            )
        )
    for name, shard in shards.items():
        if tuple(params[name].shape) != shard.shape:
            raise ModelError(
                explain(
                    "a parameter has another shape than its table says", where=name, got=tuple(params[name].shape), expected=shard.shape
                )
            )


class _Reader:
    """The safetensors of one directory; each file is mapped once, and pages that nobody asks for stay on disk."""

    def __init__(self, directory: Path, files: ExitStack):
        self.directory = directory
        self._files = files
        self._open: dict[str, safe_open] = {}
        self.file_of = self._index()

    def _index(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self.directory / INDEX_FILE
        if not index.is_file():
            return dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)
        return read_index(index)

    def _handle(self, file: str) -> safe_open:
        if file not in self._open:
            path = self.directory / file
            if not path.is_file():
                raise ModelError(explain("a weight file is missing", where=str(path), do="check that the model directory is complete"))
            try:
                self._open[file] = self._files.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ModelError(
                    explain("not a safetensors file", where=str(path), got=error, do="copy the model directory again")
                ) from error
        return self._open[file]

    def check(self, tensor: Region) -> None:
        """Raise ModelError unless the directory has ``tensor`` in exactly this shape."""
        if tensor.name not in self.file_of:
            raise ModelError(
                explain(
                    "a tensor is missing from the model directory",
                    where=str(self.directory),
                    expected=tensor.name,
                    do="check that config.json and the weights belong together",
                )
            )
        file = self.file_of[tensor.name]
        try:
            got = tuple(self._handle(file).get_slice(tensor.name).get_shape())
        except SafetensorError as error:
            raise ModelError(
                explain(
                    "a tensor is not in the file that the index names", where=str(self.directory / file), got=error, expected=tensor.name
                )
            ) from error
        expected = tuple(stop for _, stop in tensor.box)
        if got != expected:
            raise ModelError(
                explain(
                    "a tensor has another shape than config.json says",
                    where=f"{tensor.name} in {self.directory / file}",
                    got=got,
                    expected=expected,
                )
            )

    def read(self, region: Region) -> torch.Tensor:
        """The elements of ``region`` alone, in the file's dtype. Raises ModelError for one that is not finite."""
        file = self.file_of[region.name]
        numbers = self._handle(file).get_slice(region.name)[as_slices(region.box)]
        check_finite(numbers, region.name, str(self.directory / file))
        return numbers
