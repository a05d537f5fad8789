"""Read a result again and compare it with its source, bit for bit, piece by piece."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.convert.hf_model import open_hf_model
from megarl.convert.megatron_model import open_megatron_model
from megarl.convert.progress import Progress
from megarl.convert.source import Files
from megarl.errors import CheckpointError, explain
from megarl.weights.regions import as_slices, box_shape


def verify(hf_dir: Path, megatron_dir: Path, *, quiet: bool = False) -> int:
    """Compare every element of two directories of one model. Returns how many were equal, which is all.

    Where a conversion changed the dtype, the numbers of the checkpoint are cast as it did. Raises CheckpointError for the first tensor that
    differs.
    """
    hf = open_hf_model(hf_dir)
    megatron = open_megatron_model(megatron_dir)
    units = list(megatron.units())
    progress = None if quiet else Progress("verify", sum(unit.nbytes for unit in units))
    compared = 0
    with Files(hf_dir, hf.scan.entries) as files:
        for unit in units:
            stored = torch.empty(box_shape(unit.local), dtype=megatron.dtype(unit.target))
            megatron.read(unit, stored)
            for source, into in unit.target.within(unit.local):
                mine = torch.empty(box_shape(source.box), dtype=hf.dtype(source.name))
                hf.read_into(files, source, mine)
                compared += mine.numel()
                if not same_bits(mine, stored[as_slices(into.box)]):
                    raise CheckpointError(
                        explain(
                            "the result differs from its source",
                            where=f"{source} of {hf_dir}, {unit.target.place.key} of {megatron_dir}",
                            do="convert again; if it happens twice, suspect disk or memory",
                        )
                    )
            if progress:
                progress.add(unit.nbytes)
    if progress:
        progress.finish()
    return compared


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape are equal bit by bit, where the wider one is cast if their dtypes differ."""
    if a.dtype is not b.dtype:
        a, b = (a.to(b.dtype), b) if a.itemsize > b.itemsize else (a, b.to(a.dtype))
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
