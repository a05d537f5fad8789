"""The declarative table of one model family, and what follows from it: every rank's parameters as copies of Hugging Face tensors.

A :class:`Row` names a Megatron parameter, the Hugging Face tensors in it, how they lie in it (the op), and along which
dimension tensor parallelism cuts it. All ops are copies of boxes, hence invertible: loading reads a copy forward, export
backward, and resharding joins two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from megarl.errors import ModelError, explain
from megarl.types import Layout, Rank
from megarl.weights.regions import Copy, Region, cut_target, whole

# Rows of embedding and output layer per tensor-parallel rank are a multiple of this: 16 bf16 numbers are the 32 bytes
# that tensor cores want aligned, and a tiny vocabulary isn't doubled by it.
VOCABULARY_MULTIPLE = 16

FIRST, LAYER, LAST = "first stage", "each layer", "last stage"


def padded_vocab_size(vocab: int, tensor: int) -> int:
    """Rows of embedding and output layer over all ``tensor`` ranks: ``vocab`` rounded up to a multiple of 16 per rank."""
    multiple = tensor * VOCABULARY_MULTIPLE
    return -(-vocab // multiple) * multiple


@dataclass(frozen=True)
class ModelSizes:
    """The numbers of one model, in elements."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    query_groups: int  # key/value heads
    head_dim: int
    vocab: int
    tied: bool  # output layer = embedding
    experts: int = 0  # of each mixture layer; 0: a dense model
    expert_ffn: int = 0  # of one expert

    def of(self, symbol: str) -> int:
        """The length behind a symbol of the table: hidden, ffn, vocab, q, kv, head, experts, expert_ffn, one."""
        lengths = {"hidden": self.hidden, "ffn": self.ffn, "vocab": self.vocab, "one": 1, "head": self.head_dim}
        lengths |= {"q": self.heads * self.head_dim, "kv": self.query_groups * self.head_dim}
        lengths |= {"experts": self.experts, "expert_ffn": self.expert_ffn}
        return lengths[symbol]


@dataclass(frozen=True)
class HfTensor:
    """A Hugging Face tensor of the table: its name with ``{layer}`` (and ``{expert}``) and the symbols of its shape."""

    name: str
    dims: tuple[str, ...]

    def region(self, sizes: ModelSizes, layer: int | None = None, expert: int | None = None) -> Region:
        """All of the tensor in decoder layer ``layer``, for its expert ``expert``; both are counted over the whole model."""
        return Region(self.name.format(layer=layer, expert=expert), whole([sizes.of(dim) for dim in self.dims]))


@dataclass(frozen=True)
class Whole:
    """One parameter with the shards of all tensor-parallel ranks laid end to end: its shape and where its elements come from."""

    shape: tuple[int, ...]
    copies: tuple[Copy, ...]


# (whole Hugging Face tensors, sizes, tensor-parallel ranks) -> where they lie in the Megatron parameter
Op = Callable[[tuple[Region, ...], ModelSizes, int], Whole]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    megatron: str  # name of the parameter; {layer} counts within the model chunk, {expert} within the rank
    hf: tuple[HfTensor, ...]
    op: Op
    tensor_axis: int | None  # dimension cut by tensor parallelism; None: every rank holds all of it
    place: str = LAYER
    te: str | None = None  # name under the Transformer Engine spec, where it differs
    duplicate: bool = False  # a second copy of what another stage owns
    optional: bool = False  # absent from a language model's directory
    expert: bool = False  # one of the experts of a mixture, cut by expert parallelism

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

    def owned_by(self, rank: Rank) -> bool:
        """Whether ``rank``'s copy, of all replicas, is the one that an export writes."""
        first_replica = rank.expert_data == 0 if self.expert else rank.data == 0 and rank.context == 0
        first_holder = not self.replicated_over_tp or (rank.expert_tensor if self.expert else rank.tensor) == 0
        return first_replica and first_holder and not self.duplicate


def copy_op(tensors: tuple[Region, ...], sizes: ModelSizes, tensor: int) -> Whole:
    """The parameter is the tensor."""
    (source,) = tensors
    return Whole(tuple(stop for _, stop in source.box), (Copy(source, Region("", source.box)),))


