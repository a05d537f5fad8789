"""What a conversion would do, as lines: each Hugging Face tensor and the boxes that hold it, what is left out, room needed."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from megarl.convert.aside import check_output, existing, refuse_inside
from megarl.convert.companions import check_companions, left_out
from megarl.convert.hf_model import HfModel, open_hf_model
from megarl.convert.megatron_model import open_megatron_model
from megarl.convert.progress import size
from megarl.convert.targets import ModelPlan
from megarl.convert.to_hf import companions_of, config_of, dtypes_of
from megarl.convert.to_megatron import all_parts
from megarl.weights import fp8
from megarl.weights.dtypes import DTYPE_NAMES
from megarl.weights.hf_layout import lay_out
from megarl.weights.regions import Box, Region, overlap, volume


def dry_run_to_megatron(hf_dir: Path, out: Path) -> Iterator[str]:
    """Lines for a conversion to Megatron. Checks what the conversion checks before it writes, and writes nothing."""
    check_output(out)
    model = open_hf_model(hf_dir)
    refuse_inside(out, hf_dir)
    check_companions(hf_dir)
    for name, boxes in _boxes(model.plan).items():
        stored = model.stored(Region(name, tuple((0, n) for n in model.plan.shapes[name])))
        origin = name if stored.name == name else f"{name} (stored in {stored})"
        yield f"{origin} {_form(model.plan, name, DTYPE_NAMES[model.dtype(name)])} -> {_short(boxes)}"
    for name, reason in model.dropped.items():
        yield f"{name} dropped: {reason}"
    yield from _left_out(hf_dir, model.dropped)
    yield _coverage(model)
    yield from _room(out, sum(part.piece.nbytes for part in all_parts(model)))


def dry_run_to_hf(
    megatron_dir: Path, out: Path, *, tokenizer: Path | None = None, dtype: str | None = None, shard_bytes: int = 5 * 10**9
) -> Iterator[str]:
    """Lines for a conversion to Hugging Face."""
    check_output(out)
    model = open_megatron_model(megatron_dir)
    refuse_inside(out, megatron_dir)
    beside = companions_of(megatron_dir, tokenizer)
    refuse_inside(out, beside)
    dtypes = dtypes_of(model, dtype)
    config_of(model, dtypes, changed=dtype is not None)
    laid = lay_out(model.plan.shapes, dtypes, shard_bytes)
    for name, boxes in _boxes(model.plan).items():
        yield f"{_short(boxes)} -> {name} {_form(model.plan, name, DTYPE_NAMES[dtypes[name]])} in {laid.entries[name].file}"
    used = {target.place.key for target in model.plan.targets}
    for key in sorted(set(model.reader.tensors) - used):
        yield f"{key} dropped: {'state of the optimizer' if is_optimizer(key) else 'no parameter of the model'}"
    yield from _left_out(beside, {})
    made = defaultdict(list)
    for target in model.plan.targets:
        for source, _ in target.copies:
            made[source.name].append(source.box)
    once = [name for name, shape in model.plan.shapes.items() if _exactly_once(made[name], shape)]
    tensors = f"{len(once)} of {len(model.plan.shapes)} tensors"
    yield f"coverage: {tensors} made, each element from one place; {len(used)} tensors of the checkpoint used"
    yield from _room(out, laid.total)


def is_optimizer(key: str) -> bool:
    """Whether a tensor of a checkpoint is a state of the optimizer."""
    return key.startswith(("optimizer.", "chained_"))


def _left_out(directory: Path, told: Mapping[str, str]) -> Iterator[str]:
    """A line for each file that isn't taken along, and that isn't ``told`` of among the tensors."""
    for name, reason in left_out(directory).items():
        if name not in told:
            yield f"left out: {name}: {reason}"


def _coverage(model: HfModel) -> str:
    """How often the stored tensors are used, counted in the copies that the conversion makes."""
    used: dict[str, list[Box]] = defaultdict(list)
    for target in model.plan.targets:
        for source, _ in target.copies:
            where = model.stored(source)
            used[where.name].append(where.box)
    entries = model.scan.entries
    once = [name for name, boxes in used.items() if _exactly_once(boxes, entries[name].shape)]
    factors = [name + fp8.SCALES for name in used if entries[name].code == fp8.STORED]
    rest = sorted(entries.keys() - used.keys() - set(factors) - model.dropped.keys())
    return (
        f"coverage: {len(once)} tensors used exactly once"
        + (f", {len(factors)} others as factors of these" if factors else "")
        + (f", {len(used) - len(once)} NOT exactly once" if len(once) < len(used) else "")
        + f", {len(model.dropped)} dropped, {f'{len(rest)} left over: {rest[0]}, ...' if rest else 'none left over'}"
    )


def _exactly_once(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes cover each element of a tensor once."""
    return sum(volume(box) for box in boxes) == prod(shape) and overlap(boxes) is None


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
    yield f"room: {size(needed)} needed, {size(shutil.disk_usage(existing(out)).free)} free; nothing was written"
