"""What a directory holds: family, parameters, layers, dtypes, sizes, and what is missing."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from megarl.config.model_checks import check_model_files
from megarl.convert.aside import unfinished
from megarl.convert.companions import CONFIG, check_companions, companions
from megarl.convert.distcp_read import METADATA, Reader
from megarl.convert.dry_run import is_optimizer
from megarl.convert.hf_model import HfModel
from megarl.convert.hf_model import examine as examine_hf
from megarl.convert.megatron_model import MegatronModel
from megarl.convert.megatron_model import examine as examine_megatron
from megarl.convert.progress import size
from megarl.convert.targets import ModelPlan
from megarl.convert.to_megatron import HF
from megarl.errors import CheckpointError, MegarlError, ModelError, explain
from megarl.weights.dtypes import DTYPE_NAMES
from megarl.weights.hf_headers import scan
from megarl.weights.hf_source import CODES

_SHOWN = 20  # lines of one kind; JSON has all


@dataclass
class Inspection:
    """One directory. Bytes are of tensors, ``files`` of files."""

    directory: str
    format: str  # "Hugging Face" | "Megatron"
    family: str = ""
    head: str = ""
    layers: int = 0
    experts: int = 0
    parameters: int = 0
    tensors: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)  # dtype -> bytes of the model's tensors
    layout: str = ""
    optimizer_bytes: int = 0
    files: dict[str, int] = field(default_factory=dict)  # weight file -> bytes
    beside: list[str] = field(default_factory=list)  # configuration, tokenizer and so on
    dropped: dict[str, str] = field(default_factory=dict)  # tensor -> why a conversion leaves it out
    unknown: list[str] = field(default_factory=list)  # tensors of a model without a table, those of all layers and experts at once
    missing: list[str] = field(default_factory=list)  # what keeps it from being whole

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people to read."""
        dtypes = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in sorted(self.dtypes.items(), key=lambda item: -item[1]))
        experts = f", {self.experts} experts in each mixture layer" if self.experts else ""
        head = {"lm": "language model", "value": "value head", "": ""}[self.head]
        lines = [
            f"{self.directory}: {self.format}",
            f"  family:      {self.family}, {self.layers} layers{experts}, {head}" if self.family else "  family:      ?",
            f"  parameters:  {self.parameters:,} in {self.tensors:,} tensors",
            f"  dtypes:      {dtypes or '?'}",
            f"  layout:      {self.layout or '?'}",
            f"  files:       {len(self.files)}, {size(sum(self.files.values()))}"
            + (f"; {size(self.optimizer_bytes)} of it states of the optimizer" if self.optimizer_bytes else ""),
            f"  beside them: {', '.join(self.beside) or 'nothing'}",
        ]
        lines += _first([f"  left out:    {name}: {reason}" for name, reason in self.dropped.items()])
        lines += _first([f"  no table:    {line}" for line in self.unknown])
        if not self.missing:
            return [*lines, "  whole: nothing is missing"]
        problems = _first(["    " + problem.replace("\n", "\n    ") for problem in self.missing])
        return [*lines, f"  NOT WHOLE: {len(self.missing)} problems", *problems]


def _first(lines: list[str]) -> list[str]:
    """As many lines as people read; a large model may have thousands."""
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"    and {len(lines) - _SHOWN} more: --json lists all"]


def inspect(directory: Path) -> Inspection:
    """Look at a directory of either format. Reads tables of contents alone. Raises ModelError for one that is neither."""
    if not directory.is_dir():
        raise ModelError(explain("a file, and no directory" if directory.exists() else "no such directory", where=str(directory)))
    if unfinished(directory):
        return Inspection(str(directory), "unfinished conversion", missing=["the conversion didn't end: run the same command to go on"])
    if (directory / METADATA).is_file() or any(directory.glob("*.distcp")):
        return _inspect_megatron(directory)
    if (directory / CONFIG).is_file() or any(directory.glob("*.safetensors*")):
        return _inspect_hf(directory)
    inside = sorted(path.parent.name for path in directory.glob(f"*/{METADATA}"))
    raise ModelError(
        explain(
            "neither a Hugging Face directory nor a Megatron checkpoint",
            where=str(directory),
            got=", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "an empty directory",
            expected=f"{CONFIG} and safetensors, or {METADATA} and *.distcp files",
            do=f"name one of its roles: {', '.join(inside)}" if inside else "name another directory",
        )
    )


