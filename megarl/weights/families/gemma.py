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
from megarl.weights.families.llama import attention_biases
from megarl.weights.families.read import (
    cannot,
    check_rope,
    check_rope_set,
    check_taken,
    default_theta,
    layers_of,
    number_of,
    refuse,
    size_of,
    sliding_layers,
    whole_heads,
    windows_of,
    with_defaults,
)
from megarl.weights.table import Family, Table

_SLIDING, _FULL = "sliding_attention", "full_attention"
# One object, since a configuration is compared and copied by its values.
GELU_TANH = partial(F.gelu, approximate="tanh")


def _table(hf_config: Mapping, *, qk_norm: bool) -> Table:
    sizes = read_sizes(hf_config)
    layer = (
        INPUT_NORM,
        *attention_rows(attention_biases(hf_config), qk_norm=qk_norm),
        norm_row("post_attention_layernorm", "post_attention_layernorm"),
        norm_row("pre_mlp_layernorm", "pre_feedforward_layernorm", te="mlp.linear_fc1.layer_norm"),
        *mlp_rows(Biases()),
        norm_row("post_mlp_layernorm", "post_feedforward_layernorm"),
    )
    return decoder_table(sizes, (layer,) * sizes.layers)


def _kwargs(hf_config: Mapping, *, qk_norm: bool) -> dict[str, dict]:
    refuse(with_defaults(hf_config), hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=(False, None))
    full = dict(hf_config) | {"hidden_act": "silu"}  # the key of other families, which these don't read
    kwargs = megatron_kwargs(read_sizes(hf_config), full, biases=attention_biases(hf_config), qk_norm=qk_norm)
    kwargs["transformer"] |= {"activation_func": GELU_TANH, "layernorm_zero_centered_gamma": True}
    return kwargs


def _kwargs2(hf_config: Mapping) -> dict[str, dict]:
    check_rope(hf_config)
    return _kwargs(hf_config, qk_norm=False)


def _kwargs3(hf_config: Mapping) -> dict[str, dict]:
    refuse(hf_config, attn_logit_softcapping=(None,))  # transformers reads it for Gemma 2 alone
    full = _ropes(hf_config)[_FULL]
    _pattern(hf_config)
    check_taken(hf_config)
    one = {"rope_parameters": None, "rope_scaling": None, "rope_theta": full["rope_theta"]}
    return _kwargs({**hf_config, **one}, qk_norm=True)


def _ropes(hf_config: Mapping) -> dict[str, dict]:
    """Rotary positions by layer type, as transformers 5 writes them; older files have one set and a base for sliding layers."""
    nested, scaling = hf_config.get("rope_parameters"), hf_config.get("rope_scaling")
    if nested is not None and not (
        isinstance(nested, Mapping) and all(isinstance(nested.get(name), Mapping) for name in (_FULL, _SLIDING))
    ):
        raise cannot("rope_parameters", nested, f"one set for {_FULL} and one for {_SLIDING}")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise cannot("rope_scaling", scaling, "one set of rotary positions")
    if nested and scaling and {**nested[_FULL], **scaling} != nested[_FULL]:
        raise cannot("rope_scaling", scaling, f"no other positions than rope_parameters = {nested!r}")
    # Two parts of heads would be two too many: transformers scales by one and not by the other.
    whole_heads({"partial_rotary_factor": 1.0 if (part := hf_config.get("partial_rotary_factor")) is None else part})
    bases, sets = default_theta(hf_config), nested or {_FULL: scaling or {}, _SLIDING: {}}
    full = {"rope_theta": hf_config.get("rope_theta", bases["global"]), **sets[_FULL]}
    local = {"rope_theta": hf_config.get("rope_local_base_freq", bases["local"]), **sets[_SLIDING]}
    for name, rope in ((_FULL, full), (_SLIDING, local)):
        check_rope_set(rope, types=("default", "linear"), where=f"rope_parameters.{name}")
        whole_heads(rope)
        if "type" in rope and rope["type"] != rope.get("rope_type"):
            raise cannot(f"rope_parameters.{name}.type", rope["type"], "rope_type, which is what transformers reads of this family")
    return {_FULL: full, _SLIDING: local}


def _sliding(hf_config: Mapping, pattern: int) -> tuple[bool, ...]:
    """Every ``pattern``-th layer sees all, where config.json doesn't say otherwise."""
    return sliding_layers(hf_config, [bool((layer + 1) % pattern) for layer in range(layers_of(hf_config))])


def _pattern(hf_config: Mapping) -> int:
    return size_of(hf_config, "sliding_window_pattern", 6)


def _architecture(hf_config: Mapping, sliding: tuple[bool, ...], **others: Any) -> Architecture:
    """``hf_config``: without missing keys."""
    return Architecture(
        block=SANDWICH,
        windows=windows_of(hf_config, sliding, hf_config["sliding_window"]),
        attention_scale=size_of(hf_config, "query_pre_attn_scalar") ** -0.5,
        embedding_scale=size_of(hf_config, "hidden_size") ** 0.5,
        output_softcap=_cap(hf_config, "final_logit_softcapping"),
        **others,
    )


def _architecture2(hf_config: Mapping) -> Architecture:
    full = with_defaults(hf_config)
    return _architecture(full, _sliding(full, 2), attention_softcap=_cap(full, "attn_logit_softcapping"))


def _architecture3(hf_config: Mapping) -> Architecture:
    full = with_defaults(hf_config)
    sliding = _sliding(full, _pattern(full))
    return _architecture(full, sliding, ropes=tuple(_SLIDING if s else _FULL for s in sliding))


def _cap(hf_config: Mapping, key: str) -> float | None:
    """Null is none."""
    return None if hf_config[key] is None else number_of(hf_config, key, above=0)


def _unused(hf_config: Mapping) -> tuple[tuple[str, str], ...]:
    return (ROTARY_BUFFERS, *tied_head(hf_config))


GEMMA2 = Family("gemma2", partial(_table, qk_norm=False), _kwargs2, _architecture2, unused=_unused)
GEMMA3 = Family("gemma3_text", partial(_table, qk_norm=True), _kwargs3, _architecture3, unused=_unused)
