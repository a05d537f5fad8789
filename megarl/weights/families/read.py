"""Reading ``config.json`` as transformers does: what a missing key means, numbers and flags, and refusals that name the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, lru_cache
from typing import Any, get_args

from megarl.errors import ModelError, explain

# Rotary positions that megarl computes. "dynamic" would change with the longest sequence of a batch, and so would every log-prob.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Lengths that a file has to say itself: the defaults of a class are those of one model.
_OWN = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
MOST_LAYERS = 10_000
MOST_EXPERTS = 100_000
_MOST = 2**31 - 1


@dataclass(frozen=True)
class _Class:
    """What transformers' configuration class of a family says."""

    defaults: Mapping[str, Any]  # of keys that a file may leave out
    nullable: frozenset[str]
    pairs: Mapping[str, str]  # two names of one key
    theta: Any  # the base of rotary positions where no key says one


@cache
def _class_of(model_type: str) -> _Class:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise cannot("model_type", model_type, "a family that transformers knows")
    found = CONFIG_MAPPING[model_type]
    of = {field.name: field for field in fields(found)}
    return _Class(
        {key: field.default for key, field in of.items() if field.default is not MISSING and key not in _OWN},
        frozenset(key for key, field in of.items() if type(None) in get_args(field.type)),
        dict(found.attribute_map),
        getattr(found, "default_theta", 10000.0),
    )


def _known(hf_config: Mapping) -> _Class:
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str):
        raise cannot("model_type", model_type, "the name of a model family")
    return _class_of(model_type)


def with_defaults(hf_config: Mapping) -> dict[str, Any]:
    """``config.json`` with what transformers takes for missing keys, and every key of two names under both.

    Published files leave out what the class has by itself. Raises ModelError for two names with two values. The main lengths of a model
    are never filled in.
    """
    known = _known(hf_config)
    full = {**known.defaults, **hf_config}
    for pair in known.pairs.items():
        given = [key for key in pair if key in hf_config] or [key for key in pair if key in full]
        if len(given) == 2 and not _same(full[pair[0]], full[pair[1]]):
            raise cannot(pair[0], full[pair[0]], f"as {pair[1]} = {full[pair[1]]!r}, which is the same key")
        full |= {key: full[given[0]] for key in pair if given}
    return full


def may_be_null(hf_config: Mapping, key: str) -> bool:
    """Whether transformers takes null for this key of the family; what it makes of it is the family's matter."""
    return key in _known(hf_config).nullable


def default_theta(hf_config: Mapping) -> Any:
    """The base of rotary positions that the family has by itself: one, or one by name."""
    return _known(hf_config).theta


def size_of(hf_config: Mapping, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
    """A positive integer of ``config.json``; ``default`` where the key is missing. Null is none."""
    value = hf_config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise cannot(key, value, "a positive integer" if least == 1 else f"an integer of at least {least}")
    if value > most:
        raise cannot(key, value, f"at most {most}")
    return value


def layers_of(hf_config: Mapping) -> int:
    """``num_hidden_layers``."""
    return size_of(hf_config, "num_hidden_layers", most=MOST_LAYERS)


def number_of(hf_config: Mapping, key: str, default: float | None = None, *, above: float | None = None) -> float:
    """A finite number of ``config.json``, perhaps ``above`` another; ``default`` where the key is missing. Null is none."""
    value = hf_config.get(key, default)
    if not _is_number(value) or (above is not None and value <= above):
        raise cannot(key, value, "a number" if above is None else f"a number above {above:g}")
    return float(value)


def bool_of(hf_config: Mapping, key: str, default: bool | None = None) -> bool:
    """A flag of ``config.json``; ``default`` where the key is missing. Null, 0, 1 and words are none."""
    value = hf_config.get(key, default)
    if not isinstance(value, bool):
        raise cannot(key, value, "true or false")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)


def _same(a: Any, b: Any) -> bool:
    """Equal, and of one type: true isn't 1."""
    return type(a) is type(b) and bool(a == b)


