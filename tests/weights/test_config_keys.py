"""``config.json`` says to megarl what it says to transformers; what is odd in it is named, and never read as something else."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from megarl.errors import ModelError
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.families.read import bool_of, number_of, size_of
from tests.weights.families import _COMMON, MODELS

# Keys that a file has to have: other rooms index it with them.
OWN = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"}
_LINEAR = {"rope_type": "linear", "factor": 2.0}
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 24}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
_WINDOW = {"use_sliding_window": True, "sliding_window": 9}


def short(name: str, **changes: Any) -> dict[str, Any]:
    """A file as somebody wrote it, with the keys that the model needs."""
    model_type, sizes = MODELS[name]
    return copy.deepcopy({"model_type": model_type} | _COMMON | sizes | changes)


@cache
def _long(name: str) -> str:
    return json.dumps(AutoConfig.for_model(**short(name)).to_dict())


def long(name: str, **changes: Any) -> dict[str, Any]:
    """The same file as transformers writes it, with every key."""
    return json.loads(_long(name)) | copy.deepcopy(changes)


def theirs(hf_config: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a file."""
    return AutoConfig.for_model(**copy.deepcopy(hf_config)).to_dict()


def reading(hf_config: dict[str, Any]) -> tuple[Any, ...]:
    """Everything that megarl takes from a file."""
    family = model_family(hf_config)
    table = family.table(hf_config)
    names = ("lm_head.weight", "embed_out.weight", "model.layers.6.a", "model.layers.7.a", "model.layers.0.self_attn.rotary_emb.inv_freq")
    unused = [family.reason_unused(hf_config, name) for name in names]
    return family.sizes(hf_config), table.layers, family.megatron_kwargs(hf_config), family.architecture(hf_config), unused


def refused(hf_config: dict[str, Any]) -> str | None:
    """The error of a file, and None where it is read."""
    try:
        reading(hf_config)
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", MODELS)
def test_a_missing_key_means_what_transformers_takes_it_for(name: str) -> None:
    whole = long(name)
    assert reading(whole) == reading(short(name))
    for key in whole.keys() - {"model_type"}:
        cut = {k: v for k, v in whole.items() if k != key}
        if refused(cut):  # where a file has to say the key, or where the default doesn't fit the other keys: then it's refused said, too
            assert key in OWN or refused(theirs(cut)), key
            continue
        assert reading(cut) == reading(theirs(cut)), key


@pytest.mark.parametrize("name", MODELS)
def test_a_file_of_its_sizes_alone_is_read_as_transformers_reads_it(name: str) -> None:
    """All defaults at once, in the sizes of the classes: with few heads of few dimensions much is not what it is by default."""
    model_type, _ = MODELS[name]
    given = {"model_type": model_type} | {key: value for key, value in theirs({"model_type": model_type}).items() if key in OWN}
    given |= {"num_experts_per_tok": 6} if model_type == "deepseek_v2" else {}
    assert reading(given) == reading(theirs(given))


@pytest.mark.parametrize("name", MODELS)
def test_null_means_what_transformers_takes_it_for(name: str) -> None:
    for key in long(name).keys() - {"model_type"}:
        for c in (long(name, **{key: None}), short(name, **{key: None})):
            try:
                full = theirs(c)
            except Exception as error:
                assert refused(c), (key, error)
                continue
            assert refused(c) or reading(c) == reading(full), key


