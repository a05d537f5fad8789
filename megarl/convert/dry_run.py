"""What a conversion would do, as lines: each Hugging Face tensor and the boxes that hold it, what is left out, room needed."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from megarl.convert.hf_files import lay_out
from megarl.convert.hf_model import open_hf_model
from megarl.convert.megatron_model import open_megatron_model
from megarl.convert.progress import size
from megarl.convert.targets import ModelPlan, refuse_existing
from megarl.convert.to_hf import companions_of, config_of, dtypes_of
from megarl.convert.to_megatron import all_parts
from megarl.weights.dtypes import DTYPE_NAMES
from megarl.weights.regions import Region, volume


def dry_run_to_megatron(hf_dir: Path, out: Path) -> Iterator[str]:
    """Lines for a conversion to Megatron. Checks what the conversion checks before it writes, and writes nothing."""
    refuse_existing(out)
    model = open_hf_model(hf_dir)
    for name, boxes in _boxes(model.plan).items():
        stored = model.stored(Region(name, tuple((0, n) for n in model.plan.shapes[name])))
        origin = name if stored.name == name else f"{name} (stored in {stored})"
        yield f"{origin} {_form(model.plan, name, DTYPE_NAMES[model.dtype(name)])} -> {_short(boxes)}"
    for name, reason in model.dropped.items():
        yield f"{name} dropped: {reason}"
    scales = sum(1 for name in model.scan.entries if name not in model.plan.shapes and name not in model.dropped)
    other = f", {scales} others as parts of these" if scales else ""
    yield f"coverage: {len(model.plan.shapes)} tensors used exactly once{other}, {len(model.dropped)} dropped, none left over"
    yield from _room(out, sum(part.piece.nbytes for part in all_parts(model)))


def dry_run_to_hf(
    megatron_dir: Path, out: Path, *, tokenizer: Path | None = None, dtype: str | None = None, shard_bytes: int = 5 * 10**9
) -> Iterator[str]:
    """Lines for a conversion to Hugging Face."""
    refuse_existing(out)
    model = open_megatron_model(megatron_dir)
    companions_of(megatron_dir, tokenizer)
    dtypes = dtypes_of(model, dtype)
    config_of(model, dtypes, changed=dtype is not None)
    laid = lay_out(model.plan.shapes, dtypes, shard_bytes)
    for name, boxes in _boxes(model.plan).items():
        yield f"{_short(boxes)} -> {name} {_form(model.plan, name, DTYPE_NAMES[dtypes[name]])} in {laid.entries[name].file}"
    used = {target.place.key for target in model.plan.targets}
    for key in sorted(set(model.reader.tensors) - used):
        yield f"{key} dropped: {'state of the optimizer' if is_optimizer(key) else 'no parameter of the model'}"
    yield f"coverage: {len(model.plan.shapes)} tensors made, each element from one place; {len(used)} tensors of the checkpoint used"
    yield from _room(out, laid.total)


def is_optimizer(key: str) -> bool:
    """Whether a tensor of a checkpoint is a state of the optimizer."""
    return key.startswith(("optimizer.", "chained_"))


def _boxes(plan: ModelPlan) -> dict[str, list[Region]]:
    """Hugging Face tensor -> the boxes of the checkpoint that hold it."""
    found: dict[str, list[Region]] = defaultdict(list)
    for target in plan.targets:
        for source, into in target.copies:
            found[source.name].append(Region(target.place.key, target.box(into.box)))
    return {name: found[name] for name in plan.shapes}


def _form(plan: ModelPlan, name: str, dtype: str) -> str:
    return f"{list(plan.shapes[name])} {dtype}"


def _short(boxes: list[Region]) -> str:
    if len(boxes) == 1:
        return str(boxes[0])
    return f"{boxes[0]} and {len(boxes) - 1} more boxes, {sum(volume(box.box) for box in boxes):,} elements"


def _room(out: Path, needed: int) -> Iterator[str]:
    place = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    yield f"room: {size(needed)} needed, {size(shutil.disk_usage(place).free)} free; nothing was written"
