"""The tensors of a Hugging Face directory, region by region: whatever form they are stored in, as the weight table names them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarl.config.model_checks import INDEX as INDEX_FILE
from megarl.config.model_checks import WEIGHTS as SINGLE_FILE
from megarl.config.model_checks import read_index
from megarl.errors import ModelError, explain
from megarl.weights import fp8
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.numbers import NUMBERS, check_finite
from megarl.weights.regions import Region, as_slices, box_shape, carry


class HfReader:
    """The safetensors of one directory; each file is mapped once, and pages that nobody asks for stay on disk.

    Two forms are read as if they were the table's: experts stacked in one tensor a layer, and weights in blocks of fp8.
    """

    def __init__(self, directory: str | Path, files: ExitStack):
        self.directory = Path(directory)
        self._files = files
        self._open: dict[str, safe_open] = {}
        self.file_of = self._index()

    def _index(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self.directory / INDEX_FILE
        if not index.is_file():
            return dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)
        return read_index(index)

    @cached_property
    def _hf_config(self) -> dict:
        return read_hf_config(self.directory)

    @cached_property
    def _stacked(self) -> dict[str, tuple[Region, tuple[int, ...]]]:
        found = model_family(self._hf_config).stacked(self._hf_config)
        return {name: where for name, where in found.items() if where[0].name in self.file_of}

    def has(self, name: str) -> bool:
        """Whether the directory has the tensor, in whatever form."""
        return name in self.file_of or name in self._stacked

    def stored_names(self, name: str) -> tuple[str, ...]:
        """The tensors of the directory in which the table's tensor ``name`` is: itself, or a stacked one; with its factors."""
        where = name if name in self.file_of else self._stacked[name][0].name
        scales = where + fp8.SCALES
        return (where, scales) if scales in self.file_of else (where,)

    def used(self, names: Iterable[str]) -> set[str]:
        """The tensors of the directory in which the table's tensors ``names`` are, as far as it has them."""
        return {stored for name in names if self.has(name) for stored in self.stored_names(name)}

    def check(self, tensor: Region) -> None:
        """Raise ModelError unless the directory has ``tensor``, whole, in this shape, of numbers."""
        if not self.has(tensor.name):
            raise ModelError(
                explain(
                    "a tensor is missing from the model directory",
                    where=str(self.directory),
                    expected=tensor.name,
                    do="check that config.json and the weights belong together",
                )
            )
        if tensor.name in self.file_of:
            name, shape = tensor.name, box_shape(tensor.box)
        else:
            (name, _), shape = self._stacked[tensor.name]
        self._check_stored(name, shape)
        if self.stored_dtype(name) == fp8.STORED:
            self._check_scales(name, shape)

    def _check_stored(self, name: str, expected: tuple[int, ...]) -> None:
        got = tuple(self._slice(name).get_shape())
        if got != expected:
            raise ModelError(
                explain(
                    "a tensor has another shape than config.json says",
                    where=f"{name} in {self.directory / self.file_of[name]}",
                    got=got,
                    expected=expected,
                )
            )
        if (kind := self.stored_dtype(name)) not in (*NUMBERS, fp8.STORED):
            raise ModelError(
                explain(
                    "a tensor is not of plain floating-point numbers",
                    where=f"{name} in {self.directory / self.file_of[name]}",
                    got=kind,
                    expected=", ".join(NUMBERS),
                    do="use the model's unquantized weights",
                )
            )

    def _check_scales(self, name: str, shape: tuple[int, ...]) -> None:
        block = fp8.block_size(self._hf_config)
        if block is None or len(shape) != 2 or name + fp8.SCALES not in self.file_of:
            raise ModelError(
                explain(
                    "a tensor of fp8 without the factors of its blocks",
                    where=f"{name} in {self.directory / self.file_of[name]}",
                    got=f"weight_block_size {block} in config.json",
                    expected=f"{name + fp8.SCALES}, and quantization_config.weight_block_size",
                    do="copy the model directory again, or use the model's unquantized weights",
                )
            )
        self._check_stored(name + fp8.SCALES, fp8.scales_shape(shape, block))

    def stored_dtype(self, name: str) -> str:
        """safetensors' name of the dtype of a stored tensor."""
        return self._slice(name).get_dtype()

    def read(self, region: Region) -> torch.Tensor:
        """The elements of ``region`` alone, in the file's dtype; float32 for fp8. Raises ModelError for one that is not finite."""
        if region.name in self.file_of:
            return self._read_stored(region)
        (name, box), _ = self._stacked[region.name]
        inner = tuple((0, stop - start) for start, stop in box[1:])
        return self._read_stored(Region(name, (box[0], *carry(region.box, inner, box[1:])))).squeeze(0)

    def _read_stored(self, region: Region) -> torch.Tensor:
        file = self.file_of[region.name]
        numbers = self._slice(region.name)[as_slices(region.box)]
        if numbers.dtype is torch.float8_e4m3fn:
            block = fp8.block_size(self._hf_config)
            assert block is not None, "check() was called before"
            scales = fp8.scales_region(region, block)
            numbers = fp8.dequantize(numbers, self._slice(scales.name)[as_slices(scales.box)], region.box, block)
        check_finite(numbers, region.name, str(self.directory / file))
        return numbers

    def _slice(self, name: str) -> safe_open:
        file = self.file_of[name]
        try:
            return self._handle(file).get_slice(name)
        except SafetensorError as error:
            raise ModelError(
                explain("a tensor is not in the file that the index names", where=str(self.directory / file), got=error, expected=name)
            ) from error

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
