"""Rotary positions (arXiv:2104.09864) where megatron-core's own aren't enough: scaled ones, and several sets in one model.

Frequencies come from transformers' own functions, so that they are its own bit for bit: Llama 3's and linear scaling, YaRN
(arXiv:2309.00071), LongRoPE (arXiv:2402.13753).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.errors import ModelError, explain
from megarl.megatron.packed import PackedSequences
from megarl.weights.architecture import Architecture


@dataclass(frozen=True)
class Rotary:
    """One set of rotary positions."""

    name: str | None  # key of ``rope_parameters`` in config.json; None: the model has this one alone
    frequencies: torch.Tensor  # [r / 2] float32, radians a position, of the first r dimensions of each head
    factor: float = 1.0  # of query and key each

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, r] float32, radians; both halves are the same."""
        half = positions[:, None].float() * self.frequencies.to(positions.device)
        return torch.cat([half, half], dim=-1)


def rotary_sets(hf_config: Mapping[str, Any], architecture: Architecture, longest: int | None = None) -> dict[str | None, Rotary]:
    """The model's sets by name; none where megatron-core's plain positions of one base are it.

    ``longest``: tokens of the longest sequence that the model is run with (None: max_position_embeddings). LongRoPE has two sets of
    frequencies, and takes the long one, for all sequences, where that is more than original_max_position_embeddings. vLLM chooses so too
    (by max_model_len); else a sequence would change its past while it grows.
    """
    names = set(architecture.ropes) or {None}
    if names == {None} and _is_plain(hf_config):
        return {}
    return rotary_by_name(hf_config, names, longest)


def rotary_by_name(hf_config: Mapping[str, Any], names: set[str | None], longest: int | None = None) -> dict[str | None, Rotary]:
    """The sets of these names, plain ones too; ``longest`` as in :func:`rotary_sets`."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**copy.deepcopy(dict(hf_config)))  # a copy, since it fills up the dictionaries that it is given
    longest = longest or int(config.max_position_embeddings)
    return {name: _rotary(config, name, longest) for name in names}


def _is_plain(hf_config: Mapping[str, Any]) -> bool:
    """Whether positions are scaled by nothing. transformers 5 says so under ``rope_parameters``, 4 under ``rope_scaling``."""
    given = [hf_config.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    return all(rope.get("rope_type", rope.get("type", "default")) == "default" for rope in given)


def _rotary(config: Any, name: str | None, longest: int) -> Rotary:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters if name is None else config.rope_parameters[name]
    kind = rope["rope_type"]
    if kind == "default":
        return Rotary(name, _plain_frequencies(config, rope))
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ModelError(
            explain(
                "unknown scaling of rotary positions",
                where="config.json: rope_type" + ("" if name is None else f" of {name}"),
                got=kind,
                expected="default, " + ", ".join(sorted(ROPE_INIT_FUNCTIONS)),
                do="use a model with one of these",
            )
        )
    only = {} if name is None else {"layer_type": name}
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"), seq_len=longest, **only)
    return Rotary(name, frequencies, float(factor))


def _plain_frequencies(config: Any, rope: Mapping[str, Any]) -> torch.Tensor:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = int(head * rope.get("partial_rotary_factor", 1.0))
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned))


def rotate(x: torch.Tensor, rotary: Rotary, sequences: PackedSequences) -> torch.Tensor:
    """Queries or keys [T, heads, d], turned by their positions. Dimensions behind the first r stay as they are."""
    cos, sin = _turns(rotary, sequences, x.dtype)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def _turns(rotary: Rotary, sequences: PackedSequences, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [T, 1, r], computed by the first layer that asks for them in a micro-batch."""
    key = ("rotary", rotary.name, dtype)
    if key not in sequences.computed:
        angles = rotary.angles(sequences.positions)[:, None]
        sequences.computed[key] = ((angles.cos() * rotary.factor).to(dtype), (angles.sin() * rotary.factor).to(dtype))
    return sequences.computed[key]
