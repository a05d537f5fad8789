"""Read a result again and compare it with its source, bit for bit, piece by piece."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.convert.hf_model import open_hf_model
from megarl.convert.megatron_model import open_megatron_model
from megarl.convert.progress import Progress
from megarl.errors import CheckpointError, explain
from megarl.weights.casts import cast
from megarl.weights.hf_source import Files
from megarl.weights.regions import as_slices, box_shape


class DiffersError(CheckpointError):
    """A result isn't what its source is: a fault in megarl, or in the machine."""


def verify(hf_dir: Path, megatron_dir: Path, *, by_demand: bool = False, quiet: bool = False) -> int:
    """Compare every element of two directories of one model. Returns how many were equal, which is all.

    Where a checkpoint's tensor is of a wider dtype, since its sources differ, what it holds is the same number exactly. ``by_demand``: the
    Hugging Face directory was written with another dtype, to which the checkpoint's numbers are cast. Raises DiffersError for the first
    tensor that differs.
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
                if not same_bits(mine, stored[as_slices(into.box)], by_demand=by_demand):
                    raise _differs(f"{source} of {hf_dir}, {unit.target.place.key} of {megatron_dir}")
            if progress:
                progress.add(unit.nbytes)
    if progress:
        progress.finish()
    if compared != hf.plan.elements:
        raise _differs(f"{hf_dir}: {hf.plan.elements:,} elements, of which {compared:,} are in {megatron_dir}")
    return compared


def same_bits(mine: torch.Tensor, stored: torch.Tensor, *, by_demand: bool = False) -> bool:
    """Whether two tensors of one shape are equal bit by bit, widened to a dtype that holds both; ``by_demand``: cast to the first's."""
    common = mine.dtype if by_demand else torch.promote_types(mine.dtype, stored.dtype)
    a, b = (cast(tensor, common, "the comparison").contiguous() for tensor in (mine, stored))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _differs(where: str) -> DiffersError:
    return DiffersError(
        explain(
            "the result differs from its source",
            where=where,
            do="convert again. A difference that comes back in the same place is a fault in megarl: report it; "
            "one elsewhere points to disk or memory, or to a source that changed meanwhile",
        )
    )
