"""Hugging Face directory -> Megatron distributed checkpoint, piece by piece."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megarl.convert.aside import Aside, check_output, refuse_inside
from megarl.convert.companions import check_companions, copy_companions
from megarl.convert.distcp import Piece, Writer, metadata_of
from megarl.convert.hf_model import HfModel, open_hf_model
from megarl.convert.progress import Progress
from megarl.convert.targets import PIECE_BYTES, Target, pieces
from megarl.convert.verify import verify
from megarl.weights.hf_source import Files
from megarl.weights.regions import Box, as_slices, volume

HF = "hf"  # what else the source holds: configuration, tokenizer, chat template
_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


@dataclass(frozen=True)
class Part:
    """One piece of the checkpoint, and which box of which parameter it is."""

    piece: Piece
    target: Target
    local: Box


def to_megatron(hf_dir: Path, out: Path, *, file_bytes: int = 10**9, verified: bool = False, quiet: bool = False) -> HfModel:
    """Write the checkpoint ``out`` of the model in ``hf_dir``; any layout loads it. Returns the model.

    ``file_bytes``: about the size of one file, after which an interrupted conversion goes on. ``verified``: compare the result with the
    source before ``out`` appears. Raises ModelError for a source that is not whole, ConfigError for an ``out`` in it, CheckpointError for
    one that exists or can't be written, DiffersError for a result that isn't its source.
    """
    check_output(out)
    model = open_hf_model(hf_dir)
    refuse_inside(out, hf_dir)
    check_companions(hf_dir)
    groups = group_parts(all_parts(model), file_bytes)
    total = sum(part.piece.nbytes for group in groups for part in group)
    with Aside(out) as aside:
        aside.begin(_purpose(model, file_bytes), total, lambda i, places: _is_there(aside.path / file_name(i), places))
        writer = Writer(aside.path, str(aside.out))
        done = sum(part.piece.nbytes for i in aside.groups for part in groups[i])
        progress = None if quiet else Progress("to Megatron", total, done)
        with Files(hf_dir, model.scan.entries) as files:
            for i, group in enumerate(groups):
                if i not in aside.groups:
                    _write_group(aside, writer, model, files, i, group, progress)
        _finish(aside, writer, model, groups)
        if progress:
            progress.finish()
        if verified:
            aside.check(lambda: verify(hf_dir, aside.path, quiet=quiet))
        aside.publish()
    return model


def all_parts(model: HfModel) -> Iterator[Part]:
    """Every piece of the checkpoint, in the order of the model's parameters."""
    by_key: dict[str, list[Target]] = {}
    for target in model.plan.targets:
        by_key.setdefault(target.place.key, []).append(target)
    dtypes = {key: _common_dtype(model, targets) for key, targets in by_key.items()}
    for target in model.plan.targets:
        dtype = dtypes[target.place.key]
        for local in pieces(target.shape, dtype.itemsize):
            yield Part(Piece(target.place.key, target.box(local), target.global_shape, dtype), target, local)


def _common_dtype(model: HfModel, targets: list[Target]) -> torch.dtype:
    """A tensor of the checkpoint has one dtype: where its sources differ, one that holds all of them without loss."""
    found = {model.dtype(copy.source.name) for target in targets for copy in target.copies}
    common = found.pop()
    for dtype in found:
        common = torch.promote_types(common, dtype)
    return common


def group_parts(parts: Iterator[Part], file_bytes: int) -> list[list[Part]]:
    """Parts in order, in groups of at most ``file_bytes`` unless one part is longer."""
    groups: list[list[Part]] = [[]]
    used = 0
    for part in parts:
        if groups[-1] and used + part.piece.nbytes > file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(part)
        used += part.piece.nbytes
    return groups


def fill(model: HfModel, files: Files, part: Part, out: torch.Tensor) -> None:
    """Put one piece into ``out``, whose dimensions of layer and expert have length 1; padding becomes zero."""
    flat = out.view(tuple(stop - start for start, stop in part.local))
    copies = part.target.within(part.local)
    if sum(volume(copy.target.box) for copy in copies) != flat.numel():
        flat.zero_()
    for source, into in copies:
        model.read_into(files, source, flat[as_slices(into.box)])


def _write_group(
    aside: Aside, writer: Writer, model: HfModel, files: Files, number: int, group: list[Part], progress: Progress | None
) -> None:
    def fill_piece(i: int, out: torch.Tensor) -> None:
        fill(model, files, group[i], out)
        if progress:
            progress.add(group[i].piece.nbytes)

    with aside.guarded(aside.path / file_name(number)):
        results = writer.write(file_name(number).removesuffix("0.distcp"), [part.piece for part in group], fill_piece)
    where = {result.index.index: result.storage_data for result in results}
    aside.finished(number, [[where[i].offset, where[i].length] for i in range(len(group))])


def _finish(aside: Aside, writer: Writer, model: HfModel, groups: list[list[Part]]) -> None:
    """Everything but the tensors. The table of contents comes last: without it nothing takes the directory for a checkpoint."""
    results = []
    for number, group in enumerate(groups):
        for part, (offset, length) in zip(group, aside.groups[number], strict=True):
            index = MetadataIndex(part.piece.key, torch.Size([start for start, _ in part.piece.box]))
            results.append(WriteResult(index, length, _StorageInfo(file_name(number), offset, length)))
    aside.keep_only([file_name(number) for number in range(len(groups))])
    with aside.guarded(aside.path):
        record = replace(model.record(), converted=True)
        copy_companions(model.directory, aside.path / HF, config=record.hf_config)
        record.write(aside.path)
        torch.save({}, aside.path / "common.pt")  # what is no tensor: nothing
        (aside.path / "metadata.json").write_text(json.dumps(_BACKEND))
        writer.finish(metadata_of([part.piece for group in groups for part in group]), [results])


def file_name(group: int) -> str:
    """The file of a group, as megatron-core calls those of rank ``group``."""
    return f"__{group}_0.distcp"


def _is_there(file: Path, places: list[list[int]]) -> bool:
    """Whether a file holds all that was noted of it."""
    return file.is_file() and file.stat().st_size == max(offset + length for offset, length in places)


def _purpose(model: HfModel, file_bytes: int) -> dict[str, Any]:
    """What the result depends on: a source of other sizes or times is another one."""
    files = {name: os.stat(model.directory / name) for name in [*model.scan.files, "config.json"]}
    return {
        "format": 1,
        "conversion": "to Megatron",
        "source": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()},
        "file_bytes": file_bytes,
        "piece_bytes": PIECE_BYTES,
    }
