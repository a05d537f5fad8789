"""DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, shared experts, dense first layers.

V3 adds a bias of the router, which chooses experts and doesn't weigh them, and is stored in blocks of fp8 with a scale each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.weights.families.dense import HF, MEGATRON, ROTARY_BUFFERS, Biases, decoder_table, linear_row, mlp_rows, norm_row, tied_head
from megarl.weights.families.dense import megatron_kwargs as dense_kwargs
from megarl.weights.families.mixture import chosen_experts, expert_rows, mixture_kwargs, router_row
from megarl.weights.families.read import (
    MOST_EXPERTS,
    MOST_LAYERS,
    bool_of,
    cannot,
    check_rope,
    layers_of,
    number_of,
    refuse,
    refuse_quantized,
    size_of,
    with_defaults,
)
from megarl.weights.ops import copy_op, gate_up
from megarl.weights.sizes import ModelSizes
from megarl.weights.table import Family, HfTensor, Row, Table


def _latent_row(megatron: str, hf: str, rows: str) -> Row:
    """The way down to a latent, which megatron-core's own layers cut over ranks and Transformer Engine's don't."""
    return replace(linear_row(f"self_attention.{megatron}", (f"self_attn.{hf}",), (rows,), "hidden"), te_whole=True)


def _latent_norm(megatron: str, hf: str, te: str, dim: str) -> Row:
    return norm_row(f"self_attention.{megatron}", f"self_attn.{hf}", te=f"self_attention.{te}.layer_norm", dim=dim)


_QUERY = (linear_row("self_attention.linear_q_proj", ("self_attn.q_proj",), ("query",), "hidden"),)
_QUERY_BY_LATENT = (
    _latent_row("linear_q_down_proj", "q_a_proj", "q_lora"),
    _latent_norm("q_layernorm", "q_a_layernorm", "linear_q_up_proj", "q_lora"),
    linear_row("self_attention.linear_q_up_proj", ("self_attn.q_b_proj",), ("query",), "q_lora"),
)
_KEY_VALUE = (
    _latent_row("linear_kv_down_proj", "kv_a_proj_with_mqa", "kv_lora+rope"),
    _latent_norm("kv_layernorm", "kv_a_layernorm", "linear_kv_up_proj", "kv_lora"),
    linear_row("self_attention.linear_kv_up_proj", ("self_attn.kv_b_proj",), ("key_value",), "kv_lora"),
    linear_row("self_attention.linear_proj", ("self_attn.o_proj",), ("hidden",), "value", axis=1),
)
_DENSE = (norm_row("pre_mlp_layernorm", "post_attention_layernorm", te="mlp.linear_fc1.layer_norm"), *mlp_rows(Biases()))
_SHARED = tuple(HfTensor(f"{HF}mlp.shared_experts.{x}_proj.weight", ("shared_ffn", "hidden")) for x in ("gate", "up"))
_MIXTURE = (
    norm_row("pre_mlp_layernorm", "post_attention_layernorm"),
    router_row("mlp."),
    *expert_rows("mlp.", ("gate_proj", "up_proj", "down_proj")),
    Row(MEGATRON + "mlp.shared_experts.linear_fc1.weight", _SHARED, gate_up, tensor_axis=0),
    linear_row("mlp.shared_experts.linear_fc2", ("mlp.shared_experts.down_proj",), ("hidden",), "shared_ffn", axis=1),
)
_ROUTER_BIAS = Row(
    MEGATRON + "mlp.router.expert_bias", (HfTensor(HF + "mlp.gate.e_score_correction_bias", ("experts",)),), copy_op, None, float32=True
)


def _sizes(hf_config: Mapping) -> ModelSizes:
    """``hf_config``: without missing keys. ``more``: lengths of queries, of keys and values before they are put together, of latents."""
    refuse_quantized(hf_config, fp8=True)
    heads = size_of(hf_config, "num_attention_heads")
    experts = size_of(hf_config, "n_routed_experts", most=MOST_EXPERTS)
    refuse(hf_config, attention_bias=False, mlp_bias=False, moe_layer_freq=(1, None), num_key_value_heads=(heads, None))
    refuse(hf_config, num_local_experts=experts)  # what transformers 5 called n_routed_experts for a while
    nope, rope = size_of(hf_config, "qk_nope_head_dim"), size_of(hf_config, "qk_rope_head_dim")
    if rope % 2:
        raise cannot("qk_rope_head_dim", rope, "an even number: pairs of dimensions turn")
    value = size_of(hf_config, "v_head_dim")
    expert_ffn = size_of(hf_config, "moe_intermediate_size")
    sizes = ModelSizes(
        layers=layers_of(hf_config),
        hidden=size_of(hf_config, "hidden_size"),
        ffn=size_of(hf_config, "intermediate_size"),
        heads=heads,
        query_groups=heads,
        head_dim=nope + rope,
        vocab=size_of(hf_config, "vocab_size"),
        tied=bool_of(hf_config, "tie_word_embeddings"),
        experts=experts,
        expert_ffn=expert_ffn,
        more={
            "query": heads * (nope + rope),
            "key_value": heads * (nope + value),
            "value": heads * value,
            "rope": rope,
            "kv_lora": size_of(hf_config, "kv_lora_rank"),
            "q_lora": 0 if hf_config["q_lora_rank"] is None else size_of(hf_config, "q_lora_rank"),  # null: no latent of queries
            "shared_ffn": expert_ffn * size_of(hf_config, "n_shared_experts"),
        },
    )
    chosen_experts(hf_config, sizes)
    return sizes


