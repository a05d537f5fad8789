"""What Megatron and vLLM hold, written down a second time with reshape, chunk and cat alone: nothing of the code under test."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from megarl.types import Rank

MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
}
QWEN2_BASE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 3,
    "vocab_size": 61,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
PADDING = 16  # rows per tensor-parallel rank that vocabularies are padded to


def config(**changes: object) -> dict:
    """A small model of odd sizes: nothing is a power of two that needn't be."""
    return QWEN2_BASE | changes


def mlps(c: dict) -> list[tuple[str, int]]:
    """Name of each MLP of a layer, and its inner width."""
    if c["model_type"] != "qwen3_moe":
        return [("mlp", c["intermediate_size"])]
    return [(f"mlp.experts.{e}", c["moe_intermediate_size"]) for e in range(c["num_experts"])]


def hf_tensors(c: dict, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every tensor of the model; no number occurs twice in all of them."""
    h, q, kv = (
        c["hidden_size"],
        c["num_attention_heads"] * c["head_dim"],
        c["num_key_value_heads"] * c["head_dim"],
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], h), "model.norm.weight": (h,)}
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,)}
        shapes |= {p + f"self_attn.{x}_proj.weight": (n, h) for x, n in (("q", q), ("k", kv), ("v", kv))}
        if c["model_type"] == "qwen2":
            shapes |= {p + f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", q), ("k", kv), ("v", kv))}
        if c["model_type"].startswith("qwen3"):
            shapes |= {p + f"self_attn.{x}_norm.weight": (c["head_dim"],) for x in "qk"}
        shapes[p + "self_attn.o_proj.weight"] = (h, q)
        if c["model_type"] == "qwen3_moe":
            shapes[p + "mlp.gate.weight"] = (c["num_experts"], h)
        for mlp, width in mlps(c):
            shapes |= {p + f"{mlp}.{x}_proj.weight": (h, width) if x == "down" else (width, h) for x in ("gate", "up", "down")}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], h)
    tensors, start = {}, 1  # 0 is padding
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + count, dtype=torch.float64).view(shape).to(dtype)
        start += count
    return tensors


def save(c: dict, directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Write a model directory of one file; returns its tensors."""
    import json

    directory.mkdir(parents=True, exist_ok=True)
    tensors = hf_tensors(c, dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(c))
    return tensors


def _padded(embedding: torch.Tensor, tp: int) -> torch.Tensor:
    rows = -(-len(embedding) // (tp * PADDING)) * tp * PADDING
    return torch.cat([embedding, torch.zeros(rows - len(embedding), embedding.shape[1], dtype=embedding.dtype)])


def megatron(c: dict, hf: dict[str, torch.Tensor], rank: Rank) -> dict[str, torch.Tensor]:
    """All parameters of one rank by name (local layer spec)."""
    tp, pp, chunks = rank.layout.tensor, rank.layout.pipeline, rank.layout.virtual_pipeline
    tp_rank, pp_rank = rank.index % tp, rank.index // (rank.layout.world_size // pp)
    out: dict[str, torch.Tensor] = {}
    first, last = ("chunk0.", f"chunk{chunks - 1}.") if chunks > 1 else ("", "")
    if pp_rank == 0:
        out[first + "embedding.word_embeddings.weight"] = _padded(hf["model.embed_tokens.weight"], tp).chunk(tp)[tp_rank]
    if pp_rank == pp - 1:
        out[last + "decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not c["tie_word_embeddings"]:
            out[last + "output_layer.weight"] = _padded(hf["lm_head.weight"], tp).chunk(tp)[tp_rank]
        elif pp > 1:
            out[last + "output_layer.weight"] = _padded(hf["model.embed_tokens.weight"], tp).chunk(tp)[tp_rank]
    runs = torch.arange(c["num_hidden_layers"]).chunk(pp * chunks)
    for chunk in range(chunks):
        for local, layer in enumerate(runs[chunk * pp + pp_rank].tolist()):
            prefix = f"chunk{chunk}." if chunks > 1 else ""
            out |= _megatron_layer(c, hf, rank, f"model.layers.{layer}.", f"{prefix}decoder.layers.{local}.")
    return out


def _megatron_layer(c: dict, hf: dict[str, torch.Tensor], rank: Rank, source: str, target: str) -> dict[str, torch.Tensor]:
    tp, groups, out = rank.layout.tensor, c["num_key_value_heads"], {}
    tp_rank = rank.index % tp
    out[target + "input_layernorm.weight"] = hf[source + "input_layernorm.weight"]
    out[target + "pre_mlp_layernorm.weight"] = hf[source + "post_attention_layernorm.weight"]
    for kind in ("weight", "bias") if c["model_type"] == "qwen2" else ("weight",):
        by_group = [hf[source + f"self_attn.{x}_proj.{kind}"].unflatten(0, (groups, -1)) for x in "qkv"]
        out[target + f"self_attention.linear_qkv.{kind}"] = torch.cat(by_group, dim=1).flatten(0, 1).chunk(tp)[tp_rank]
    out[target + "self_attention.linear_proj.weight"] = hf[source + "self_attn.o_proj.weight"].chunk(tp, dim=1)[tp_rank]
    if c["model_type"].startswith("qwen3"):
        out |= {target + f"self_attention.{x}_layernorm.weight": hf[source + f"self_attn.{x}_norm.weight"] for x in "qk"}
    cut, place, held = tp, tp_rank, [("mlp.", "mlp")]
    if c["model_type"] == "qwen3_moe":
        out[target + "mlp.router.weight"] = hf[source + "mlp.gate.weight"]
        cut, ep = rank.layout.expert_tensor, rank.layout.expert
        place, mine = rank.index % cut, rank.index // cut % ep
        names = [name for name, _ in mlps(c)]
        own = names[mine * len(names) // ep : (mine + 1) * len(names) // ep]
        held = [(f"mlp.experts.local_experts.{local}.", name) for local, name in enumerate(own)]
    for name, mlp in held:
        gate, up, down = (hf[source + f"{mlp}.{x}_proj.weight"] for x in ("gate", "up", "down"))
        out[target + name + "linear_fc1.weight"] = torch.cat([x.chunk(cut)[place] for x in (gate, up)])
        out[target + name + "linear_fc2.weight"] = down.chunk(cut, dim=1)[place]
    return out


def vllm(c: dict, hf: dict[str, torch.Tensor], tp: int, rank: int) -> dict[str, torch.Tensor]:
    """All parameters of one rank of vLLM: [q; k; v] rows of the rank, key/value heads repeated when there are fewer than ranks."""
    heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
    repeat = max(1, tp // groups)

    def of_rank(x: str, tensor: torch.Tensor) -> torch.Tensor:
        by_head = tensor.unflatten(0, (heads if x == "q" else groups, -1))
        by_head = by_head if x == "q" else by_head.repeat_interleave(repeat, dim=0)
        return by_head.chunk(tp)[rank].flatten(0, 1)

    embedding = torch.cat([hf["model.embed_tokens.weight"], torch.zeros(64 - c["vocab_size"], c["hidden_size"])]).chunk(tp)[rank]
    out = {"model.embed_tokens.weight": embedding, "model.norm.weight": hf["model.norm.weight"]}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = torch.cat([hf["lm_head.weight"], torch.zeros(64 - c["vocab_size"], c["hidden_size"])]).chunk(tp)[rank]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[p + name] = hf[p + name]
        for kind in ("weight", "bias") if c["model_type"] == "qwen2" else ("weight",):
            out[p + f"self_attn.qkv_proj.{kind}"] = torch.cat([of_rank(x, hf[p + f"self_attn.{x}_proj.{kind}"]) for x in "qkv"])
        out[p + "self_attn.o_proj.weight"] = hf[p + "self_attn.o_proj.weight"].chunk(tp, dim=1)[rank]
        out[p + "mlp.gate_up_proj.weight"] = torch.cat([hf[p + f"mlp.{x}_proj.weight"].chunk(tp)[rank] for x in ("gate", "up")])
        out[p + "mlp.down_proj.weight"] = hf[p + "mlp.down_proj.weight"].chunk(tp, dim=1)[rank]
    return out