def pad_vocabulary(tensors: tuple[Region, ...], sizes: ModelSizes, tensor: int) -> Whole:
    """The tensor, then zero rows up to :func:`padded_vocab_size`; those have no Hugging Face counterpart."""
    (source,) = tensors
    shape = (padded_vocab_size(sizes.vocab, tensor), *(stop for _, stop in source.box[1:]))
    return Whole(shape, (Copy(source, Region("", source.box)),))


def gate_up(tensors: tuple[Region, ...], sizes: ModelSizes, tensor: int) -> Whole:
    """``linear_fc1`` of a gated MLP: each rank's rows are [its rows of gate; its rows of up]."""
    _divides("the intermediate size", tensors[0].box[0][1], tensor)
    return _interleave(tensors, blocks=tensor)


def qkv_by_group(tensors: tuple[Region, ...], sizes: ModelSizes, tensor: int) -> Whole:
    """``linear_qkv``: for each key/value head in turn, rows of its query heads, of its key, of its value.

    Holds for the weight [rows, hidden] and the bias [rows]. See megatron-core, ``SelfAttention.get_query_key_value_tensors``.
    """
    _divides("num_attention_heads", sizes.heads, sizes.query_groups)
    _divides("num_key_value_heads", sizes.query_groups, tensor)
    return _interleave(tensors, blocks=sizes.query_groups)


def _interleave(tensors: tuple[Region, ...], blocks: int) -> Whole:
    """Cut each tensor into ``blocks`` of rows; lay down block 0 of each, then block 1 of each, and so on."""
    copies: list[Copy] = []
    row = 0
    for block in range(blocks):
        for name, box in tensors:
            rows = box[0][1] // blocks
            source = ((block * rows, (block + 1) * rows), *box[1:])
            copies.append(Copy(Region(name, source), Region("", ((row, row + rows), *box[1:]))))
            row += rows
    return Whole((row, *(stop for _, stop in tensors[0].box[1:])), tuple(copies))


_HOW_TO_DIVIDE = {
    "num_hidden_layers": "use a number of pipeline stages (times model chunks of each) that divides it",
    "num_experts": "use a number of expert-parallel ranks that divides it",
}


def _divides(key: str, size: int, parts: int) -> None:
    if size % parts:
        raise ModelError(
            explain(
                f"`{key}` can't be split evenly",
                got=f"{key} = {size}, to be split into {parts}",
                expected=f"a multiple of {parts}",
                do=_HOW_TO_DIVIDE.get(key, "use fewer tensor-parallel ranks"),
            )
        )


def shard_row(row: Row, sizes: ModelSizes, rank: Rank, layer: int | None = None, expert: int | None = None) -> ParameterShard:
    """What one rank holds of one row; ``layer`` and ``expert`` are counted over the whole model."""
    parts, place = (rank.layout.expert_tensor, rank.expert_tensor) if row.expert else (rank.layout.tensor, rank.tensor)
    tensors = tuple(t.region(sizes, layer, expert) for t in row.hf)
    full = row.op(tensors, sizes, parts)
    box = list(whole(full.shape))
    if row.tensor_axis is not None:
        length = full.shape[row.tensor_axis]
        _divides(f"dimension {row.tensor_axis} of {row.megatron}", length, parts)
        per_rank = length // parts
        box[row.tensor_axis] = (place * per_rank, (place + 1) * per_rank)
    return ParameterShard(
        shape=tuple(stop - start for start, stop in box),
        copies=tuple(cut_target(full.copies, "", tuple(box))),
        replicated_over_tp=row.tensor_axis is None,
        hf_tensors=tensors,
        duplicate=row.duplicate,
        optional=row.optional,
        expert=row.expert,
    )


