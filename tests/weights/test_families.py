"""Every family: its table is what transformers writes, and every layout gives back every bit."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.errors import ModelError
from megarl.types import Layout, Rank
from megarl.weights.families import FAMILIES, model_family, read_hf_config
from megarl.weights.hf_checks import check_tensors
from megarl.weights.hf_export import HfExport, check_coverage
from megarl.weights.hf_io import load_into
from megarl.weights.regions import as_slices
from tests.weights.families import MODELS, save_model

MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")


def layouts(mixture: bool) -> list[Layout]:
    """TP {1, 2, 4} x PP {1, 2, 3, 4} x VPP {1, 2}: 6 layers over 4 stages are uneven. For mixtures with up to 3 stages, x EP {1, 2, 3}
    x ETP {1, 2}."""
    cut = [(t, p, v, 1, 1) for t, p, v in product((1, 2, 4), (1, 2, 3, 4), (1, 2)) if p * v <= 6 and (p, v) != (1, 2)]
    if mixture:
        cut = [(t, p, v, e, et) for (t, p, v, _, _), e, et in product(cut, (1, 2, 3), (1, 2)) if p <= 3]
    return [Layout(t, p, v, 1, e, et, e * et, sequence_parallel=t > 1) for t, p, v, e, et in cut]


def rank_params(shards: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of one rank, straight from whole tensors."""
    params = {}
    for name, shard in shards.items():
        dtypes = {tensors[source.name].dtype for source, _ in shard.copies}
        params[name] = torch.zeros(shard.shape, dtype=dtypes.pop() if dtypes else torch.float32)
        for source, target in shard.copies:
            params[name][as_slices(target.box)] = tensors[source.name][as_slices(source.box)]
    return params


@pytest.mark.parametrize("name", MODELS)
def test_the_table_is_what_transformers_writes(name: str, tmp_path: Path) -> None:
    c = read_hf_config(save_model(name, tmp_path))
    written = {key: tuple(tensor.shape) for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert model_family(c).hf_tensors(c) == written
    model_family(c).check_computed(c)
    check_tensors(tmp_path, c, "lm", read=True)


def test_every_family_has_a_model_here() -> None:
    assert {model_type for model_type, _ in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_gives_back_every_bit(name: str, tied: bool, tmp_path: Path) -> None:
    c = read_hf_config(save_model(name, tmp_path, dtype=torch.bfloat16, tie_word_embeddings=tied))
    original = load_file(tmp_path / "model.safetensors")
    family, shapes = model_family(c), model_family(c).hf_tensors(c)
    for layout in layouts(mixture=name in MIXTURES):
        ranks = [(rank, family.shard(c, rank)) for rank in (Rank(i, layout) for i in range(layout.world_size))]
        check_coverage(shapes, ranks)
        again = {key: torch.full_like(tensor, float("nan")) for key, tensor in original.items()}
        for rank, shards in ranks:
            params = rank_params(shards, original)
            for key, shard in shards.items():
                for source, target in shard.copies if shard.owned_by(rank) else ():
                    again[source.name][as_slices(source.box)] = params[key][as_slices(target.box)]
        assert all(torch.equal(again[key], tensor) for key, tensor in original.items()), layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_through_files_and_out_again(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    c = read_hf_config(save_model(name, tmp_path / "in", dtype=dtype))
    layout = Layout(4, 2, 1, 1, 3, 1, 3, sequence_parallel=True) if name in MIXTURES else Layout(4, 4)
    HfExport.create(tmp_path / "aside", c, dtype, layout, shard_bytes=30_000)
    for rank in (Rank(i, layout) for i in range(layout.world_size)):
        shards = model_family(c).shard(c, rank)
        params = {key: torch.full(s.shape, -1.0, dtype=torch.float32 if s.float32 else dtype) for key, s in shards.items()}
        assert load_into(params, shards, tmp_path / "in") == ()
        HfExport.open(tmp_path / "aside").write(params, shards, rank)
    HfExport.open(tmp_path / "aside").finish(tmp_path / "out", tmp_path / "in")
    original = load_file(tmp_path / "in" / "model.safetensors")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    written = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert written.keys() == original.keys()
    assert all(written[key].dtype == t.dtype and torch.equal(written[key], t) for key, t in original.items())
    assert read_hf_config(tmp_path / "out") == c
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), from_disk(tmp_path / "in", dtype).parameters(), strict=True))