WINDOWS = [
    ("qwen2", _WINDOW | {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("qwen2", _WINDOW | {"max_window_layers": 2}),
    ("qwen3", _WINDOW | {"sliding_window": None}),
    ("qwen3", _WINDOW | {"max_window_layers": 0}),
    ("qwen3", _WINDOW | {"layer_types": ["sliding_attention"] + ["full_attention"] * 5}),
    ("qwen3_moe", _WINDOW),
    ("qwen3_moe", _WINDOW | {"sliding_window": None}),
    ("qwen3_moe", {"use_sliding_window": True}),
    ("mistral", {"sliding_window": None}),
    ("mixtral", {"sliding_window": 9}),
    ("phi3", {"sliding_window": 9}),
    ("phi3", {"sliding_window": None}),
    ("gemma2", {"layer_types": ["full_attention"] * 6, "sliding_window": None}),
]


@pytest.mark.parametrize(("name", "changes"), WINDOWS, ids=str)
def test_windows_are_those_of_transformers(name: str, changes: dict) -> None:
    c = short(name, **changes)
    full = theirs(c)
    kinds = full.get("layer_types") or ["sliding_attention"] * 6
    windows = [full["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    architecture = model_family(c).architecture(c)
    assert [architecture.window(layer) for layer in range(6)] == windows


ROPES = [
    ("llama", {"rope_parameters": None}),
    ("llama", {"rope_parameters": None, "rope_theta": 700.0}),
    ("llama", {"rope_parameters": {"rope_theta": 700.0}, "rope_theta": 600.0}),
    ("llama", {"rope_parameters": {}, "rope_theta": 600.0}),
    ("llama", {"rope_parameters": None, "rope_scaling": _LLAMA3, "rope_theta": 600.0}),
    ("llama", {"rope_parameters": _LLAMA3 | {"rope_theta": 600.0}, "rope_scaling": _LLAMA3, "rope_theta": 600.0}),
    ("llama", {"rope_parameters": None, "partial_rotary_factor": 1.0}),
    ("llama", {"rope_parameters": None, "partial_rotary_factor": None}),
    ("mixtral", {}),
    ("mixtral", {"rope_parameters": {"rope_type": "default"}}),
    ("mixtral", {"rope_scaling": _YARN}),
    ("phi3", {"partial_rotary_factor": 0.8}),
    ("phi3", {"partial_rotary_factor": 0.4, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.8}}),
    ("gpt_neox", {}),
    ("gpt_neox", {"rotary_emb_base": 500, "rotary_pct": 0.8}),
    ("gpt_neox", {"rotary_emb_base": 500, "rope_theta": 600.0, "rotary_pct": 0.8, "partial_rotary_factor": 0.4}),
    ("gpt_neox", {"rope_theta": 600.0, "partial_rotary_factor": 0.4}),
    ("gpt_neox", {"rotary_pct": 0.4, "rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 0.8}}),
    ("gemma3", {"rope_theta": 700.0, "rope_local_base_freq": 600.0}),
    ("gemma3", {"rope_theta": 700.0, "rope_scaling": _LINEAR}),
]


@pytest.mark.parametrize(("name", "changes"), ROPES, ids=str)
def test_rotary_positions_are_those_of_transformers(name: str, changes: dict) -> None:
    c = short(name, **changes)
    rope = theirs(c)["rope_parameters"]
    rope = rope.get("full_attention", rope)
    model = model_family(c).megatron_kwargs(c)["model"]
    assert (model["rotary_base"], model["rotary_percent"]) == (rope["rope_theta"], rope.get("partial_rotary_factor", 1.0))


BIASES = [  # (model, changes, what has a bias in transformers and in the table)
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("mistral", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"attention_bias": False, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3_moe", {"attention_bias": True, "mlp_bias": True}),
    ("mixtral", {"attention_bias": True}),
    ("phi3", {"attention_bias": True}),
    ("gemma2", {"attention_bias": True, "mlp_bias": True}),
    ("gemma3", {"attention_bias": True}),
    ("seed_oss", {}),
    ("seed_oss", {"attention_bias": False}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
]


@pytest.mark.parametrize(("name", "changes"), BIASES, ids=str)
def test_biases_are_those_of_transformers(name: str, changes: dict) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    c = short(name, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(c)))
    biases = {key for key in model.state_dict() if key.endswith("bias")}
    assert {key for key in model_family(c).hf_tensors(c) if key.endswith("bias")} == biases


REFUSED = [  # (model, changes, what the message has to say)
    # Windows that transformers can't compute either.
    ("qwen2", {"layer_types": ["sliding_attention"] * 6}, "layer_types"),
    ("qwen2", _WINDOW | {"max_window_layers": None}, "max_window_layers"),
    ("qwen3", _WINDOW | {"max_window_layers": "2"}, "max_window_layers"),
    ("qwen3", _WINDOW | {"layer_types": "full_attention"}, "layer_types"),
    ("qwen3", {"use_sliding_window": "no"}, "use_sliding_window"),
    ("gemma2", {"sliding_window": None}, "layer_types"),
    *[("gemma3", {"sliding_window_pattern": odd}, "sliding_window_pattern") for odd in (None, 0, "6", True)],
    ("mistral", {"layer_types": ["full_attention"] * 6}, "layer_types"),
    # Biases: the key that was set.
    ("llama", {"attention_bias": True}, r"`attention_bias` .*\n.*True"),
    ("llama", {"mlp_bias": True}, r"`mlp_bias` .*\n.*True"),
    ("qwen3", {"attention_bias": True}, "`attention_bias`"),
    ("qwen3_moe", {"attention_bias": True, "mlp_bias": True}, "`attention_bias`"),
    ("gemma2", {"attention_bias": True}, "`attention_bias`"),
    ("seed_oss", {"attention_out_bias": True}, "`attention_out_bias`"),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "attention_bias": False}, "`attention_bias`"),
    ("seed_oss", {"attention_bias": "true"}, "`attention_bias`"),
    ("gpt_neox", {"attention_bias": False}, "`attention_bias`"),
    # Rotary positions.
    *[("llama", {"rope_parameters": None, "rope_theta": odd}, "rope_theta") for odd in (None, "abc", True, 0, -1.0, 10**400)],
    *[("llama", {"rope_parameters": {"rope_theta": odd}}, "rope_theta") for odd in (None, "abc", math.nan, math.inf)],
    ("llama", {"rope_parameters": None, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {"rope_theta": 600.0}, "rope_scaling": _LLAMA3}, "(?s)rope_scaling.*rope_parameters"),
    ("llama", {"rope_parameters": _LINEAR, "rope_scaling": _LLAMA3}, "(?s)rope_scaling.*rope_parameters"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor"),
    ("llama", {"rope_parameters": _YARN | {"factor": None}}, "factor"),
    ("llama", {"rope_parameters": _YARN | {"beta_fast": "32"}}, "beta_fast"),
    ("llama", {"rope_parameters": _YARN | {"original_max_position_embeddings": "24"}}, "original_max_position_embeddings"),
    ("llama", {"rope_parameters": _LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling"),
    ("phi3", {"partial_rotary_factor": None}, "partial_rotary_factor"),
    ("phi3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),  # 5 of 10 dimensions
    ("phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "short_factor"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 5, "long_factor": [1.0] * 4}}, "long_factor"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": ["1"] * 5, "long_factor": [1.0] * 5}}, "short_factor"),
    ("gpt_neox", {"rotary_pct": None}, "partial_rotary_factor"),
    ("gpt_neox", {"rotary_emb_base": "10000"}, "rope_theta"),
    ("gpt_neox", {"head_dim": 6}, "head_dim"),
    ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
    ("gemma3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type"),
    ("gemma3", {"rope_local_base_freq": None}, "rope_theta"),
    ("gemma3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    # Lengths.
    *[("llama", {"num_hidden_layers": odd}, "num_hidden_layers") for odd in (0, -1, 1.0, "6", True, 10**9, 10**30)],
    ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps"),
    ("qwen2", {"head_dim": None}, "head_dim"),
    ("qwen3", {"head_dim": None}, "head_dim"),
    ("qwen3_moe", {"num_key_value_heads": None}, "num_key_value_heads"),
    ("qwen3_moe", {"num_experts": 6, "num_local_experts": 5}, "num_local_experts"),
    ("qwen3_moe", {"mlp_only_layers": 0}, "mlp_only_layers"),
    ("qwen3_moe", {"mlp_only_layers": "none"}, "mlp_only_layers"),
    ("qwen3_moe", {"decoder_sparse_step": True}, "decoder_sparse_step"),
    ("qwen3_moe", {"norm_topk_prob": "no"}, "norm_topk_prob"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    ("gpt_neox", {"tie_word_embeddings": 0}, "tie_word_embeddings"),
    ("gpt_neox", {"use_parallel_residual": "false"}, "use_parallel_residual"),
    ("llama", {"quantization_config": []}, "quantization_config"),
    ("llama", {"is_causal": False}, "is_causal"),
    ("llama", {"per_layer_config": {"0": {"hidden_size": 3}}}, "per_layer_config"),
    ("llama", {"use_cache": "x"}, "use_cache"),  # transformers' own word
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}}, "weight_block_size"),
    *[("deepseek_v3", {"first_k_dense_replace": odd}, "first_k_dense_replace") for odd in (None, "3", -1, True)],
    *[("deepseek_v3", {"q_lora_rank": odd}, "q_lora_rank") for odd in ("20", 0, True)],
    *[("deepseek_v3", {"n_group": odd}, "n_group") for odd in (None, "3", 4, 6)],
    *[("deepseek_v3", {"num_nextn_predict_layers": odd}, "num_nextn_predict_layers") for odd in (None, "1", -1, 10**30)],
    ("deepseek_v3", {"norm_topk_prob": "no"}, "norm_topk_prob"),
    ("deepseek_v3", {"rope_interleave": "no"}, "rope_interleave"),
    ("deepseek_v3", {"head_dim": 16}, "head_dim"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("deepseek_v3", {"routed_scaling_factor": 0}, "routed_scaling_factor"),
    ("deepseek_v3", {"n_shared_experts": None}, "n_shared_experts"),
    ("deepseek_v2", {"n_shared_experts": 0}, "n_shared_experts"),
    ("deepseek_v2", {"topk_method": None}, "topk_method"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "n_group"),
    ("deepseek_v2", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek_v2", {"num_local_experts": 5}, "num_local_experts"),
    ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "says"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_odd_is_refused_by_name(name: str, changes: dict, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        reading(short(name, **changes))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_an_equal_output_layer_of_a_tied_mixture_is_left_out(name: str, tied: bool) -> None:
    c = short(name, tie_word_embeddings=tied)
    assert bool(model_family(c).reason_unused(c, "lm_head.weight")) == tied
    assert model_family(c).reason_unused(c, "model.layers.0.self_attn.rotary_emb.inv_freq")


@pytest.mark.parametrize("model_type", [None, [], ["llama"], {}, 3, "", "gpt2"], ids=str)
def test_a_model_type_that_is_none_is_refused(model_type: Any) -> None:
    with pytest.raises(ModelError, match="(?s)model_type.*llama"):
        model_family({"model_type": model_type})


ODD = [None, True, "x", "3", -1, 0, 1.5, [], {}, [1], math.nan, math.inf, 10**30, 10**400]
_NESTED = {"rope_parameters", "rope_scaling"}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_odd_value_is_more_than_an_error(name: str, data: st.DataObject) -> None:
    c = long(name) if data.draw(st.booleans()) else short(name)
    key, odd = (
        data.draw(st.sampled_from(sorted(c.keys() | _NESTED | {"rope_theta", "partial_rotary_factor"}))),
        data.draw(st.sampled_from(ODD)),
    )
    if key == "model_type":
        return
    if key in _NESTED and data.draw(st.booleans()):
        c[key] = data.draw(st.sampled_from([_LINEAR, _LLAMA3, _YARN])) | {data.draw(st.sampled_from(sorted(_LLAMA3))): odd}
    else:
        c[key] = odd
    family = model_family(c)
    for read in (family.table, family.sizes, family.megatron_kwargs, family.architecture, family.unused, family.hf_tensors):
        try:
            read(c)
        except ModelError:
            continue
    with contextlib.suppress(ModelError):
        family.reason_unused(c, "model.layers.6.extra")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"model_type": "llama", "vocab_size": 3, "vocab_size": 4}', "`vocab_size` twice"),
        (b'{"rope_scaling": {"factor": 2.0, "factor": 4.0}}', "`factor` twice"),
        (b'{"model_type": "ll\xff"}', "no JSON"),
        (b"\xef\xbb\xbf{}", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"", "no JSON"),
        (b"[]", "no JSON object"),
        (b"null", "no JSON object"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_file_that_is_odd_as_a_whole_is_refused(text: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=says):
        read_hf_config(tmp_path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_args: Any, **_kwargs: Any) -> str:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "config.json").write_text("{}")
    for method in ("read_text", "is_file"):
        with monkeypatch.context() as patch, pytest.raises(ModelError, match="(?s)can't be read.*Permission denied"):
            patch.setattr(Path, method, denied)
            read_hf_config(tmp_path)


def test_readers_take_what_they_are_for() -> None:
    c = {"one": 1, "yes": True, "half": 0.5, "none": None}
    assert (size_of(c, "one"), size_of(c, "missing", 3), number_of(c, "one"), number_of(c, "half", above=0)) == (1, 3, 1.0, 0.5)
    assert (bool_of(c, "yes"), bool_of(c, "missing", False)) == (True, False)
    for key, reader in (("yes", size_of), ("none", size_of), ("yes", number_of), ("none", number_of), ("one", bool_of), ("none", bool_of)):
        with pytest.raises(ModelError, match=key):
            reader(c, key)
