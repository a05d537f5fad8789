"""How Hugging Face tensors lie in a Megatron parameter. Every op is a set of copies of boxes, hence invertible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megarl.errors import ModelError, explain
from megarl.weights.regions import Copy, Region, box_shape
from megarl.weights.sizes import ModelSizes, padded_vocab_size


@dataclass(frozen=True)
class Whole:
    """One parameter with the shards of all tensor-parallel ranks laid end to end: its shape and where its elements come from."""

    shape: tuple[int, ...]
    copies: tuple[Copy, ...]


# (Hugging Face tensors, or the parts of a fused one; sizes; tensor-parallel ranks) -> where they lie in the Megatron parameter
Op = Callable[[tuple[Region, ...], ModelSizes, int], Whole]


def copy_op(parts: tuple[Region, ...], sizes: ModelSizes, tensor: int) -> Whole:
    """The parameter is the tensor; of several, one behind the other along the first dimension."""
    return _interleave(parts, blocks=1)


def pad_vocabulary(parts: tuple[Region, ...], sizes: ModelSizes, tensor: int) -> Whole:
    """The tensor, then zero rows up to :func:`padded_vocab_size`; those have no Hugging Face counterpart."""
    (source,) = parts
    shape = (padded_vocab_size(sizes.vocab, tensor), *box_shape(source.box)[1:])
    return Whole(shape, (Copy(source, Region("", source.box)),))


def gate_up(parts: tuple[Region, ...], sizes: ModelSizes, tensor: int) -> Whole:
    """``linear_fc1`` of a gated MLP: each rank's rows are [its rows of gate; its rows of up]."""
    divides("the intermediate size", box_shape(parts[0].box)[0], tensor)
    return _interleave(parts, blocks=tensor)


def qkv_by_group(parts: tuple[Region, ...], sizes: ModelSizes, tensor: int) -> Whole:
    """``linear_qkv``: for each key/value head in turn, rows of its query heads, of its key, of its value.

    Holds for the weight [rows, hidden] and the bias [rows]. With more tensor-parallel ranks than key/value heads a rank's rows are a part
    of a head's, and megatron-core puts them together again. See megatron-core, ``SelfAttention.get_query_key_value_tensors``.
    """
    divides("num_attention_heads", sizes.heads, sizes.query_groups)
    if sizes.query_groups % tensor and tensor % sizes.query_groups:
        raise ModelError(
            explain(
                "`num_key_value_heads` can't be split evenly",
                got=f"num_key_value_heads = {sizes.query_groups}, tensor {tensor}",
                expected="one of them a multiple of the other",
                do="use another number of tensor-parallel ranks",
            )
        )
    return _interleave(parts, blocks=sizes.query_groups)


def _interleave(parts: tuple[Region, ...], blocks: int) -> Whole:
    """Cut each part into ``blocks`` of rows; lay down block 0 of each, then block 1 of each, and so on."""
    copies: list[Copy] = []
    row = 0
    for block in range(blocks):
        for name, box in parts:
            start, stop = box[0]
            rows = (stop - start) // blocks
            source = ((start + block * rows, start + (block + 1) * rows), *box[1:])
            copies.append(Copy(Region(name, source), Region("", ((row, row + rows), *_from_zero(box)[1:]))))
            row += rows
    return Whole((row, *box_shape(parts[0].box)[1:]), tuple(copies))


def _from_zero(box: tuple) -> tuple:
    return tuple((0, stop - start) for start, stop in box)


_HOW_TO_DIVIDE = {"num_experts": "use a number of expert-parallel ranks that divides it"}


def divides(key: str, size: int, parts: int) -> None:
    """Raise ModelError unless ``size``, which config.json calls ``key``, can be cut into ``parts``."""
    if size % parts:
        raise ModelError(
            explain(
                f"`{key}` can't be split evenly",
                got=f"{key} = {size}, to be split into {parts}",
                expected=f"a multiple of {parts}",
                do=_HOW_TO_DIVIDE.get(key, "use fewer tensor-parallel ranks"),
            )
        )
