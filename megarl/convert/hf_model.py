"""One model in a Hugging Face directory: checked against its tables, and read as they name its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.config.model_checks import check_model_files
from megarl.config.safetensors_header import Entry
from megarl.convert.targets import ModelPlan, head_of, plan_model
from megarl.errors import ModelError
from megarl.weights import fp8
from megarl.weights.casts import cast
from megarl.weights.dtypes import DTYPE_NAMES, DTYPES
from megarl.weights.families import read_hf_config
from megarl.weights.hf_headers import Scan
from megarl.weights.hf_source import CODES, Files
from megarl.weights.hf_stored import StoredModel, locate
from megarl.weights.hf_stored import examine as examine_files
from megarl.weights.model_record import ModelRecord
from megarl.weights.regions import Region, box_shape


@dataclass(frozen=True)
class HfModel:
    """A whole Hugging Face directory."""

    directory: Path
    plan: ModelPlan
    files: StoredModel

    @property
    def scan(self) -> Scan:
        """What the files hold, and what is wrong with them."""
        return self.files.scan

    @property
    def dropped(self) -> Mapping[str, str]:
        """Stored tensor -> why it is left out."""
        return self.files.dropped

    def stored(self, region: Region) -> Region:
        """Where a box of the table's tensor is in the files; perhaps with one dimension of length 1 more in front."""
        return locate(region, self.files.forms)

    def entry(self, tensor: str) -> Entry | None:
        """The stored tensor that holds the table's ``tensor``; None where there is none."""
        return self.files.entry(tensor)

    def dtype(self, tensor: str) -> torch.dtype:
        """The dtype of the table's ``tensor``: the stored one, or what fp8 is dequantised to."""
        entry = self.entry(tensor)
        assert entry is not None, "open_hf_model found every tensor"
        return CODES[entry.code] if entry.code != fp8.STORED else _unquantized(self.plan.hf_config)

    def read_into(self, files: Files, region: Region, out: torch.Tensor) -> None:
        """Fill ``out``, of the region's shape; numbers are cast to its dtype, without loss where it was chosen by :meth:`dtype`.

        Raises ModelError for a number that has no room in it.
        """
        where = self.stored(region)
        code = self.scan.entries[where.name].code
        if CODES[code] is out.dtype:
            files.read_into(where, out.view(box_shape(where.box)))
            return
        named = f"{region.name} in {self.directory}"
        numbers = torch.empty(box_shape(where.box), dtype=CODES[code])
        files.read_into(where, numbers)
        if code == fp8.STORED:
            block = fp8.block_size(self.plan.hf_config)
            assert block is not None, "open_hf_model checked it"
            scales_at = fp8.scales_region(where, block)
            scales = torch.empty(box_shape(scales_at.box), dtype=CODES[self.scan.entries[scales_at.name].code])
            files.read_into(scales_at, scales)
            numbers = cast(fp8.dequantize(numbers, scales, where.box, block), _unquantized(self.plan.hf_config), named)
        out.copy_(cast(numbers, out.dtype, named).view(out.shape))

    def record(self) -> ModelRecord:
        """What ``model.json`` says of it."""
        dtypes = {name: DTYPE_NAMES[self.dtype(name)] for name in self.plan.shapes}
        most = Counter(dtypes.values()).most_common(1)[0][0]
        config = {key: value for key, value in self.plan.hf_config.items() if key != "quantization_config"}
        return ModelRecord(config, self.plan.head, most, {name: dtype for name, dtype in dtypes.items() if dtype != most})


def open_hf_model(directory: Path) -> HfModel:
    """Read the headers of a directory, and check all that can be known from them.

    Raises ModelError that names file and tensor for what is missing, truncated, of another shape or dtype, or without a place.
    """
    check_model_files(directory)
    model = examine(directory)
    if model.scan.problems:
        more = len(model.scan.problems) - 1
        first = model.scan.problems[0]
        raise ModelError(f"{first}\n  and {more} more problems: `megarl convert inspect` lists them" if more else str(first))
    return model


def examine(directory: Path) -> HfModel:
    """The same, with what is wrong as ``scan.problems``. Raises ModelError where config.json can't be used."""
    hf_config = read_hf_config(directory)
    plan = plan_model(hf_config, head_of(hf_config))
    return HfModel(directory, plan, examine_files(directory, hf_config, plan.head))


def _unquantized(hf_config: Mapping[str, Any]) -> torch.dtype:
    """What fp8 becomes: the dtype that config.json names, bfloat16 where it names none."""
    return DTYPES.get(str(hf_config.get("dtype") or hf_config.get("torch_dtype")), torch.bfloat16)
