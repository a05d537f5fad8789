"""Transformer Engine's layers load a converted checkpoint, and what their run saves converts, under the same names as the local layers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.convert.to_hf import to_hf
from megarl.convert.to_megatron import to_megatron
from megarl.device import on_gpu
from tests.convert.directories import assert_same_tensors, tensors
from tests.gpu.ranks import on_one_rank
from tests.weights.families import save_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_gpu(), reason="needs a CUDA device")]
FAMILIES = ("llama biases", "qwen3_moe", "gpt_neox", "gemma2", "deepseek_v2", "deepseek_v3")


def load_and_save(rank: Any, root: Path) -> dict[str, str]:
    """All families in one process, whose imports take twenty seconds. Returns the layer spec of each."""
    import torch

    from megarl.megatron.checkpoint import load_engine, save_engine
    from megarl.megatron.engine import Engine
    from megarl.megatron.model import Role
    from megarl.weights.families import read_hf_config

    specs = {}
    for name in FAMILIES:
        place = root / name
        config = read_hf_config(place / "hf")
        read, loaded = (Engine(config, rank, Role("lm", trainable=False, dtype="bfloat16")) for _ in range(2))
        for parameter in loaded.named_parameters().values():
            parameter.data.fill_(-777.0)
        read.load_hf(place / "hf")
        load_engine(loaded, place / "megatron")
        for key, parameter in read.named_parameters().items():
            assert torch.equal(parameter, loaded.named_parameters()[key]), (name, key)
        (place / "saved").mkdir()
        save_engine(loaded, place / "saved")
        specs[name] = read.spec
    return specs


def test_transformer_engine_loads_and_saves(tmp_path: Path) -> None:
    import torch

    for name in FAMILIES:
        source = save_model(name, tmp_path / name / "hf", dtype=torch.bfloat16)
        to_megatron(source, tmp_path / name / "megatron", quiet=True)
    specs = on_one_rank(load_and_save, tmp_path)
    assert "te" in specs.values()
    for name in FAMILIES:
        (tmp_path / name / "hf" / "tokenizer.json").write_text("{}")
        to_hf(tmp_path / name / "saved", tmp_path / name / "back", tokenizer=tmp_path / name / "hf", quiet=True)
        assert_same_tensors(tensors(tmp_path / name / "hf"), tensors(tmp_path / name / "back"))