@pytest.mark.parametrize("name", ["llama", "phi3", "deepseek_v3"])
def test_a_rank_reads_no_element_that_it_does_not_keep(name: str, tmp_path: Path) -> None:
    """All others are made NaN, which no load lets through."""
    c = read_hf_config(save_model(name, tmp_path))
    original = load_file(tmp_path / "model.safetensors")
    layout = Layout(2, 3, 1, 1, 3, 1, 3, sequence_parallel=True) if name in MIXTURES else Layout(2, 3)
    shards = model_family(c).shard(c, Rank(layout.world_size // 2, layout))
    poisoned = {key: torch.full_like(tensor, float("nan")) for key, tensor in original.items()}
    for source in (copy.source for shard in shards.values() for copy in shard.copies):
        poisoned[source.name][as_slices(source.box)] = original[source.name][as_slices(source.box)]
    save_file(poisoned, tmp_path / "model.safetensors")
    params = {key: torch.zeros(shard.shape) for key, shard in shards.items()}
    load_into(params, shards, tmp_path)
    assert all(torch.equal(params[key], value) for key, value in rank_params(shards, original).items())


def from_disk(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3"])
def test_experts_stacked_in_one_tensor_are_read_like_those_apart(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path / "apart")
    from_disk(tmp_path / "apart", torch.float32).save_pretrained(tmp_path / "stacked", save_original_format=False)
    stacked = load_file(tmp_path / "stacked" / "model.safetensors")
    assert any(key.endswith("experts.gate_up_proj") for key in stacked)
    c = read_hf_config(tmp_path / "stacked")
    check_tensors(tmp_path / "stacked", c, "lm", read=True)
    layout = Layout(2, 3, 1, 1, 3, 2, 3, sequence_parallel=True)
    for rank in (Rank(i, layout) for i in range(layout.world_size)):
        shards = model_family(c).shard(c, rank)
        one, two = ({key: torch.full(shard.shape, -1.0) for key, shard in shards.items()} for _ in range(2))
        load_into(one, shards, tmp_path / "apart")
        load_into(two, shards, tmp_path / "stacked")
        assert all(torch.equal(one[key], two[key]) for key in one)


BLOCK = (16, 12)  # divides nothing here


def quantized(directory: Path, target: Path) -> dict[str, torch.Tensor]:
    """DeepSeek-V3's form: linear weights in e4m3 with a factor a block. Returns what the weights then are."""
    c, tensors = read_hf_config(directory), load_file(directory / "model.safetensors")
    stored, true = {}, {}
    for key, tensor in tensors.items():
        if tensor.dim() != 2 or "embed" in key or "lm_head" in key or key.endswith("gate.weight"):
            stored[key] = true[key] = tensor
            continue
        rows, columns = tensor.shape
        scales = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1])) + 0.5
        every = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[:rows, :columns]
        stored[key], stored[key + "_scale_inv"] = (tensor / every).to(torch.float8_e4m3fn), scales
        true[key] = stored[key].float() * every
    target.mkdir()
    how = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
    (target / "config.json").write_text(json.dumps(c | {"quantization_config": how}))
    save_file(stored, target / "model.safetensors")
    return true


def test_blocks_of_fp8_are_read_as_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    true = quantized(save_model("deepseek_v3", tmp_path / "in"), tmp_path / "fp8")
    c = read_hf_config(tmp_path / "fp8")
    check_tensors(tmp_path / "fp8", c, "lm", read=True)
    layout = Layout(4, 2, 1, 1, 3, 1, 3, sequence_parallel=True)
    HfExport.create(tmp_path / "aside", c, torch.float32, layout)
    for rank in (Rank(i, layout) for i in range(layout.world_size)):
        shards = model_family(c).shard(c, rank)
        params = {key: torch.full(shard.shape, -1.0) for key, shard in shards.items()}
        load_into(params, shards, tmp_path / "fp8")
        assert all(torch.equal(params[key], value) for key, value in rank_params(shards, true).items())
        HfExport.open(tmp_path / "aside").write(params, shards, rank)
    HfExport.open(tmp_path / "aside").finish(tmp_path / "out", tmp_path / "fp8")
    assert "quantization_config" not in read_hf_config(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[key], tensor) for key, tensor in true.items())


