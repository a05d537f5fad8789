"""The tensors of a Hugging Face directory, region by region: whatever form they are stored in, as the weight table names them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarl.config.safetensors_header import Entry
from megarl.errors import ModelError, explain
from megarl.weights import fp8
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.hf_headers import Headers
from megarl.weights.hf_stored import Forms, locate, other_forms, tensor_problems
from megarl.weights.numbers import check_finite
from megarl.weights.regions import Region, as_slices, box_shape


class HfReader:
    """The safetensors of one directory; each file is mapped once, and pages that nobody asks for stay on disk.

    Two forms are read as if they were the table's: experts stacked in one tensor a layer, and weights in blocks of fp8.
    """

    def __init__(self, directory: str | Path, files: ExitStack):
        self.directory = Path(directory)
        self._files = files
        self._open: dict[str, safe_open] = {}
        self._headers = Headers(self.directory)

    @cached_property
    def _hf_config(self) -> dict:
        return read_hf_config(self.directory)

    @cached_property
    def _forms(self) -> Forms:
        # Of either head: only the edges of the table depend on it.
        return other_forms(model_family(self._hf_config), self._hf_config, "lm", self._headers.file_of, self.directory)

    def has(self, name: str) -> bool:
        """Whether the directory has the tensor, in whatever form."""
        return name in self._headers.file_of or name in self._forms

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
        name, shape = tensor.name, box_shape(tensor.box)
        if tensor.name in self._forms:
            (name, _), shape = self._forms[tensor.name]
        for problem in tensor_problems(name, shape, self._entry, self._hf_config, self.directory):
            raise problem

    def _entry(self, name: str) -> Entry | None:
        return self._headers.entry(name) if name in self._headers.file_of else None

    def read(self, region: Region) -> torch.Tensor:
        """The elements of ``region`` alone, in the file's dtype; float32 for fp8. Raises ModelError for one that is not finite."""
        where = locate(region, self._forms)
        numbers = self._slice(where.name)[as_slices(where.box)]
        if numbers.dtype is torch.float8_e4m3fn:
            block = fp8.block_size(self._hf_config)
            assert block is not None, "check() was called before"
            scales = fp8.scales_region(where, block)
            numbers = fp8.dequantize(numbers, self._slice(scales.name)[as_slices(scales.box)], where.box, block)
        check_finite(numbers, region.name, str(self.directory / self._headers.file_of[where.name]))
        return numbers.reshape(box_shape(region.box))

    def _slice(self, name: str) -> safe_open:
        return self._handle(self._headers.entry(name).file).get_slice(name)

    def _handle(self, file: str) -> safe_open:
        if file not in self._open:
            path = self.directory / file
            try:
                self._open[file] = self._files.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ModelError(
                    explain("not a whole safetensors file", where=str(path), got=error, do="copy the model directory again")
                ) from error
        return self._open[file]
