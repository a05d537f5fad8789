"""Where a parameter lies in a Megatron distributed checkpoint: its key there, and its place among the layers and experts of that key.

The names are those that megatron-core's ``sharded_state_dict`` gives under the Transformer Engine layer spec, whatever the layout:
layers of one kind are stacked along the first dimension of one tensor, experts along the next one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LAYER = re.compile(r"(?P<block>decoder\.layers\.)(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?P<what>linear_fc[12]\.(?:weight|bias))(?P<expert>\d+)")


@dataclass(frozen=True)
class Place:
    """A parameter is ``tensor[key][index]``, of a tensor whose first dimensions are ``counts``."""

    key: str
    index: tuple[int, ...] = ()  # layer, expert, or both
    counts: tuple[int, ...] = ()  # layers, experts


def stacks_layers(transformer: Mapping[str, Any]) -> bool:
    """Whether megatron-core stacks the layers of a model with these arguments of TransformerConfig: not where they are of several kinds."""
    frequency = transformer.get("moe_layer_freq", 1)
    return isinstance(frequency, int) and frequency == 1


def place_of(name: str, *, layers: int, experts: int, stacked: bool) -> Place:
    """The place of parameter ``name``, one of ``Family.shard(..., spec="te")`` on one rank with one stage.

    ``layers``, ``experts``: how many the model has. ``stacked``: see :func:`stacks_layers`.
    """
    if (found := _LAYER.fullmatch(name)) is None:
        return Place(name)
    layer = int(found["layer"])
    rest, expert, counted = _without_expert(found["rest"], experts)
    if not stacked:
        return Place(f"{found['block']}{layer}.{rest}", expert, counted)
    return Place(found["block"] + rest, (layer, *expert), (layers, *counted))


def key_within(key: str, te_name: str) -> str:
    """``key`` of a parameter with the ending that the Transformer Engine spec gives it; ``te_name`` is its name in that spec.

    megatron-core's local spec names a few norms otherwise, so that a checkpoint of one spec could not be loaded by the other.
    """
    block = re.match(r"decoder\.layers\.(?:\d+\.)?", key)
    found = _LAYER.fullmatch(te_name)
    if block is None or found is None:
        return key
    return block[0] + _without_expert(found["rest"], 0)[0]


def _without_expert(rest: str, experts: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The key within its layer, and index and count of the experts' dimension where the parameter is an expert's."""
    if (found := _EXPERT.fullmatch(rest)) is None:
        return rest, (), ()
    return f"mlp.experts.experts.{found['what']}", (int(found["expert"]),), (experts,)