def _inspect_hf(directory: Path) -> Inspection:
    found = Inspection(str(directory), "Hugging Face", layout="whole tensors")
    found.beside = [path.name for path in companions(directory)]
    try:
        model = examine_hf(directory)
    except MegarlError as error:
        found.missing.append(str(error))
        _count_tensors(found, directory)
        return found
    _describe(found, model.plan)
    found.files, found.dropped = model.scan.files, dict(model.dropped)
    found.missing += [str(problem) for problem in model.scan.problems]
    _check_beside(found, directory)
    if not model.scan.problems:
        try:
            check_model_files(directory)
        except ModelError as error:
            found.missing.append(str(error))
    found.dtypes = _hf_dtypes(model)
    return found


def _check_beside(found: Inspection, directory: Path) -> None:
    try:
        check_companions(directory)
    except ModelError as error:
        found.missing.append(str(error))


def _count_tensors(found: Inspection, directory: Path) -> None:
    """What the files alone say, of a model without a table."""
    entries = scan(directory).entries
    kinds = Counter((re.sub(r"\.\d+(?=\.)", ".N", name), entry.code, entry.shape) for name, entry in entries.items())
    found.unknown = [f"{name} {list(shape)} {code}, {count} times" for (name, code, shape), count in kinds.items()]
    found.tensors, found.parameters = len(entries), sum(prod(entry.shape) for entry in entries.values())


def _hf_dtypes(model: HfModel) -> dict[str, int]:
    dtypes: dict[str, int] = defaultdict(int)
    for name, entry in model.scan.entries.items():
        if name not in model.dropped:
            dtype = CODES.get(entry.code)
            dtypes[DTYPE_NAMES.get(dtype, entry.code)] += entry.nbytes if dtype else 0
    return dict(dtypes)


def _inspect_megatron(directory: Path) -> Inspection:
    found = Inspection(str(directory), "Megatron")
    found.beside = [f"{HF}/{path.name}" for path in companions(directory / HF)] if (directory / HF).is_dir() else []
    found.files = {path.name: path.stat().st_size for path in sorted(directory.glob("*.distcp"))}
    try:
        model = examine_megatron(directory)
    except MegarlError as error:
        found.missing.append(str(error))
        _count_keys(found, directory)
        return found
    _describe(found, model.plan)
    found.layout, found.dtypes = _layout(model), _megatron_dtypes(model)
    found.optimizer_bytes = sum(prod(t.shape) * t.dtype.itemsize for key, t in model.reader.tensors.items() if is_optimizer(key))
    found.missing += [str(problem) for problem in model.problems]
    if (directory / HF).is_dir():
        _check_beside(found, directory / HF)
    return found


def _count_keys(found: Inspection, directory: Path) -> None:
    """What the table of contents alone says, of a checkpoint without a record of its model."""
    try:
        tensors = Reader(directory).tensors
    except CheckpointError:
        return
    model = {key: tensor for key, tensor in tensors.items() if not is_optimizer(key)}
    found.tensors, found.parameters = len(model), sum(prod(tensor.shape) for tensor in model.values())


def _layout(model: MegatronModel) -> str:
    """How the tensors are cut; any layout loads them."""
    counts = []
    for target in model.sound:
        box = target.box(tuple((0, length) for length in target.shape))
        counts.append(len(model.reader.chunks(target.place.key, box, len(target.place.counts))))
    if not counts:
        return ""
    least, most = min(counts), max(counts)
    return f"{least if least == most else f'{least} to {most}'} pieces a parameter; any layout loads them"


def _megatron_dtypes(model: MegatronModel) -> dict[str, int]:
    dtypes: dict[str, int] = defaultdict(int)
    for target in model.sound:
        dtype = model.dtype(target)
        dtypes[DTYPE_NAMES[dtype]] += dtype.itemsize * sum(prod(stop - start for start, stop in copy.target.box) for copy in target.copies)
    return dict(dtypes)


def _describe(found: Inspection, plan: ModelPlan) -> None:
    sizes = plan.family.sizes(plan.hf_config)
    found.family, found.head = plan.family.model_type, plan.head
    found.layers, found.experts = sizes.layers, sizes.experts
    found.parameters, found.tensors = plan.elements, len(plan.shapes)
