"""Hugging Face -> Megatron -> Hugging Face gives every tensor back bit for bit, and the configuration; and nothing of it runs a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from megarl.convert.targets import plan_model
from megarl.convert.to_hf import to_hf
from megarl.convert.to_megatron import to_megatron
from megarl.convert.verify import verify
from megarl.errors import CheckpointError
from tests.convert.directories import assert_same_tensors, config, tensors
from tests.weights.families import MODELS, save_model

TOKENIZER = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}", "generation_config.json": '{"temperature": 0.7}'}


def there_and_back(source: Path, tmp_path: Path, **back: object) -> Path:
    to_megatron(source, tmp_path / "megatron", file_bytes=50_000, quiet=True)
    to_hf(tmp_path / "megatron", tmp_path / "back", shard_bytes=60_000, quiet=True, **back)
    return tmp_path / "back"


@pytest.mark.parametrize("name", MODELS)
def test_every_family_comes_back(name: str, tmp_path: Path) -> None:
    source = save_model(name, tmp_path / "source")
    for file, text in TOKENIZER.items():
        (source / file).write_text(text)
    back = there_and_back(source, tmp_path)
    assert_same_tensors(tensors(source), tensors(back))
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert {file: (back / file).read_text() for file in TOKENIZER} == TOKENIZER
    files = sorted(path.name for path in back.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(back).values())
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["qwen2", "mixtral", "gemma2", "deepseek_v3"])
def test_dtypes_and_ties(name: str, dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    """DeepSeek-V3's router bias is float32 among bfloat16, and stays so."""
    source = save_model(name, tmp_path / "source", dtype=dtype, tie_word_embeddings=tied)
    found = tensors(there_and_back(source, tmp_path))
    assert_same_tensors(tensors(source), found)
    kinds = {tensor.dtype for tensor in found.values()}
    assert kinds == ({dtype, torch.float32} if name == "deepseek_v3" else {dtype})
    assert ("lm_head.weight" in found) is not tied


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_neox", "gemma2"])
def test_a_value_head_comes_back(name: str, tmp_path: Path) -> None:
    source = save_model(name, tmp_path / "source")
    settings = AutoConfig.from_pretrained(source, num_labels=1, pad_token_id=0)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32).save_pretrained(tmp_path / "critic")
    back = there_and_back(tmp_path / "critic", tmp_path)
    found = tensors(back)
    assert found["score.weight"].shape == (1, 40) and found["score.weight"].any()
    assert_same_tensors(tensors(tmp_path / "critic"), found)
    assert config(back) == config(tmp_path / "critic")


def test_layers_of_different_dtypes_keep_them(tmp_path: Path) -> None:
    """The checkpoint stacks layers in one tensor of one dtype, wide enough for all."""
    source = save_model("llama", tmp_path / "source", dtype=torch.bfloat16)
    mixed = tensors(source)
    for name, dtype in {"layers.0.self_attn.q_proj": torch.float32, "layers.3.self_attn.k_proj": torch.float16}.items():
        key = f"model.{name}.weight"
        mixed[key] = torch.randn(mixed[key].shape).to(dtype)
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    back = there_and_back(source, tmp_path)
    assert_same_tensors(mixed, tensors(back))
    assert verify(source, tmp_path / "megatron", quiet=True) == sum(t.numel() for t in mixed.values())


def test_another_dtype_by_demand(tmp_path: Path) -> None:
    source = save_model("qwen3", tmp_path / "source")
    back = there_and_back(source, tmp_path, dtype="bfloat16")
    assert_same_tensors({name: t.bfloat16() for name, t in tensors(source).items()}, tensors(back))
    assert config(back) == config(source) | {"dtype": "bfloat16"}


def test_experts_that_are_stacked_on_disk(tmp_path: Path) -> None:
    """They come back apart, as published directories have them."""
    source = save_model("qwen3_moe", tmp_path / "source")
    apart, stacked = tensors(source), {}
    for name, tensor in apart.items():
        if ".experts." not in name:
            stacked[name] = tensor
    for layer in range(6):
        stem = f"model.layers.{layer}.mlp.experts."
        both = [torch.cat([apart[f"{stem}{e}.{x}_proj.weight"] for x in ("gate", "up")]) for e in range(6)]
        stacked[stem + "gate_up_proj"] = torch.stack(both)
        stacked[stem + "down_proj"] = torch.stack([apart[f"{stem}{e}.down_proj.weight"] for e in range(6)])
    save_file(stacked, source / "model.safetensors", metadata={"format": "pt"})
    assert_same_tensors(apart, tensors(there_and_back(source, tmp_path)))


