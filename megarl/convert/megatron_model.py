"""One model in a Megatron distributed checkpoint: a converted one, or a role of a run's checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from megarl.convert.distcp_read import Reader
from megarl.convert.targets import PIECE_BYTES, ModelPlan, Target, plan_model
from megarl.errors import CheckpointError, MegarlError, explain
from megarl.weights.dtypes import DTYPE_NAMES
from megarl.weights.model_record import FILE as RECORD
from megarl.weights.model_record import ModelRecord, read_record
from megarl.weights.regions import Box, intersect, overlap, volume, whole


@dataclass(frozen=True)
class Unit:
    """What is read at once: some rows of one parameter, or all of it."""

    target: Target
    local: Box
    chunks: tuple[Box, ...]  # of the checkpoint's tensor, that meet it
    nbytes: int


@dataclass(frozen=True)
class MegatronModel:
    """A whole checkpoint."""

    directory: Path
    record: ModelRecord
    plan: ModelPlan
    reader: Reader
    problems: list[MegarlError] = field(default_factory=list)
    sound: list[Target] = field(default_factory=list)  # parameters that the table of contents has whole

    def read(self, unit: Unit, out: torch.Tensor) -> None:
        """Fill ``out``, of the shape of the unit's rows."""
        box = unit.target.box(unit.local)
        self.reader.read(unit.target.place.key, box, unit.chunks, out.view(tuple(stop - start for start, stop in box)))

    def dtype(self, target: Target) -> torch.dtype:
        """The dtype of a parameter as it is stored."""
        return self.reader.tensors[target.place.key].dtype

    def units(self) -> Iterator[Unit]:
        """All parameters, in an order in which each chunk is read once."""
        for target in self.plan.targets:
            yield from self._units(target)

    def _units(self, target: Target) -> Iterator[Unit]:
        itemsize = self.dtype(target).itemsize
        box = target.box(_real(target))
        chunks = sorted(self.reader.chunks(target.place.key, box, len(target.place.counts)))
        lead = len(target.place.counts)
        rows = [chunk[lead:] for chunk in chunks]
        if not target.shape or not all(_whole_rows(row, target) for row in rows):
            yield Unit(target, whole(target.shape), tuple(chunks), prod(target.shape) * itemsize)
            return
        row_bytes = prod(target.shape[1:]) * itemsize
        start, stop, held = None, 0, []
        for chunk, row in zip(chunks, rows, strict=True):
            last = min(row[0][1], target.shape[0])
            if start is not None and (last - start) * row_bytes > PIECE_BYTES:
                yield self._rows(target, start, stop, held, row_bytes)
                start, held = None, []
            if start is None:
                start = row[0][0]
            stop = last
            held.append(chunk)
        if start is not None:
            yield self._rows(target, start, stop, held, row_bytes)

    @staticmethod
    def _rows(target: Target, start: int, stop: int, chunks: list[Box], row_bytes: int) -> Unit:
        return Unit(target, ((start, stop), *whole(target.shape[1:])), tuple(chunks), (stop - start) * row_bytes)


def open_megatron_model(directory: Path) -> MegatronModel:
    """Read a checkpoint's table of contents, and check all that can be known from it.

    Raises CheckpointError that names file and tensor for what is missing, truncated, or of another shape.
    """
    model = examine(directory)
    if model.problems:
        more = len(model.problems) - 1
        first = model.problems[0]
        raise CheckpointError(f"{first}\n  and {more} more problems: `megarl convert inspect` lists them" if more else str(first))
    return model


def examine(directory: Path) -> MegatronModel:
    """The same, with what is wrong as ``problems``. Raises where table of contents or record can't be read."""
    reader = Reader(directory)
    record = read_record(directory)
    model = MegatronModel(directory, record, _plan(directory, record), reader)
    for target in model.plan.targets:
        if (problem := _check_target(model, target)) is not None:
            model.problems.append(problem)
        else:
            model.sound.append(target)
    model.problems.extend(_check_files(reader))
    return model