def _table(hf_config: Mapping, *, router_bias: bool) -> Table:
    hf_config = with_defaults(hf_config)
    sizes = _sizes(hf_config)
    attention = (
        norm_row("input_layernorm", "input_layernorm"),  # under Transformer Engine too: it stands before two linear layers
        *(_QUERY_BY_LATENT if sizes.more["q_lora"] else _QUERY),
        *_KEY_VALUE,
    )
    mixture = (*attention, *_MIXTURE, *((_ROUTER_BIAS,) if router_bias else ()))
    return decoder_table(sizes, tuple((*attention, *_DENSE) if dense else mixture for dense in _dense_layers(hf_config, sizes)))


def _dense_layers(hf_config: Mapping, sizes: ModelSizes) -> list[bool]:
    """Which layers have one MLP and no experts: the first few."""
    first = size_of(hf_config, "first_k_dense_replace", least=0)
    return [layer < first for layer in range(sizes.layers)]


def _kwargs(hf_config: Mapping, *, sigmoid: bool) -> dict[str, dict]:
    check_rope(hf_config)
    sizes = _sizes(hf_config)
    groups, chosen_groups = _groups(hf_config, sizes)
    kwargs = dense_kwargs(sizes, hf_config, qk_norm=True)
    kwargs["transformer"] |= mixture_kwargs(hf_config, sizes)
    kwargs["transformer"] |= {
        "multi_latent_attention": True,
        "q_lora_rank": sizes.more["q_lora"] or None,
        "kv_lora_rank": sizes.more["kv_lora"],
        "qk_head_dim": sizes.head_dim - sizes.more["rope"],
        "qk_pos_emb_head_dim": sizes.more["rope"],
        "v_head_dim": sizes.more["value"] // sizes.heads,
        "rope_type": "rope",
        "rotary_base": kwargs["model"]["rotary_base"],
        "moe_layer_freq": [int(not dense) for dense in _dense_layers(hf_config, sizes)],
        "moe_shared_expert_intermediate_size": sizes.more["shared_ffn"],
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen_groups,
        "moe_router_topk_scaling_factor": number_of(hf_config, "routed_scaling_factor", above=0),
    }
    return kwargs


def _groups(hf_config: Mapping, sizes: ModelSizes) -> tuple[int | None, int | None]:
    """Groups of experts and how many of them a token may use; None where it may use all."""
    if hf_config.get("topk_method") == "greedy":
        return None, None
    groups, chosen = size_of(hf_config, "n_group"), size_of(hf_config, "topk_group")
    if sizes.experts % groups or chosen > groups:
        raise cannot("n_group", groups, f"a divisor of {sizes.experts} experts, at least topk_group = {chosen}")
    if chosen_experts(hf_config, sizes) > chosen * (sizes.experts // groups):
        raise cannot("num_experts_per_tok", hf_config["num_experts_per_tok"], f"at most the experts of {chosen} groups")
    return groups, chosen


def _kwargs2(hf_config: Mapping) -> dict[str, dict]:
    hf_config = with_defaults(hf_config)
    # The Hub's own code renormalises with norm_topk_prob, transformers' doesn't: whose numbers would be right?
    refuse(hf_config, norm_topk_prob=(False, None), scoring_func="softmax", topk_method=("greedy", "group_limited_greedy"))
    refuse(hf_config, rope_interleave=True)  # transformers doesn't read it for V2, and the layer of ours does
    return _kwargs(hf_config, sigmoid=False)


def _kwargs3(hf_config: Mapping) -> dict[str, dict]:
    hf_config = with_defaults(hf_config)
    refuse(hf_config, scoring_func="sigmoid", topk_method="noaux_tc")
    refuse(hf_config, head_dim=size_of(hf_config, "qk_rope_head_dim"))  # transformers would turn so many dimensions
    for key in ("norm_topk_prob", "rope_interleave"):  # the layers of ours read them
        bool_of(hf_config, key, True)
    kwargs = _kwargs(hf_config, sigmoid=True)
    if kwargs["transformer"]["num_moe_experts"] < 2 * kwargs["transformer"]["moe_router_num_groups"]:
        raise cannot("n_group", hf_config["n_group"], "groups of two experts at least: the best two stand for a group")
    return kwargs


def _unused2(hf_config: Mapping) -> tuple[tuple[str, str], ...]:
    return (ROTARY_BUFFERS, *tied_head(hf_config))


def _unused3(hf_config: Mapping) -> tuple[tuple[str, str], ...]:
    """Layers behind the last one predict further tokens: they are of use to speculative decoding alone."""
    layers = layers_of(hf_config)
    extra = size_of(with_defaults(hf_config), "num_nextn_predict_layers", 1, least=0, most=MOST_LAYERS)
    numbers = "|".join(str(layers + i) for i in range(extra))
    behind = ((rf"model\.layers\.({numbers})\..*", "a layer that predicts further tokens, which training has no use for"),) if extra else ()
    return (ROTARY_BUFFERS, *tied_head(hf_config), *behind)


DEEPSEEK_V2 = Family("deepseek_v2", lambda hf_config: _table(hf_config, router_bias=False), _kwargs2, unused=_unused2)
DEEPSEEK_V3 = Family("deepseek_v3", lambda hf_config: _table(hf_config, router_bias=True), _kwargs3, unused=_unused3)