def cannot(key: str, got: Any, expected: str) -> ModelError:
    """The error of a key that Megatron can't represent."""
    return ModelError(
        explain(
            f"`{key}` of this model can't be represented",
            where="config.json",
            got=_short(got),
            expected=expected,
            do="use a model without it",
        )
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:400]}..."


def refuse(hf_config: Mapping, **allowed: Any) -> None:
    """Raise ModelError for the first key that is present with another value than ``allowed``, or than one of an allowed tuple."""
    for key, values in allowed.items():
        choices = values if isinstance(values, tuple) else (values,)
        if key in hf_config and not any(_same(hf_config[key], choice) for choice in choices):
            raise cannot(key, hf_config[key], " or ".join("null" if choice is None else str(choice) for choice in choices))


def refuse_quantized(hf_config: Mapping, *, fp8: bool = False) -> None:
    """Raise ModelError for weights that are stored quantized; ``fp8``: except in DeepSeek-V3's own way."""
    how = hf_config.get("quantization_config")
    if how is None:
        return
    if not (fp8 and isinstance(how, Mapping) and how.get("quant_method") == "fp8" and how.get("weight_block_size")):
        raise cannot("quantization_config", how, "unquantized weights")
    block = how["weight_block_size"]
    if not isinstance(block, Sequence) or len(block) != 2 or any(type(length) is not int or length < 1 for length in block):
        raise cannot("quantization_config.weight_block_size", block, "rows and columns of a block: two positive integers")


def check_taken(hf_config: Mapping) -> None:
    """Raise ModelError where transformers itself takes no such ``config.json``, or where it would compute another kind of model."""
    refuse(hf_config, is_causal=True, per_layer_config=(None,))
    refusal = _refusal(json.dumps(dict(hf_config), default=repr))
    if refusal is not None and not ("validate_architecture" in refusal and hf_config.get("head_dim") is not None and _is_plain(hf_config)):
        raise ModelError(
            explain(
                "transformers can't take this model's configuration",
                where="config.json",
                got=refusal,
                do="correct the key that it names",
            )
        )


