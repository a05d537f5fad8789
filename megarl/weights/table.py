"""The declarative table of one model family, and what follows from it: every rank's parameters as copies of Hugging Face tensors.

A :class:`Row` names a Megatron parameter, the Hugging Face tensors in it, how they lie in it (the op), and along which
dimension tensor parallelism cuts it. All ops are copies of boxes, hence invertible: loading reads a copy forward, export
backward, and resharding joins two of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.errors import ModelError, explain
from megarl.types import Layout, Rank
from megarl.weights.architecture import Architecture
from megarl.weights.ops import Op, divides
from megarl.weights.regions import Copy, Region, box_shape, cut_target, whole
from megarl.weights.sizes import ModelSizes
from megarl.weights.stages import deal_layers

FIRST, LAYER, LAST = "first stage", "each layer", "last stage"


@dataclass(frozen=True)
class HfTensor:
    """A Hugging Face tensor of the table: its name with ``{layer}`` (and ``{expert}``) and the symbols of its shape.

    A first dimension that is a sum, as "q+kv+kv", says that the tensor is that many tensors, fused along it.
    """

    name: str
    dims: tuple[str, ...]

    def region(self, sizes: ModelSizes, layer: int | None = None, expert: int | None = None) -> Region:
        """All of the tensor in decoder layer ``layer``, for its expert ``expert``; both are counted over the whole model."""
        return Region(self.name.format(layer=layer, expert=expert), whole([sizes.of(dim) for dim in self.dims]))

    def parts(self, sizes: ModelSizes, layer: int | None = None, expert: int | None = None) -> list[Region]:
        """The tensors that are fused in it, in order; it alone where none are."""
        name, box = self.region(sizes, layer, expert)
        found, start = [], 0
        for symbol in self.dims[0].split("+"):
            stop = start + sizes.of(symbol)
            found.append(Region(name, ((start, stop), *box[1:])))
            start = stop
        return found


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    megatron: str  # name of the parameter; {layer} counts within the model chunk, {expert} within the rank
    hf: tuple[HfTensor, ...]
    op: Op
    tensor_axis: int | None  # dimension cut by tensor parallelism; None: every rank holds all of it
    place: str = LAYER
    te: str | None = None  # name under the Transformer Engine spec, where it differs
    te_whole: bool = False  # under the Transformer Engine spec every rank holds all of it
    duplicate: bool = False  # a second copy of what another stage owns
    optional: bool = False  # absent from a language model's directory
    expert: bool = False  # one of the experts of a mixture, cut by expert parallelism
    float32: bool = False  # kept in float32 whatever the model's dtype
    # What directories with stacked experts have in place of ``hf``: one tensor, experts along the first dimension, ``hf`` along the next.
    stacked: HfTensor | None = None

    def name(self, spec: str, local_layer: int | None = None, local_expert: int | None = None) -> str:
        """The parameter's name in ``model.named_parameters()`` of its model chunk."""
        pattern = self.te if spec == "te" and self.te is not None else self.megatron
        return pattern.format(layer=local_layer, expert=local_expert)


@dataclass(frozen=True)
class ParameterShard:
    """One parameter of one rank."""

    shape: tuple[int, ...]
    copies: tuple[Copy, ...]  # Hugging Face region -> region of this parameter; elements outside all targets are padding (zero)
    replicated_over_tp: bool  # every (expert-)tensor-parallel rank holds the same
    hf_tensors: tuple[Region, ...] = ()  # all of each Hugging Face tensor in it
    duplicate: bool = False  # tied output layer of the last pipeline stage: the embedding once more
    optional: bool = False  # value head: a language model's directory has no such tensor
    expert: bool = False  # cut over the ranks of a stage by ``expert`` and ``expert_tensor``, not by ``tensor``
    float32: bool = False  # kept in float32 whatever the model's dtype

    def owned_by(self, rank: Rank) -> bool:
        """Whether ``rank``'s copy, of all replicas, is the one that an export writes."""
        first_replica = rank.expert_data == 0 if self.expert else rank.data == 0 and rank.context == 0
        first_holder = not self.replicated_over_tp or (rank.expert_tensor if self.expert else rank.tensor) == 0
        return first_replica and first_holder and not self.duplicate