@dataclass(frozen=True)
class Family:
    """A model family: how to read its ``config.json`` and its rows."""

    model_type: str
    sizes: Callable[[Mapping], ModelSizes]  # raises ModelError naming a key that Megatron can't represent
    megatron_kwargs: Callable[[Mapping], dict[str, dict]]  # {"transformer": TransformerConfig's, "model": GPTModel's}
    layer_rows: tuple[Row, ...]
    embedding: Row
    final_norm: Row
    output: Row
    tied_output: Row
    value_head: Row

    def shard(self, hf_config: Mapping, rank: Rank, *, head: str = "lm", spec: str = "local") -> dict[str, ParameterShard]:
        """All parameters of one rank, by their names in its ``model.named_parameters()``.

        ``head``: "lm" (vocabulary logits) or "value" (one number a token). ``spec``: "local" or "te", megatron-core's layer specs.
        Layers are dealt evenly and in order to the stages, chunk after chunk; with several chunks a rank, "chunk0." and so on stands
        before the names. Raises ModelError where the layout doesn't fit the model.
        """
        sizes, layout = self.sizes(hf_config), rank.layout
        self._check(sizes, layout, head, spec)
        per_chunk = sizes.layers // (layout.pipeline * layout.virtual_pipeline)
        shards: dict[str, ParameterShard] = {}
        for chunk in range(layout.virtual_pipeline):
            prefix = chunk_prefix(layout, chunk)
            for row in self._edge_rows(sizes, layout, head):
                if (row.place == FIRST and rank.holds("first", chunk)) or (row.place == LAST and rank.holds("last", chunk)):
                    self._add(shards, prefix + row.name(spec), shard_row(row, sizes, rank))
            start = (chunk * layout.pipeline + rank.pipeline) * per_chunk
            for local in range(per_chunk):
                for row in self.layer_rows:
                    for name, shard in self._layer_shards(row, sizes, rank, spec, local, start + local):
                        self._add(shards, prefix + name, shard)
        return shards

    @staticmethod
    def _layer_shards(row: Row, sizes: ModelSizes, rank: Rank, spec: str, local: int, layer: int) -> Iterator[tuple[str, ParameterShard]]:
        """(name, shard) of one row in one layer: one, or one an expert of the rank."""
        if not row.expert:
            yield row.name(spec, local), shard_row(row, sizes, rank, layer)
            return
        held = sizes.experts // rank.layout.expert
        for expert in range(held):
            yield row.name(spec, local, expert), shard_row(row, sizes, rank, layer, rank.expert * held + expert)

    def hf_tensors(self, hf_config: Mapping, *, head: str = "lm") -> dict[str, tuple[int, ...]]:
        """Name and shape of every Hugging Face tensor of the model, in the order in which files hold them."""
        sizes = self.sizes(hf_config)
        regions = [t.region(sizes) for t in self.embedding.hf]
        for layer in range(sizes.layers):
            for row in self.layer_rows:
                experts = range(sizes.experts) if row.expert else (None,)
                regions += [t.region(sizes, layer, expert) for expert in experts for t in row.hf]
        regions += [t.region(sizes) for row in self._edge_rows(sizes, Layout(), head)[1:] for t in row.hf]
        return {name: tuple(stop for _, stop in box) for name, box in regions}

    def _edge_rows(self, sizes: ModelSizes, layout: Layout, head: str) -> list[Row]:
        """Rows outside the decoder layers. A tied output layer is the embedding itself unless the stages differ."""
        rows = [self.embedding, self.final_norm]
        if head == "value":
            return [*rows, self.value_head]
        if not sizes.tied:
            return [*rows, self.output]
        return [*rows, self.tied_output] if layout.pipeline > 1 else rows

    @staticmethod
    def _add(shards: dict[str, ParameterShard], name: str, shard: ParameterShard) -> None:
        shards[name] = replace(shard, copies=tuple(Copy(c.source, Region(name, c.target.box)) for c in shard.copies))

    def _check(self, sizes: ModelSizes, layout: Layout, head: str, spec: str) -> None:
        _divides("num_hidden_layers", sizes.layers, layout.pipeline * layout.virtual_pipeline)
        _divides("num_attention_heads", sizes.heads, layout.tensor)
        if sizes.experts:
            _divides("num_experts", sizes.experts, layout.expert)
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
