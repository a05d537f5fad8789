"""One model in a Hugging Face directory: checked against its tables, and read as they name its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.config.model_checks import check_model_files
from megarl.convert.source import CODES, Entry, Files, Scan, scan
from megarl.convert.targets import PIECE_BYTES, ModelPlan, head_of, no_place_for, plan_model
from megarl.errors import ModelError, explain
from megarl.weights import fp8
from megarl.weights.dtypes import DTYPE_NAMES, DTYPES
from megarl.weights.families import read_hf_config
from megarl.weights.model_record import ModelRecord
from megarl.weights.regions import Region, box_shape, carry, whole


@dataclass(frozen=True)
class HfModel:
    """A whole Hugging Face directory."""

    directory: Path
    plan: ModelPlan
    scan: Scan
    # Tensor of the table -> the box of a stored one that holds it, where experts are stacked in one tensor a layer.
    stacked: Mapping[str, Region]
    dropped: Mapping[str, str]  # stored tensor -> why it is left out

    def stored(self, region: Region) -> Region:
        """Where a box of the table's tensor is in the files; perhaps with one dimension of length 1 more in front."""
        if region.name in self.scan.entries or region.name not in self.stacked:
            return region
        name, box = self.stacked[region.name]
        inner = tuple((0, stop - start) for start, stop in box[1:])
        return Region(name, (box[0], *carry(region.box, inner, box[1:])))

    def entry(self, tensor: str) -> Entry | None:
        """The stored tensor that holds the table's ``tensor``; None where there is none."""
        return self.scan.entries.get(tensor) or (self.scan.entries.get(self.stacked[tensor].name) if tensor in self.stacked else None)

    def dtype(self, tensor: str) -> torch.dtype:
        """The dtype of the table's ``tensor``: the stored one, or what fp8 is dequantised to."""
        entry = self.entry(tensor)
        assert entry is not None, "open_hf_model found every tensor"
        return CODES[entry.code] if entry.code != fp8.STORED else _unquantized(self.plan.hf_config)

    def read_into(self, files: Files, region: Region, out: torch.Tensor) -> None:
        """Fill ``out``, of the region's shape; numbers are cast to its dtype, without loss where it was chosen by :meth:`dtype`."""
        where = self.stored(region)
        code = self.scan.entries[where.name].code
        if CODES[code] is out.dtype:
            files.read_into(where, out.view(box_shape(where.box)))
            return
        numbers = torch.empty(box_shape(where.box), dtype=CODES[code])
        files.read_into(where, numbers)
        if code == fp8.STORED:
            block = fp8.block_size(self.plan.hf_config)
            assert block is not None, "open_hf_model checked it"
            scales_at = fp8.scales_region(where, block)
            scales = torch.empty(box_shape(scales_at.box), dtype=CODES[self.scan.entries[scales_at.name].code])
            files.read_into(scales_at, scales)
            numbers = fp8.dequantize(numbers, scales, where.box, block).to(_unquantized(self.plan.hf_config))
        out.copy_(numbers.view(out.shape))

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
    found = scan(directory)
    stacked = {
        name: where
        for name, (where, _) in plan.family.stacked(hf_config, head=plan.head).items()
        if name not in found.entries and where.name in found.entries
    }
    model = HfModel(directory, plan, found, stacked, dict(_dropped(directory, plan, found)))
    if not found.files:
        return model
    used: set[str] = set()
    for name, shape in plan.shapes.items():
        used |= _check_tensor(model, name, shape)
    strangers = [name for name in found.entries if name not in used and name not in model.dropped]
    if strangers:
        found.problems.append(no_place_for(sorted(strangers), str(directory), plan))
    return model


