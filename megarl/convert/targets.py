"""What goes where: each parameter of the model as a box of a Megatron checkpoint, and the Hugging Face tensors in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from megarl.errors import ModelError, explain
from megarl.types import Layout, Rank
from megarl.weights.checkpoint_keys import Place, place_of, stacks_layers
from megarl.weights.families import model_family
from megarl.weights.hf_export import check_coverage
from megarl.weights.regions import Box, Copy, Region, carry, intersect, whole
from megarl.weights.table import Family

# What is read and written at a time, unless one row of a tensor is longer. Above 32 MiB malloc fetches fresh pages for each block.
PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Target:
    """One parameter of the whole model. ``copies`` lead from Hugging Face tensors to boxes of the parameter alone."""

    name: str  # under the Transformer Engine spec, layers counted over the whole model
    place: Place
    shape: tuple[int, ...]  # without the dimensions of layers and experts
    copies: tuple[Copy, ...]
    optional: bool = False

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor that holds it."""
        return (*self.place.counts, *self.shape)

    def box(self, local: Box) -> Box:
        """Where a box of the parameter lies in the checkpoint's tensor."""
        return (*((i, i + 1) for i in self.place.index), *local)

    def within(self, local: Box) -> list[Copy]:
        """The parts of ``copies`` that meet a box of the parameter, with that box's own coordinates as targets."""
        here = whole([stop - start for start, stop in local])
        found = []
        for source, target in self.copies:
            if (common := intersect(target.box, local)) is not None:
                moved = carry(common, target.box, source.box)
                found.append(Copy(Region(source.name, moved), Region(target.name, carry(common, local, here))))
        return found


@dataclass(frozen=True)
class ModelPlan:
    """All parameters of one model, and all Hugging Face tensors in them, each element once."""

    family: Family
    hf_config: Mapping[str, Any]
    head: str
    targets: tuple[Target, ...]
    shapes: Mapping[str, tuple[int, ...]]  # of the Hugging Face tensors, in the order in which files hold them

    @property
    def elements(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())


def plan_model(hf_config: Mapping[str, Any], head: str) -> ModelPlan:
    """Lay out a model with ``head`` "lm" or "value". Raises ModelError for one that the tables don't know.

    Needs nothing of Megatron: what can't be computed in a lane still converts.
    """
    architecture_of(hf_config)
    family = model_family(hf_config)
    rank = Rank(0, Layout())
    shards = family.shard(hf_config, rank, head=head, spec="te")
    shapes = family.hf_tensors(hf_config, head=head)
    check_coverage(shapes, [(rank, shards)])
    sizes = family.sizes(hf_config)
    stacked = _stacked(family, hf_config)
    targets = []
    for name, shard in shards.items():
        if not shard.duplicate:
            place = place_of(name, layers=sizes.layers, experts=sizes.experts, stacked=stacked)
            targets.append(Target(name, place, shard.shape, shard.copies, shard.optional))
    return ModelPlan(family, hf_config, head, tuple(targets), shapes)


def _stacked(family: Family, hf_config: Mapping[str, Any]) -> bool:
    """Whether megatron-core stacks the layers. A model that it can't compute is laid out as one that it can, and no engine will ask."""
    try:
        return stacks_layers(family.megatron_kwargs(hf_config)["transformer"])
    except ModelError:
        return len(set(family.table(hf_config).layers)) == 1


def head_of(hf_config: Mapping[str, Any]) -> str:
    """ "value" for a ...ForSequenceClassification, else "lm"."""
    return "value" if architecture_of(hf_config).endswith("ForSequenceClassification") else "lm"


def architecture_of(hf_config: Mapping[str, Any]) -> str:
    """The class that config.json names first; "" where it names none. Raises ModelError for what is no list of names."""
    names = hf_config.get("architectures")
    if names is None or names == []:
        return ""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            explain(
                "`architectures` of this model names no class",
                where="config.json",
                got=repr(names)[:200],
                expected='a list of names, as in ["LlamaForCausalLM"]',
                do="correct it",
            )
        )
    return names[0]


def pieces(shape: tuple[int, ...], itemsize: int, limit: int = PIECE_BYTES) -> Iterator[Box]:
    """Boxes of whole rows, in order, of at most ``limit`` bytes each unless one row is longer."""
    if not shape:
        yield ()
        return
    row = prod(shape[1:]) * itemsize
    step = max(1, limit // max(row, 1))
    for start in range(0, shape[0], step):
        yield ((start, min(start + step, shape[0])), *whole(shape[1:]))
