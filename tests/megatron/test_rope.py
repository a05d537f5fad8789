"""Rotary positions are transformers' own, bit for bit: frequencies, factor, and the choice between the two sets of LongRoPE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.errors import ModelError
from megarl.megatron.packed import ContextRank, PackedTokens, pack
from megarl.megatron.rope import Rotary, rotary_sets, rotate
from megarl.types import Ragged
from megarl.weights.families import model_family, read_hf_config
from tests.megatron.family_models import build

# name -> tokens of the longest sequence; None: max_position_embeddings, 128.
SCALED = {
    "llama3 rope": None,
    "linear rope and biases": None,
    "yarn": None,
    "longrope short": 80,
    "longrope long": 17,
    "gemma3": None,
}
LENGTHS = [3, 40, 17]


def packed(context: ContextRank) -> PackedTokens:
    prompts, responses = Ragged.from_list([[1] * n for n in LENGTHS], "int32"), Ragged.from_list([[]] * len(LENGTHS), "int32")
    return pack(prompts, responses, align=1, device=torch.device("cpu"), context=context)


def transformers_turns(hf_config: dict[str, Any], name: str | None, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [T, r] of transformers' own module at ``positions`` [T]."""
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(json.dumps(hf_config)))).model.rotary_emb
    only = {} if name is None else {"layer_type": name}
    cos, sin = module(torch.zeros(1), positions[None], **only)
    return cos[0], sin[0]


def turns(rotary: Rotary, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = rotary.angles(positions)
    return angles.cos() * rotary.factor, angles.sin() * rotary.factor


@pytest.mark.parametrize("model", SCALED)
def test_scaled_ones_are_transformers_bit_for_bit(model: str, tmp_path: Path) -> None:
    hf_config = read_hf_config(build(tmp_path / "model", model))
    sets = rotary_sets(hf_config, model_family(hf_config).architecture(hf_config), SCALED[model])
    assert set(sets) == ({"sliding_attention", "full_attention"} if model == "gemma3" else {None})
    # transformers takes the long set for a batch that is longer than the original length, so that it is asked in one with all positions.
    positions = torch.arange(SCALED[model] or 128)
    for name, rotary in sets.items():
        for ours, theirs in zip(turns(rotary, positions), transformers_turns(hf_config, name, positions), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("longest", [16, 17, None])
def test_longrope_takes_the_long_set_for_runs_longer_than_the_original_length(longest: int | None, tmp_path: Path) -> None:
    hf_config = read_hf_config(build(tmp_path / "model", "longrope long"))
    rotary = rotary_sets(hf_config, model_family(hf_config).architecture(hf_config), longest)[None]
    wanted = hf_config["rope_parameters"]["short_factor" if longest == 16 else "long_factor"]
    plain = 1.0 / 500.0 ** (torch.arange(0, 8, 2).float() / 8)
    torch.testing.assert_close(rotary.frequencies, plain / torch.tensor(wanted))
    assert rotary.factor > 1.0


@pytest.mark.parametrize("model", ["window", "parallel", "neox in sequence", "gemma2"])
def test_plain_ones_are_left_to_megatron_core_whose_are_the_same(model: str, tmp_path: Path) -> None:
    hf_config = read_hf_config(build(tmp_path / "model", model))
    family = model_family(hf_config)
    assert rotary_sets(hf_config, family.architecture(hf_config)) == {}
    kwargs = family.megatron_kwargs(hf_config)
    theirs = RotaryEmbedding(
        kwargs["transformer"]["kv_channels"],
        kwargs["model"]["rotary_percent"],
        rotary_base=kwargs["model"]["rotary_base"],
        use_cpu_initialization=True,
        cp_group=object(),
    )
    loaded = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(json.dumps(hf_config))))
    assert torch.equal(theirs.inv_freq, loaded.base_model.rotary_emb.inv_freq)


def test_an_unknown_scaling_is_refused(tmp_path: Path) -> None:
    hf_config = read_hf_config(build(tmp_path / "model", "yarn"))
    hf_config["rope_parameters"] |= {"rope_type": "spiral"}
    with pytest.raises(ModelError, match="spiral"):
        rotary_sets(hf_config, model_family(hf_config).architecture(hf_config))


def test_only_the_first_dimensions_are_turned_and_each_rank_turns_by_its_own_positions() -> None:
    rotary = Rotary(None, torch.tensor([1.0, 0.1]), factor=1.5)
    x = torch.randn(sum(LENGTHS), 3, 7)
    whole = packed(ContextRank())
    turned = rotate(x, rotary, whole.sequences)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    angle = whole.positions[0][:, None] * rotary.frequencies
    for i in range(2):  # dimensions i and i + 2 are a pair
        cos, sin = 1.5 * angle[:, i : i + 1].cos(), 1.5 * angle[:, i : i + 1].sin()
        torch.testing.assert_close(turned[..., i], x[..., i] * cos - x[..., i + 2] * sin)
        torch.testing.assert_close(turned[..., i + 2], x[..., i + 2] * cos + x[..., i] * sin)
    ranks = [packed(ContextRank(r, 2)) for r in range(2)]
    for rank in ranks:
        ones = torch.ones(rank.tokens.shape[1], 1, 4)
        angle = rank.positions[0][:, None] * rotary.frequencies
        torch.testing.assert_close(rotate(ones, rotary, rank.sequences)[:, 0, :2], 1.5 * (angle.cos() - angle.sin()))
