"""Megatron distributed checkpoint -> Hugging Face directory, piece by piece."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import yaml

from megarl.convert.ahead import read_ahead
from megarl.convert.aside import Aside, check_output, refuse_inside
from megarl.convert.companions import CONFIG, check_companions, copy_companions, has_tokenizer
from megarl.convert.distcp_read import METADATA
from megarl.convert.hf_files import HfWriter
from megarl.convert.megatron_model import MegatronModel, Unit, open_megatron_model
from megarl.convert.memory import Memory
from megarl.convert.progress import Progress
from megarl.convert.targets import architecture_of
from megarl.convert.to_megatron import HF
from megarl.convert.verify import verify
from megarl.errors import ConfigError, explain
from megarl.weights.dtypes import DTYPE_NAMES, DTYPES
from megarl.weights.hf_export import export_config
from megarl.weights.hf_layout import Laid, lay_out, write_index
from megarl.weights.model_record import FILE as RECORD
from megarl.weights.regions import as_slices, box_shape

GROUP_BYTES = 10**9  # after which an interrupted conversion goes on


def to_hf(
    megatron_dir: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    dtype: str | None = None,
    shard_bytes: int = 5 * 10**9,
    verified: bool = False,
    quiet: bool = False,
) -> MegatronModel:
    """Write the Hugging Face directory ``out`` of the model in ``megatron_dir``, of any layout. Returns the model.

    ``tokenizer``: a directory with generation configuration, tokenizer and chat template, for a checkpoint that has none itself.
    ``dtype``: of all tensors; None: each as it was in the directory that was converted, or as the run stored it. No file exceeds
    ``shard_bytes`` unless one tensor does. ``verified``: compare the result with the source before ``out`` appears. Raises CheckpointError
    for a checkpoint that is not whole, and an ``out`` that exists or can't be written; ModelError for a number that has no room in
    ``dtype``; ConfigError for an ``out`` in what it is made of; DiffersError for a result that isn't its source.
    """
    check_output(out)
    model = open_megatron_model(megatron_dir)
    refuse_inside(out, megatron_dir)
    beside = companions_of(megatron_dir, tokenizer)
    refuse_inside(out, beside)
    dtypes = dtypes_of(model, dtype)
    config = config_of(model, dtypes, changed=dtype is not None)
    laid = lay_out(model.plan.shapes, dtypes, shard_bytes)
    groups = group_units(model.units())
    total = sum(unit.nbytes for group in groups for unit in group)
    with Aside(out) as aside:
        with HfWriter(aside.path, laid) as writer:
            # A file that is gone would be laid out anew, and every group may have written to it.
            aside.begin(_purpose(model, laid, config, beside), laid.total, lambda _group, _noted: writer.laid_out())
            with aside.guarded(aside.path):
                writer.create()
            progress = None if quiet else Progress("to Hugging Face", total, sum(u.nbytes for i in aside.groups for u in groups[i]))
            read = reading(model)
            for i, group in enumerate(groups):
                if i not in aside.groups:
                    for unit, numbers in read_ahead(group, read):
                        with aside.guarded(aside.path):
                            write_unit(writer, unit, numbers)
                        if progress:
                            progress.add(unit.nbytes)
                    with aside.guarded(aside.path):
                        writer.flush()
                    aside.finished(i)
            with aside.guarded(aside.path):
                writer.finish()
                aside.keep_only(list(laid.sizes))
                write_index(aside.path, laid)
                copy_companions(beside, aside.path, config=config)
        if progress:
            progress.finish()
        if verified:
            aside.check(lambda: verify(aside.path, megatron_dir, by_demand=dtype is not None, quiet=quiet))
        aside.publish()
    return model


def companions_of(megatron_dir: Path, tokenizer: Path | None) -> Path:
    """Where tokenizer and chat template come from: what is named, what a conversion put beside the checkpoint, or the run's own model.

    Raises ConfigError for nowhere, and ModelError for files there that can't be copied.
    """
    found = _companions_of(megatron_dir, tokenizer)
    check_companions(found)
    return found


def _companions_of(megatron_dir: Path, tokenizer: Path | None) -> Path:
    if tokenizer is not None:
        if not tokenizer.is_dir() or not has_tokenizer(tokenizer):
            other = "a file, and no directory" if tokenizer.exists() else "no such directory"
            raise ConfigError(
                explain(
                    "no tokenizer here" if tokenizer.is_dir() else other,
                    where=f"--tokenizer {tokenizer}",
                    expected="a directory with tokenizer.json, tokenizer.model, vocab.json or the like",
                    do="name the model that the run began with",
                )
            )
        return tokenizer
    if (megatron_dir / HF).is_dir():
        return megatron_dir / HF
    began_with = _model_of_run(megatron_dir.absolute())
    if began_with is None or not began_with.is_dir():
        raise ConfigError(
            explain(
                "the checkpoint has no tokenizer with it",
                where=str(megatron_dir),
                got=began_with and f"the run began with {began_with}, which isn't there",
                expected=f"a directory {HF} in it, as in a converted checkpoint, or the run around it",
                do="name a directory that has tokenizer and chat template by --tokenizer: the model that the run began with",
            )
        )
    return began_with


def _model_of_run(role: Path) -> Path | None:
    """The model in the recipe of the run whose RUN/checkpoints/step_N/actor or critic this is; None where it is no run's."""
    recipe = role.parents[2] / "config.yaml" if len(role.parents) > 2 else None
    if recipe is None or not recipe.is_file():
        return None
    try:
        found = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, ValueError, RecursionError):
        return None
    own = found.get(role.name) if isinstance(found, dict) else None
    named = (own.get("model") if isinstance(own, dict) else None) or (found.get("model") if isinstance(found, dict) else None)
    return Path(named) if isinstance(named, str) else None


