"""Gemma 2 (arXiv:2408.00118) and the text models of Gemma 3 (arXiv:2503.19786): norms before and behind attention and MLP.

Gemma 2 caps scores and logits; Gemma 3 has norms of query and key instead, and two sets of rotary positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F

from megarl.weights.architecture import SANDWICH, Architecture
from megarl.weights.families.dense import (
    INPUT_NORM,
    ROTARY_BUFFERS,
    Biases,
    attention_rows,
    decoder_table,
    megatron_kwargs,
    mlp_rows,
    norm_row,
    read_sizes,
    tied_head,
)
from megarl.weights.families.read import cannot, check_rope, number_of, refuse, rope_value, size_of, sliding_layers
from megarl.weights.sizes import ModelSizes
from megarl.weights.table import Family, Table

_SLIDING, _FULL = "sliding_attention", "full_attention"
# One object, since a configuration is compared and copied by its values.
GELU_TANH = partial(F.gelu, approximate="tanh")


def _with_defaults(hf_config: Mapping) -> dict[str, Any]:
    """transformers leaves out of config.json what it takes for given."""
    defaults = {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
    return defaults | dict(hf_config)


def _sizes(hf_config: Mapping) -> ModelSizes:
    return read_sizes(_with_defaults(hf_config))


def _table(hf_config: Mapping, *, qk_norm: bool) -> Table:
    sizes = _sizes(hf_config)
    layer = (
        INPUT_NORM,
        *attention_rows(_biases(hf_config), qk_norm=qk_norm),
        norm_row("post_attention_layernorm", "post_attention_layernorm"),
        norm_row("pre_mlp_layernorm", "pre_feedforward_layernorm", te="mlp.linear_fc1.layer_norm"),
        *mlp_rows(Biases()),
        norm_row("post_mlp_layernorm", "post_feedforward_layernorm"),
    )
    return decoder_table(sizes, (layer,) * sizes.layers)


def _biases(hf_config: Mapping) -> Biases:
    attention = bool(hf_config.get("attention_bias", False))
    return Biases(qkv=attention, projection=attention)


def _kwargs(hf_config: Mapping, *, qk_norm: bool) -> dict[str, dict]:
    refuse(hf_config, hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False)
    full = _with_defaults(hf_config) | {"hidden_act": "silu"}  # the key of other families, which these don't read
    kwargs = megatron_kwargs(_sizes(hf_config), full, biases=_biases(hf_config), qk_norm=qk_norm)
    kwargs["transformer"] |= {"activation_func": GELU_TANH, "layernorm_zero_centered_gamma": True}
    return kwargs


def _kwargs2(hf_config: Mapping) -> dict[str, dict]:
    check_rope(hf_config)
    return _kwargs(hf_config, qk_norm=False)


def _kwargs3(hf_config: Mapping) -> dict[str, dict]:
    refuse(hf_config, attn_logit_softcapping=())  # transformers reads it for Gemma 2 alone
    for name, rope in _ropes(hf_config).items():
        if rope.get("rope_type", rope.get("type", "default")) not in ("default", "linear"):
            raise cannot(f"rope_parameters.{name}", rope, "rope_type default or linear")
    kwargs = _kwargs(hf_config, qk_norm=True)
    kwargs["model"]["rotary_base"] = rope_value(_ropes(hf_config)[_FULL], "rope_theta", 1e6)
    return kwargs


def _ropes(hf_config: Mapping) -> dict[str, Mapping]:
    """Rotary positions by layer type, as transformers 5 writes them; older files have one set and a base for sliding layers."""
    nested = hf_config.get("rope_parameters")
    if nested is None:
        scaled = hf_config.get("rope_scaling") or {}
        return {_FULL: {"rope_theta": hf_config.get("rope_theta", 1e6)} | dict(scaled), _SLIDING: {}}
    if not isinstance(nested, Mapping) or not all(isinstance(nested.get(name), Mapping) for name in (_FULL, _SLIDING)):
        raise cannot("rope_parameters", nested, f"one set for {_FULL} and one for {_SLIDING}")
    return {name: nested[name] for name in (_FULL, _SLIDING)}


def _sliding(hf_config: Mapping, pattern: int) -> tuple[bool, ...]:
    """Every ``pattern``-th layer sees all, where config.json doesn't say otherwise."""
    return sliding_layers(hf_config, [bool((layer + 1) % pattern) for layer in range(size_of(hf_config, "num_hidden_layers"))])


def _architecture(hf_config: Mapping, sliding: tuple[bool, ...], **others: Any) -> Architecture:
    config = _with_defaults(hf_config)
    window = config["sliding_window"]
    return Architecture(
        block=SANDWICH,
        windows=() if window is None else tuple(size_of(config, "sliding_window") if s else None for s in sliding),
        attention_scale=number_of(config, "query_pre_attn_scalar") ** -0.5,
        embedding_scale=size_of(config, "hidden_size") ** 0.5,
        **others,
    )


def _architecture2(hf_config: Mapping) -> Architecture:
    return _architecture(
        hf_config,
        _sliding(hf_config, 2),
        attention_softcap=_cap(hf_config, "attn_logit_softcapping", 50.0),
        output_softcap=_cap(hf_config, "final_logit_softcapping", 30.0),
    )


def _architecture3(hf_config: Mapping) -> Architecture:
    sliding = _sliding(hf_config, hf_config.get("sliding_window_pattern", 6))
    return _architecture(
        hf_config,
        sliding,
        ropes=tuple(_SLIDING if s else _FULL for s in sliding),
        output_softcap=_cap(hf_config, "final_logit_softcapping", None),
    )


def _cap(hf_config: Mapping, key: str, default: float | None) -> float | None:
    """A missing key is the family's default, null is none."""
    value = hf_config.get(key, default)
    return None if value is None else number_of({key: value}, key)


def _unused(hf_config: Mapping) -> tuple[tuple[str, str], ...]:
    return (ROTARY_BUFFERS, *tied_head(_with_defaults(hf_config)))


GEMMA2 = Family("gemma2", partial(_table, qk_norm=False), _kwargs2, _architecture2, unused=_unused)
GEMMA3 = Family("gemma3_text", partial(_table, qk_norm=True), _kwargs3, _architecture3, unused=_unused)