def test_what_is_left_out(tmp_path: Path) -> None:
    """A saved copy of a tied embedding, buffers of older writers, layers that predict further tokens."""
    source = save_model("qwen2", tmp_path / "source")
    kept = tensors(source)
    extra = {"lm_head.weight": kept["model.embed_tokens.weight"].clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}
    save_file(kept | extra, source / "model.safetensors", metadata={"format": "pt"})
    model = to_megatron(source, tmp_path / "megatron", quiet=True)
    assert model.dropped.keys() == extra.keys() and all(model.dropped.values())
    to_hf(tmp_path / "megatron", tmp_path / "back", quiet=True)
    assert_same_tensors(kept, tensors(tmp_path / "back"))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    source = save_model("deepseek_v3", tmp_path / "source")
    settings = config(source) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(settings))
    kept = tensors(source)
    save_file(kept | {"model.layers.6.eh_proj.weight": torch.ones(40, 80)}, source / "model.safetensors", metadata={"format": "pt"})
    model = to_megatron(source, tmp_path / "megatron", quiet=True)
    assert list(model.dropped) == ["model.layers.6.eh_proj.weight"]
    to_hf(tmp_path / "megatron", tmp_path / "back", quiet=True)
    assert_same_tensors(kept, tensors(tmp_path / "back"))


def test_fp8_is_dequantised(tmp_path: Path) -> None:
    """Weights in blocks of fp8, each block with a factor, become what their products are in bfloat16."""
    source = save_model("deepseek_v3", tmp_path / "source", dtype=torch.bfloat16)
    plain, stored, expected = tensors(source), {}, {}
    for name, tensor in plain.items():
        if not name.endswith(("_proj.weight", "mqa.weight")):
            stored[name] = expected[name] = tensor
            continue
        rows, columns = (-(-size // 16) for size in tensor.shape)
        scales = torch.rand(rows, columns) + 0.5
        spread = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[: tensor.shape[0], : tensor.shape[1]]
        stored[name] = (tensor.float() / spread).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scales
        expected[name] = (stored[name].float() * spread).bfloat16()
    assert len(stored) > len(plain)
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    (source / "config.json").write_text(json.dumps(config(source) | {"quantization_config": fp8}))
    back = there_and_back(source, tmp_path)
    assert_same_tensors(expected, tensors(back))
    assert "quantization_config" not in config(back)
    assert verify(source, tmp_path / "megatron", quiet=True) == sum(t.numel() for t in expected.values())


def test_verify_finds_one_changed_bit(tmp_path: Path) -> None:
    source = save_model("llama", tmp_path / "source")
    to_megatron(source, tmp_path / "megatron", quiet=True)
    numbers = tensors(source)
    assert verify(source, tmp_path / "megatron", quiet=True) == sum(t.numel() for t in numbers.values())
    changed = numbers["model.layers.5.mlp.down_proj.weight"].view(torch.int32)
    changed[39, 43] ^= 1
    save_file(numbers, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.layers.5.mlp.down_proj.weight.*decoder.layers.mlp.linear_fc2.weight"):
        verify(source, tmp_path / "megatron", quiet=True)


def test_nan_and_infinity_are_copied_as_they_are(tmp_path: Path) -> None:
    source = save_model("qwen3", tmp_path / "source")
    numbers = tensors(source)
    numbers["model.norm.weight"][:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    save_file(numbers, source / "model.safetensors", metadata={"format": "pt"})
    assert_same_tensors(numbers, tensors(there_and_back(source, tmp_path)))
    verify(source, tmp_path / "megatron", quiet=True)


def test_pieces_smaller_than_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is written and read in pieces of a few rows, which cut across heads, gate and up."""
    for module in ("megatron_model", "to_megatron"):
        monkeypatch.setattr(f"megarl.convert.{module}.PIECE_BYTES", 700)
    monkeypatch.setattr("megarl.convert.targets.pieces.__defaults__", (700,))
    for name in ("qwen3_moe", "phi3"):
        source = save_model(name, tmp_path / name / "source")
        assert_same_tensors(tensors(source), tensors(there_and_back(source, tmp_path / name)))


def test_a_model_that_megatron_cant_compute_still_converts(tmp_path: Path) -> None:
    source = save_model("llama", tmp_path / "source")
    (source / "config.json").write_text(json.dumps(config(source) | {"hidden_act": "tanh"}))
    assert_same_tensors(tensors(source), tensors(there_and_back(source, tmp_path)))


def test_neither_megatron_nor_ray_nor_vllm_is_imported(tmp_path: Path) -> None:
    source = save_model("llama", tmp_path / "source")
    script = (
        "import sys\nfrom megarl.cli.main import main\n"
        f"code = main(['convert', 'to-megatron', '--hf', {str(source)!r}, '--out', {str(tmp_path / 'megatron')!r}, '--verify'])\n"
        "print(code, sorted({'megatron', 'ray', 'vllm'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_every_parameter_has_its_own_place(name: str, tmp_path: Path) -> None:
    plan = plan_model(config(save_model(name, tmp_path / "source")), "lm")
    places = [(target.place.key, target.place.index) for target in plan.targets]
    assert len(set(places)) == len(places) > 60