def test_fp8_without_its_factors_is_named(tmp_path: Path) -> None:
    quantized(save_model("deepseek_v3", tmp_path / "in"), tmp_path / "fp8")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    lost = next(key for key in tensors if key.endswith("_scale_inv"))
    save_file({key: t for key, t in tensors.items() if key != lost}, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(ModelError, match=lost.removesuffix("_scale_inv")):
        check_tensors(tmp_path / "fp8", read_hf_config(tmp_path / "fp8"), "lm", read=False)


@pytest.mark.parametrize(
    ("name", "extra", "allowed"),
    [
        ("deepseek_v3", "model.layers.6.eh_proj.weight", True),  # behind the last layer: multi-token prediction
        ("deepseek_v3", "model.layers.7.eh_proj.weight", False),
        ("deepseek_v2", "model.layers.6.eh_proj.weight", False),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias", True),
        ("gpt_neox", "gpt_neox.layers.0.attention.extra", False),
        ("qwen3", "model.layers.0.self_attn.q_proj.bias", False),
        ("qwen3_moe", "model.layers.0.mlp.gate.e_score_correction_bias", False),
        ("gemma2", "model.vision_tower.weight", False),
    ],
)
def test_what_a_model_has_no_place_for_is_never_dropped_silently(name: str, extra: str, allowed: bool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"num_nextn_predict_layers": 1} if name == "deepseek_v3" else {}
    c = read_hf_config(save_model(name, tmp_path, **changes))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {extra: torch.ones(3)}, tmp_path / "model.safetensors")
    if allowed:
        assert model_family(c).reason_unused(c, extra)
        check_tensors(tmp_path, c, "lm", read=True)
        return
    with pytest.raises(ModelError, match=extra):
        check_tensors(tmp_path, c, "lm", read=True)


@pytest.mark.parametrize("name", MODELS)
def test_windows_and_scales_are_those_of_transformers_configuration(name: str, tmp_path: Path) -> None:
    c = read_hf_config(save_model(name, tmp_path))
    theirs, ours = AutoConfig.from_pretrained(tmp_path), model_family(c).architecture(c)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    windows = [getattr(theirs, "sliding_window", None) if kind == "sliding_attention" else None for kind in kinds]
    assert [ours.window(layer) for layer in range(theirs.num_hidden_layers)] == windows
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.output_softcap == getattr(theirs, "final_logit_softcapping", None)


def test_a_missing_key_means_what_transformers_takes_it_for(tmp_path: Path) -> None:
    """Published files leave out what the family's configuration has by itself."""
    missing = {"gemma2": ("tie_word_embeddings", "sliding_window", "layer_types", "attn_logit_softcapping"), "mistral": ("sliding_window",),
               "gemma3": ("tie_word_embeddings", "layer_types"), "gpt_neox": ("use_parallel_residual", "rope_parameters")}  # fmt: skip
    for name, keys in missing.items():
        c = read_hf_config(save_model(name, tmp_path / name))
        cut = {key: value for key, value in c.items() if key not in keys}
        (tmp_path / name / "config.json").write_text(json.dumps(cut))
        theirs = AutoConfig.from_pretrained(tmp_path / name).to_dict()
        ours = model_family(cut)
        assert ours.sizes(cut) == ours.sizes(theirs), name
        assert ours.architecture(cut) == ours.architecture(theirs), name
        assert ours.megatron_kwargs(cut) == ours.megatron_kwargs(theirs), name


def test_the_worked_example_of_the_docs_is_the_file() -> None:
    root = Path(__file__).parents[2]
    shown = (root / "docs/adding-a-family.md").read_text().split("```python\n")[1].split("```")[0]
    assert shown in (root / "megarl/weights/families/seed_oss.py").read_text()