def _is_plain(hf_config: Mapping) -> bool:
    """Whether no class of transformers computes the positions. Llama's refuses a hidden_size that heads with a head_dim don't divide."""
    given = [hf_config.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    return hf_config["model_type"] == "llama" and all(_with_type(rope)["rope_type"] == "default" for rope in given)


@lru_cache(maxsize=16)
def _refusal(hf_config: str) -> str | None:
    """Why transformers refuses a configuration. Its classes raise errors of many types, and warn each time."""
    from transformers import AutoConfig

    try:
        AutoConfig.for_model(**json.loads(hf_config))
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def rope_of(hf_config: Mapping, *, theta: str = "rope_theta", part: str = "partial_rotary_factor", rest: float = 1.0) -> dict[str, Any]:
    """The one set of rotary positions of all layers, with ``rope_type``, ``rope_theta`` and ``partial_rotary_factor``.

    transformers 5 keeps them under ``rope_parameters``, 4 under ``rope_scaling``, with the others beside it, under the names ``theta`` and
    ``part`` (where missing: the class's own base, and ``rest``). Raises ModelError for two sets that differ: transformers would take
    ``rope_scaling`` and forget the base under ``rope_parameters``, which no one can want.
    """
    beside = {"rope_theta": hf_config.get(theta, default_theta(hf_config)), "partial_rotary_factor": hf_config.get(part, rest)}
    found = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf_config.get(key)
        if rope is None or rope == {}:
            continue
        if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
            raise cannot(key, rope, "one set of rotary positions for all layers")
        found[key] = beside | _with_type(rope)
    sets = list(found.values())
    if len(sets) == 2 and sets[0] != sets[1]:
        raise cannot(
            "rope_scaling", hf_config["rope_scaling"], f"no other positions than rope_parameters = {hf_config['rope_parameters']!r}"
        )
    return sets[0] if sets else _with_type(beside)


def _with_type(rope: Mapping) -> dict[str, Any]:
    """One set with its kind under ``rope_type`` alone; older files call it ``type``."""
    return {key: value for key, value in rope.items() if key != "type"} | {"rope_type": rope.get("rope_type", rope.get("type", "default"))}


def check_rope(hf_config: Mapping, *, types: Sequence[str] = ROPE_TYPES) -> None:
    """Raise ModelError for rotary positions of another kind than ``types``, without a number that theirs need, or of a part of a head."""
    # A null beside the set is a missing key to all families that don't know parts.
    given = {key: value for key, value in hf_config.items() if key != "partial_rotary_factor" or value is not None}
    rope = rope_of(given)
    check_rope_set(rope, types=types)
    whole_heads(rope)
    if rope["rope_type"] in ("llama3", "yarn"):
        check_original(hf_config, rope)


def whole_heads(rope: Mapping) -> None:
    """Raise ModelError for positions of a part of a head."""
    if number_of(rope, "partial_rotary_factor", 1.0) != 1.0:
        raise cannot("partial_rotary_factor", rope["partial_rotary_factor"], "1.0")


def turned_part(rope: Mapping, head_dim: int) -> float:
    """``partial_rotary_factor`` of a family that knows one. Raises ModelError where the dimensions that turn are no pairs."""
    part = number_of(rope, "partial_rotary_factor", above=0)
    if part > 1 or int(head_dim * part) % 2 or int(head_dim * part) < 2:
        raise cannot("partial_rotary_factor", part, f"at most 1, and an even number of the {head_dim} dimensions of a head")
    return part


_NEEDED = {"linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
_POSITIVE, _ANY = ("attention_factor", "beta_fast", "beta_slow"), ("mscale", "mscale_all_dim")  # which may be missing or null


def check_rope_set(rope: Mapping, *, types: Sequence[str], where: str = "rope_parameters") -> None:
    """Raise ModelError for one set of another kind than ``types``, or without a number that its kind needs."""
    kind = rope.get("rope_type", "default")
    if kind not in types:
        raise cannot(where, dict(rope), f"rope_type {', '.join(types)}")
    number_of(rope, "rope_theta", above=1)  # YaRN divides by its logarithm
    for key in _NEEDED.get(kind, ()):
        number_of(rope, key, above=0)
    for key in (*_POSITIVE, *_ANY):
        if rope.get(key) is not None:
            number_of(rope, key, above=0 if key in _POSITIVE else None)
    if "truncate" in rope:
        bool_of(rope, "truncate")
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise cannot("high_freq_factor", rope["high_freq_factor"], f"more than low_freq_factor = {rope['low_freq_factor']}")


def check_original(hf_config: Mapping, rope: Mapping) -> None:
    """Raise ModelError where the length that a scaling starts from is none, in its set or beside it."""
    for keys in (rope, hf_config):
        if "original_max_position_embeddings" in keys:
            size_of(keys, "original_max_position_embeddings")


def sliding_layers(hf_config: Mapping, default: Sequence[bool]) -> tuple[bool, ...]:
    """For each layer whether it sees a window alone: ``layer_types``, or ``default`` where the file has none."""
    types = hf_config.get("layer_types")
    if types is None:
        return tuple(default)
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, (list, tuple)) or len(types) != len(default) or any(kind not in known for kind in types):
        raise cannot("layer_types", types, f"{len(default)} entries, each {' or '.join(known)}")
    return tuple(kind == "sliding_attention" for kind in types)


def windows_of(hf_config: Mapping, sliding: Sequence[bool], window: Any) -> tuple[int | None, ...]:
    """``window`` in the layers that see one. Raises ModelError where there are such layers and no window: transformers fails too."""
    if window is not None:
        size = size_of({"sliding_window": window}, "sliding_window")
        return tuple(size if s else None for s in sliding)
    if any(sliding):
        raise cannot("layer_types", hf_config.get("layer_types"), "no sliding_attention, since this model has no sliding_window")
    return ()