def shard_row(row: Row, sizes: ModelSizes, rank: Rank, spec: str, layer: int | None = None, expert: int | None = None) -> ParameterShard:
    """What one rank holds of one row; ``layer`` and ``expert`` are counted over the whole model."""
    parts, place = (rank.layout.expert_tensor, rank.expert_tensor) if row.expert else (rank.layout.tensor, rank.tensor)
    axis = None if spec == "te" and row.te_whole else row.tensor_axis
    full = row.op(tuple(part for t in row.hf for part in t.parts(sizes, layer, expert)), sizes, parts)
    box = list(whole(full.shape))
    if axis is not None:
        divides(f"dimension {axis} of {row.megatron}", full.shape[axis], parts)
        per_rank = full.shape[axis] // parts
        box[axis] = (place * per_rank, (place + 1) * per_rank)
    return ParameterShard(
        shape=box_shape(tuple(box)),
        copies=tuple(cut_target(full.copies, "", tuple(box))),
        replicated_over_tp=axis is None,
        hf_tensors=tuple(t.region(sizes, layer, expert) for t in row.hf),
        duplicate=row.duplicate,
        optional=row.optional,
        expert=row.expert,
        float32=row.float32,
    )


@dataclass(frozen=True)
class Table:
    """All rows of one model."""

    sizes: ModelSizes
    layers: tuple[tuple[Row, ...], ...]  # of each decoder layer
    embedding: Row
    final_norm: tuple[Row, ...]
    output: Row
    tied_output: Row
    value_head: Row

    def edges(self, layout: Layout, head: str) -> list[Row]:
        """Rows outside the decoder layers. A tied output layer is the embedding itself unless the stages differ."""
        rows = [self.embedding, *self.final_norm]
        if head == "value":
            return [*rows, self.value_head]
        if not self.sizes.tied:
            return [*rows, self.output]
        return [*rows, self.tied_output] if layout.pipeline > 1 else rows

    def experts(self, row: Row) -> range | tuple[None]:
        """The experts of which ``row`` speaks, over the whole model."""
        return range(self.sizes.experts) if row.expert else (None,)


