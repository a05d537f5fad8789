"""Reading ``config.json``: numbers, and refusals that name the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.errors import ModelError, explain

# Rotary positions that megarl computes. "dynamic" would change with the longest sequence of a batch, and so would every log-prob.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def size_of(hf_config: Mapping, key: str, default: int | None = None) -> int:
    """A positive integer of ``config.json``; ``default`` where the key is missing or null."""
    value = hf_config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise cannot(key, value, "a positive integer")
    return value


def number_of(hf_config: Mapping, key: str, default: float | None = None) -> float:
    """A number of ``config.json``; ``default`` where the key is missing or null."""
    value = hf_config.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise cannot(key, value, "a number")
    return float(value)


def cannot(key: str, got: Any, expected: str) -> ModelError:
    """The error of a key that Megatron can't represent."""
    return ModelError(
        explain(
            f"`{key}` of this model can't be represented",
            where="config.json",
            got=repr(got),
            expected=expected,
            do="use a model without it",
        )
    )


def refuse(hf_config: Mapping, **allowed: Any) -> None:
    """Raise ModelError for the first key that is present with another value than ``allowed``, or than one of an allowed tuple."""
    for key, values in allowed.items():
        choices = values if isinstance(values, tuple) else (values,)
        if hf_config.get(key) is not None and hf_config[key] not in choices:
            raise cannot(key, hf_config[key], " or ".join(str(choice) for choice in choices if choice is not None))


def refuse_quantized(hf_config: Mapping, *, fp8: bool = False) -> None:
    """Raise ModelError for weights that are stored quantized; ``fp8``: except in DeepSeek-V3's own way."""
    how = hf_config.get("quantization_config")
    if how is None or (fp8 and isinstance(how, Mapping) and how.get("quant_method") == "fp8" and how.get("weight_block_size")):
        return
    raise cannot("quantization_config", how, "unquantized weights")


def check_rope(hf_config: Mapping, *, types: Sequence[str] = ROPE_TYPES, partial: bool = False) -> None:
    """Raise ModelError for rotary positions of another kind, or for a part of a head where the family doesn't know one.

    transformers 5 keeps them under ``rope_parameters``, 4 under ``rope_scaling``.
    """
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf_config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
            raise cannot(key, rope, "one set of rotary positions for all layers")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in types:
            raise cannot(key, rope, f"rope_type {', '.join(types)}")
        if not partial and rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise cannot(f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], "1.0")


def rope_value(hf_config: Mapping, key: str, default: float, *older: str) -> float:
    """``rope_parameters[key]``, or what older files have beside the other keys under ``key`` or a name of ``older``."""
    rope = hf_config.get("rope_parameters") or {}
    found = next((hf_config[name] for name in (key, *older) if hf_config.get(name) is not None), default)
    return float(rope.get(key, found))


def sliding_layers(hf_config: Mapping, default: Sequence[bool]) -> tuple[bool, ...]:
    """For each layer whether it sees a window alone: ``layer_types``, or ``default`` where the file has none."""
    types = hf_config.get("layer_types")
    if types is None:
        return tuple(default)
    known = ("sliding_attention", "full_attention")
    if len(types) != len(default) or any(kind not in known for kind in types):
        raise cannot("layer_types", types, f"{len(default)} entries, each {' or '.join(known)}")
    return tuple(kind == "sliding_attention" for kind in types)