def dtypes_of(model: MegatronModel, dtype: str | None) -> dict[str, torch.dtype]:
    """Hugging Face tensor -> the dtype that it will have."""
    if dtype is not None:
        return dict.fromkeys(model.plan.shapes, DTYPES[dtype])
    stored = {copy.source.name: model.dtype(target) for target in model.plan.targets for copy in target.copies}
    noted = {name: model.record.dtype_of(name) for name in model.plan.shapes}
    return {name: stored[name] if dtype_name is None else DTYPES[dtype_name] for name, dtype_name in noted.items()}


def config_of(model: MegatronModel, dtypes: Mapping[str, torch.dtype], *, changed: bool) -> dict[str, Any]:
    """The configuration to write: the converted directory's own where dtypes are, a run's with the head and the dtype that it stored."""
    config = {key: value for key, value in model.record.hf_config.items() if key != "quantization_config"}
    if model.record.converted and not changed:
        return config
    counts: dict[torch.dtype, int] = {}
    for name in dtypes:
        counts[dtypes[name]] = counts.get(dtypes[name], 0) + 1
    most = max(counts, key=lambda dtype: counts[dtype])
    named = config.get("dtype") or config.get("torch_dtype")
    if named == DTYPE_NAMES[most] and (model.record.head == "lm" or architecture_of(config).endswith("ForSequenceClassification")):
        return config
    return export_config(config, most, model.record.head)


def group_units(units: Iterator[Unit]) -> list[list[Unit]]:
    """Units in order, in groups after which a conversion can be taken up again."""
    groups: list[list[Unit]] = [[]]
    used = 0
    for unit in units:
        if groups[-1] and used + unit.nbytes > GROUP_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(unit)
        used += unit.nbytes
    return groups


def reading(model: MegatronModel) -> Callable[[Unit], torch.Tensor]:
    """Reads some rows of a parameter, for :func:`read_ahead`, of which two are in use at once: the third has the memory of the first."""
    memories = cycle((Memory(), Memory()))

    def read(unit: Unit) -> torch.Tensor:
        out = next(memories).tensor(box_shape(unit.local), model.dtype(unit.target))
        model.read(unit, out)
        return out

    return read


def write_unit(writer: HfWriter, unit: Unit, numbers: torch.Tensor) -> None:
    """Write what some rows of a parameter hold of each Hugging Face tensor."""
    for source, into in unit.target.within(unit.local):
        writer.write(source, numbers[as_slices(into.box)])


def _purpose(model: MegatronModel, laid: Laid, config: Mapping[str, Any], beside: Path) -> dict[str, Any]:
    """What the result depends on: a source of other sizes or times is another one."""
    names = sorted({info.relative_path for info in model.reader.stored.values()} | {METADATA, RECORD})
    files = {name: os.stat(model.directory / name) for name in names}
    return {
        "format": 1,
        "conversion": "to Hugging Face",
        "source": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()},
        "files": dict(laid.sizes),
        "config": json.dumps(config, sort_keys=True),
        "beside": str(beside.absolute()),
        "config_name": CONFIG,
    }
