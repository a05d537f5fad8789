"""The declarative table of one model family, and what follows from it: every rank's parameters as copies of Hugging Face tensors.

A :class:`Row` names a Megatron parameter, the Hugging Face tensors in it, how they lie in it (the op), and along which
dimension tensor parallelism cuts it. All ops are copies of boxes, hence invertible: loading reads a copy forward, export
backward, and resharding joins two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from megarl.errors import ModelError, explain
from megarl.types import Layout
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

    def of(self, symbol: str) -> int:
        """The length behind a symbol of the table: hidden, ffn, vocab, q, kv, one."""
        lengths = {"hidden": self.hidden, "ffn": self.ffn, "vocab": self.vocab, "one": 1}
        lengths |= {"q": self.heads * self.head_dim, "kv": self.query_groups * self.head_dim}
        return lengths[symbol]


@dataclass(frozen=True)
class HfTensor:
    """A Hugging Face tensor of the table: its name with ``{layer}`` and the symbols of its shape."""

    name: str
    dims: tuple[str, ...]

    def region(self, sizes: ModelSizes, layer: int | None) -> Region:
        """All of the tensor in decoder layer ``layer`` (counted over the whole model)."""
        name = self.name if layer is None else self.name.format(layer=layer)
        return Region(name, whole([sizes.of(dim) for dim in self.dims]))


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

    megatron: str  # name of the parameter; {layer} counts within the pipeline stage
    hf: tuple[HfTensor, ...]
    op: Op
    tensor_axis: int | None  # dimension cut by tensor parallelism; None: every rank holds all of it
    place: str = LAYER
    te: str | None = None  # name under the Transformer Engine spec, where it differs
    duplicate: bool = False  # a second copy of what another stage owns
    optional: bool = False  # absent from a language model's directory
    expert: bool = False  # one of the experts of a mixture, cut by expert parallelism

    def name(self, spec: str, local_layer: int | None) -> str:
        """The parameter's name in ``model.named_parameters()`` of its stage."""
        pattern = self.te if spec == "te" and self.te is not None else self.megatron
        return pattern if local_layer is None else pattern.format(layer=local_layer)


@dataclass(frozen=True)
class ParameterShard:
    """One parameter of one rank."""

    shape: tuple[int, ...]
    copies: tuple[Copy, ...]  # Hugging Face region -> region of this parameter; elements outside all targets are padding (zero)
    replicated_over_tp: bool  # every tensor-parallel rank holds the same
    hf_tensors: tuple[Region, ...] = ()  # all of each Hugging Face tensor in it
    duplicate: bool = False  # tied output layer of the last pipeline stage: the embedding once more
    optional: bool = False  # value head: a language model's directory has no such tensor

    def owned_by(self, tp_rank: int) -> bool:
        """Whether this rank's copy is the one that an export writes."""
        return not self.duplicate and (not self.replicated_over_tp or tp_rank == 0)


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
    _divides("intermediate_size", sizes.ffn, tensor)
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


def _divides(key: str, size: int, parts: int) -> None:
    if size % parts:
        raise ModelError(
            explain(
                f"`{key}` can't be split evenly",
                got=f"{key} = {size}, to be split into {parts}",
                expected=f"a multiple of {parts}",
                do="use a number of pipeline stages that divides it" if key == "num_hidden_layers" else "use fewer tensor-parallel ranks",
            )
        )


def shard_row(row: Row, sizes: ModelSizes, layout: Layout, tp_rank: int, layer: int | None) -> ParameterShard:
    """What one rank holds of one row; ``layer`` counts over the whole model."""
    tensors = tuple(t.region(sizes, layer) for t in row.hf)
    full = row.op(tensors, sizes, layout.tensor)
    box = list(whole(full.shape))
    if row.tensor_axis is not None:
        length = full.shape[row.tensor_axis]
        _divides(f"dimension {row.tensor_axis} of {row.megatron}", length, layout.tensor)
        per_rank = length // layout.tensor
        box[row.tensor_axis] = (tp_rank * per_rank, (tp_rank + 1) * per_rank)
    return ParameterShard(
        shape=tuple(stop - start for start, stop in box),
        copies=tuple(cut_target(full.copies, "", tuple(box))),
        replicated_over_tp=row.tensor_axis is None,
        hf_tensors=tensors,
        duplicate=row.duplicate,
        optional=row.optional,
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

    def shard(
        self, hf_config: Mapping, layout: Layout, tp_rank: int, pp_rank: int, *, head: str = "lm", spec: str = "local"
    ) -> dict[str, ParameterShard]:
        """All parameters of one rank, by their names in its ``model.named_parameters()``.

        ``head``: "lm" (vocabulary logits) or "value" (one number a token). ``spec``: "local" or "te", megatron-core's layer specs.
        Layers are split evenly over stages, contiguous. Raises ModelError where the layout doesn't fit the model.
        """
        sizes = self.sizes(hf_config)
        self._check(sizes, layout, head, spec)
        per_stage = sizes.layers // layout.pipeline
        shards: dict[str, ParameterShard] = {}
        for row in self._edge_rows(sizes, layout, head):
            if (row.place == FIRST and pp_rank == 0) or (row.place == LAST and pp_rank == layout.pipeline - 1):
                self._add(shards, row.name(spec, None), shard_row(row, sizes, layout, tp_rank, None))
        for local in range(per_stage):
            for row in self.layer_rows:
                self._add(shards, row.name(spec, local), shard_row(row, sizes, layout, tp_rank, pp_rank * per_stage + local))
        return shards

    def hf_tensors(self, hf_config: Mapping, *, head: str = "lm") -> dict[str, tuple[int, ...]]:
        """Name and shape of every Hugging Face tensor of the model, in the order in which files hold them."""
        sizes = self.sizes(hf_config)
        regions = [t.region(sizes, None) for t in self.embedding.hf]
        regions += [t.region(sizes, layer) for layer in range(sizes.layers) for row in self.layer_rows for t in row.hf]
        regions += [t.region(sizes, None) for row in self._edge_rows(sizes, Layout(), head)[1:] for t in row.hf]
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
        _divides("num_hidden_layers", sizes.layers, layout.pipeline)
        _divides("num_attention_heads", sizes.heads, layout.tensor)
        if layout.virtual_pipeline != 1:
            raise ModelError(
                explain(
                    "interleaved pipeline stages aren't supported",
                    got=f"virtual_pipeline = {layout.virtual_pipeline}",
                    expected="1",
                    do="set virtual_pipeline to 1",
                )
            )
        if head not in ("lm", "value"):
            raise ModelError(explain("unknown head", got=head, expected="lm or value"))
        if spec not in ("local", "te"):
            raise ModelError(explain("unknown layer spec", got=spec, expected="local or te"))