def _check_tensor(model: HfModel, name: str, shape: tuple[int, ...]) -> set[str]:
    """Note what is wrong with one tensor of the table; returns the stored tensors that it is made of."""
    problems, entries = model.scan.problems, model.scan.entries
    where = model.stored(Region(name, whole(shape))).name
    if where not in entries:
        problems.append(_missing(model, name))
        return set()
    entry, path = entries[where], f"{where} in {model.directory / entries[where].file}"
    expected = shape if where == name else model.plan.family.stacked(model.plan.hf_config, head=model.plan.head)[name][1]
    if entry.shape != expected:
        problems.append(
            ModelError(explain("a tensor has another shape than config.json says", where=path, got=entry.shape, expected=expected))
        )
    if entry.code not in CODES:
        problems.append(
            ModelError(
                explain(
                    "a tensor is not of plain floating-point numbers",
                    where=path,
                    got=entry.code,
                    expected=", ".join(CODES),
                    do="use the model's unquantized weights",
                )
            )
        )
    if entry.code != fp8.STORED:
        return {where}
    scales, block = where + fp8.SCALES, fp8.block_size(model.plan.hf_config)
    wanted = fp8.scales_shape(entry.shape, block) if block and len(entry.shape) == 2 else None
    if wanted is None or scales not in entries or entries[scales].shape != wanted:
        problems.append(
            ModelError(
                explain(
                    "a tensor of fp8 without the factors of its blocks",
                    where=path,
                    got=f"weight_block_size {block} in config.json; {scales}: {entries[scales].shape if scales in entries else 'missing'}",
                    expected=f"{scales} of shape {wanted}",
                    do="copy the model directory again, or use the model's unquantized weights",
                )
            )
        )
    return {where, scales}


def _missing(model: HfModel, name: str) -> ModelError:
    file = model.scan.unlisted.get(name)
    return ModelError(
        explain(
            "a tensor is missing from the index, though a file has it" if file else "a tensor is missing from the model directory",
            where=str(model.directory / file) if file else str(model.directory),
            expected=name,
            do="copy the index again" if file else "check that config.json and the weights belong together, and that the copy is whole",
        )
    )


def _dropped(directory: Path, plan: ModelPlan, found: Scan) -> list[tuple[str, str]]:
    """(stored tensor, why it may be left out). A tied output layer that differs from the embedding is a problem instead."""
    outputs = set(plan.family.hf_tensors({**plan.hf_config, "tie_word_embeddings": False})) - set(plan.shapes)
    dropped = []
    for name in found.entries:
        if name in plan.shapes:
            continue
        if name in outputs and plan.head == "value":
            dropped.append((name, "output layer of a language model: this model has a value head"))
        elif name in outputs:
            if (problem := _check_tie(directory, plan, found, name)) is None:
                dropped.append((name, "tied: equal to the embedding"))
            else:
                found.problems.append(problem)
                dropped.append((name, "tied, and another tensor"))
        elif (reason := plan.family.reason_unused(plan.hf_config, name)) is not None:
            dropped.append((name, reason))
    return dropped


def _check_tie(directory: Path, plan: ModelPlan, found: Scan, output: str) -> ModelError | None:
    """An error unless the stored output layer holds what the embedding does, bit for bit."""
    embedding = next(iter(plan.shapes))  # tables begin with it
    a, b = found.entries.get(embedding), found.entries[output]
    if a is None:
        return None  # it is reported as missing
    same = (a.shape, a.code) == (b.shape, b.code)
    if same and a.code in CODES:
        with Files(directory, found.entries) as files:
            same = all(
                torch.equal(x.view(torch.uint8), y.view(torch.uint8))
                for x, y in zip(files.blocks(embedding, PIECE_BYTES), files.blocks(output, PIECE_BYTES), strict=True)
            )
    if same:
        return None
    return ModelError(
        explain(
            "the output layer differs from the embedding, and config.json ties them",
            where=f"{output} in {directory / b.file}",
            got="tie_word_embeddings: true, and two different tensors",
            expected="equal tensors, or tie_word_embeddings: false",
            do="set tie_word_embeddings to false in config.json if the model was trained so",
        )
    )


def _unquantized(hf_config: Mapping[str, Any]) -> torch.dtype:
    """What fp8 becomes: the dtype that config.json names, bfloat16 where it names none."""
    return DTYPES.get(str(hf_config.get("dtype") or hf_config.get("torch_dtype")), torch.bfloat16)