def _plan(directory: Path, record: ModelRecord) -> ModelPlan:
    """Where the record's model has its parameters. Raises MegarlError for a record that no conversion and no run wrote."""
    try:
        return plan_model(record.hf_config, record.head)
    except MegarlError:
        raise
    except Exception as error:  # tables expect what config.json was checked for
        raise CheckpointError(
            explain(
                "the record of the model has a configuration that no model can be of",
                where=str(directory / RECORD),
                got=f"{type(error).__name__}: {error}",
                do="copy the checkpoint again, or convert the model again",
            )
        ) from error


def _check_target(model: MegatronModel, target: Target) -> CheckpointError | None:
    key, where = target.place.key, f"{target.place.key} in {model.directory}"
    stored = model.reader.tensors.get(key)
    if stored is None:
        return CheckpointError(
            explain("a tensor is missing from the checkpoint", where=str(model.directory), expected=key, do="take another checkpoint")
        )
    if stored.dtype not in DTYPE_NAMES:
        return CheckpointError(
            explain(
                "a tensor is not of plain floating-point numbers", where=where, got=stored.dtype, expected=", ".join(DTYPE_NAMES.values())
            )
        )
    real = target.box(_real(target))
    # The first dimension of embedding and output layer is padded, by a number that depends on the layout that wrote it.
    lead = len(target.place.counts)
    padded = bool(target.shape) and _real(target)[0][1] != target.shape[0]
    fits = len(stored.shape) == len(target.global_shape) and all(
        got >= need if i == lead and padded else got == size
        for i, (got, size, (_, need)) in enumerate(zip(stored.shape, target.global_shape, real, strict=False))
    )
    padding_gone = len(stored.shape) == len(real) and tuple(stop for _, stop in real[lead:]) == stored.shape[lead:]
    if not fits and not padding_gone:
        return CheckpointError(
            explain("a tensor has another shape than model.json says", where=where, got=stored.shape, expected=target.global_shape)
        )
    chunks = model.reader.chunks(key, real, lead)
    covered = sum(volume(common) for chunk in chunks if (common := intersect(chunk, real)) is not None)
    if covered != volume(real) or overlap(chunks) is not None:
        return CheckpointError(
            explain(
                "the pieces of a tensor don't cover it exactly once",
                where=f"{target.name}, {where}",
                got=f"{covered} elements in {len(chunks)} pieces",
                expected=f"{volume(real)} elements",
                do="take another checkpoint: this one was written in part",
            )
        )
    if (lost := next((chunk for chunk in chunks if model.reader.file_of(key, chunk) is None), None)) is not None:
        return CheckpointError(
            explain("the table of contents doesn't say where a piece of a tensor is", where=where, got=lost, do="copy the checkpoint again")
        )
    return None


def _check_files(reader: Reader) -> Iterator[CheckpointError]:
    """What is missing of the files that hold the pieces."""
    ends: dict[str, tuple[int, str]] = {}
    for index, info in reader.stored.items():
        end = info.offset + info.length
        if end > ends.get(info.relative_path, (0, ""))[0]:
            ends[info.relative_path] = (end, index.fqn)
    for file, (end, key) in sorted(ends.items()):
        path = reader.directory / file
        got = path.stat().st_size if path.is_file() else None
        if got is None or got < end:
            yield CheckpointError(
                explain(
                    "a file of the checkpoint is missing" if got is None else "a file of the checkpoint is truncated",
                    where=str(path),
                    got=None if got is None else f"{got} bytes",
                    expected=f"{end} bytes; it holds {key}",
                    do="copy the checkpoint again",
                )
            )


def _real(target: Target) -> Box:
    """The box of a parameter without padding rows."""
    if not target.shape:
        return ()
    rows = max(copy.target.box[0][1] for copy in target.copies)
    return ((0, rows), *whole(target.shape[1:]))


def _whole_rows(row: Box, target: Target) -> bool:
    return all(span == (0, size) for span, size in zip(row[1:], target.shape[1:], strict=True))