@dataclass(frozen=True)
class Family:
    """A model family: how to read its ``config.json``, and its rows."""

    model_type: str
    table: Callable[[Mapping], Table]  # raises ModelError naming a key whose weights it has no rows for
    # {"transformer": TransformerConfig's arguments, "model": GPTModel's}; raises ModelError naming a key that can't be computed
    megatron_kwargs: Callable[[Mapping], dict[str, dict[str, Any]]]
    architecture: Callable[[Mapping], Architecture] = lambda hf_config: Architecture()
    # Tensors of published directories that training has no use for: a pattern of their whole name, and the reason. Never another's.
    unused: Callable[[Mapping], tuple[tuple[str, str], ...]] = lambda hf_config: ()

    def sizes(self, hf_config: Mapping) -> ModelSizes:
        """The lengths of one model."""
        return self.table(hf_config).sizes

    def check_computed(self, hf_config: Mapping) -> None:
        """Raise ModelError naming a key of ``config.json`` that can't be computed."""
        self.megatron_kwargs(hf_config)
        self.architecture(hf_config)

    def shard(self, hf_config: Mapping, rank: Rank, *, head: str = "lm", spec: str = "local") -> dict[str, ParameterShard]:
        """All parameters of one rank, by their names in its ``model.named_parameters()``, and persistent buffers that are weights.

        ``head``: "lm" (vocabulary logits) or "value" (one number a token). ``spec``: "local" or "te", the layer specs.
        Layers are dealt in order to the stages, chunk after chunk (:func:`deal_layers`); with several chunks a rank, "chunk0." and so on
        stands before the names. Raises ModelError where the layout doesn't fit the model.
        """
        table, layout = self.table(hf_config), rank.layout
        self._check(table.sizes, layout, head, spec)
        dealt = deal_layers(table.sizes.layers, layout)
        shards: dict[str, ParameterShard] = {}
        for chunk in range(layout.virtual_pipeline):
            prefix = chunk_prefix(layout, chunk)
            for row in table.edges(layout, head):
                if (row.place == FIRST and rank.holds("first", chunk)) or (row.place == LAST and rank.holds("last", chunk)):
                    self._add(shards, prefix + row.name(spec), shard_row(row, table.sizes, rank, spec))
            for local, layer in enumerate(dealt[chunk * layout.pipeline + rank.pipeline]):
                for row in table.layers[layer]:
                    for name, shard in self._layer_shards(row, table.sizes, rank, spec, local, layer):
                        self._add(shards, prefix + name, shard)
        return shards

    @staticmethod
    def _layer_shards(row: Row, sizes: ModelSizes, rank: Rank, spec: str, local: int, layer: int) -> Iterator[tuple[str, ParameterShard]]:
        """(name, shard) of one row in one layer: one, or one an expert of the rank."""
        if not row.expert:
            yield row.name(spec, local), shard_row(row, sizes, rank, spec, layer)
            return
        held = sizes.experts // rank.layout.expert
        for expert in range(held):
            yield row.name(spec, local, expert), shard_row(row, sizes, rank, spec, layer, rank.expert * held + expert)

    def hf_tensors(self, hf_config: Mapping, *, head: str = "lm") -> dict[str, tuple[int, ...]]:
        """Name and shape of every Hugging Face tensor of the model, in the order in which files hold them."""
        regions = [t.region(*where) for row, where in self._rows(hf_config, head) for t in row.hf]
        return {name: box_shape(box) for name, box in regions}

    def float32_tensors(self, hf_config: Mapping) -> frozenset[str]:
        """Hugging Face tensors that are kept in float32 whatever the model's dtype."""
        return frozenset(t.region(*where).name for row, where in self._rows(hf_config, "lm") if row.float32 for t in row.hf)

    def stacked(self, hf_config: Mapping, *, head: str = "lm") -> dict[str, tuple[Region, tuple[int, ...]]]:
        """Tensor -> the box of another one that holds the same in directories with stacked experts, and that tensor's shape.

        The box of an expert has one dimension more in front.
        """
        found: dict[str, tuple[Region, tuple[int, ...]]] = {}
        for row, (sizes, layer, expert) in self._rows(hf_config, head):
            if row.stacked is None:
                continue
            name, box = row.stacked.region(sizes, layer)
            start, place = 0, () if expert is None else ((expert, expert + 1),)
            for tensor in row.hf:
                here, inner = tensor.region(sizes, layer, expert)
                stop = start + inner[0][1]
                if here != name:
                    found[here] = (Region(name, (*place, (start, stop), *inner[1:])), box_shape(box))
                start = stop
        return found

    def reason_unused(self, hf_config: Mapping, name: str) -> str | None:
        """Why a tensor that the table doesn't have may be left out; None: it may not."""
        return next((reason for pattern, reason in self.unused(hf_config) if re.fullmatch(pattern, name)), None)

    def _rows(self, hf_config: Mapping, head: str) -> Iterator[tuple[Row, tuple[ModelSizes, int | None, int | None]]]:
        """Every row with (sizes, layer, expert), over the whole model."""
        table = self.table(hf_config)
        yield table.embedding, (table.sizes, None, None)
        for layer, rows in enumerate(table.layers):
            for row in rows:
                for expert in table.experts(row):
                    yield row, (table.sizes, layer, expert)
        for row in table.edges(Layout(), head)[1:]:
            yield row, (table.sizes, None, None)

    @staticmethod
    def _add(shards: dict[str, ParameterShard], name: str, shard: ParameterShard) -> None:
        shards[name] = replace(shard, copies=tuple(Copy(c.source, Region(name, c.target.box)) for c in shard.copies))

    def _check(self, sizes: ModelSizes, layout: Layout, head: str, spec: str) -> None:
        divides("num_attention_heads", sizes.heads, layout.tensor)
        if sizes.experts:
            divides("num_experts", sizes.experts, layout.expert)
        elif layout.expert * layout.expert_tensor > 1:
            raise ModelError(
                explain(
                    "expert parallelism for a model without experts",
                    got=f"expert {layout.expert}, expert_tensor {layout.expert_tensor}; model_type {self.model_type}",
                    expected="1 and 1",
                    do="set both to 1, or use a mixture of experts",
                )
            )
        if sizes.experts and layout.tensor > 1 and not layout.sequence_parallel:
            raise ModelError(
                explain(
                    "a mixture of experts under tensor parallelism needs sequence parallelism",
                    got=f"tensor {layout.tensor}, sequence_parallel false",
                    expected="sequence_parallel: true (each token is routed by one rank)",
                    do="set sequence_parallel to true",
                )
            )
        if head not in ("lm", "value"):
            raise ModelError(explain("unknown head", got=head, expected="lm or value"))
        if spec not in ("local", "te"):
            raise ModelError(explain("unknown layer spec", got=spec, expected="local or te"))


def chunk_prefix(layout: Layout, chunk: int) -> str:
    """What stands before the names of model chunk ``chunk``; nothing where a rank has one."""
    return f"chunk{chunk}." if layout.virtual_pipeline > 1 else ""
