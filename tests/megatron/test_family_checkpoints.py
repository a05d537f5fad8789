"""Layers of ours in checkpoints: another layout continues the run, and the keys are those of Transformer Engine's layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from megatron.core import dist_checkpointing

from megarl.types import Layout, Rank
from megarl.weights.families import model_family, read_hf_config
from tests.megatron.family_models import builder
from tests.megatron.ranks import run_ranks
from tests.megatron.test_checkpoint import resumed, undisturbed

# Saved in the first layout, loaded in the second. Gemma's five layers make stages of two and three, and four unequal chunks.
CASES = {
    "gemma3": (Layout(tensor=2, sequence_parallel=True), Layout(pipeline=2)),
    "gemma3 ": (Layout(pipeline=2, virtual_pipeline=2), Layout(context=2)),
    "parallel": (Layout(pipeline=2), Layout(tensor=2)),
    "llama3 rope": (Layout(tensor=2), Layout()),  # one key/value head: each rank has a part of its rows
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return builder(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "gemma3" else pytest.mark.slow) for c in CASES])
def test_another_layout_continues_the_run(case: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    first, second = CASES[case]
    directory = model(case.strip())
    whole = run_ranks(first, undisturbed, directory, tmp_path, False)[0]
    later = run_ranks(second, resumed, directory, tmp_path, False)[0]
    # The first loss comes from the loaded weights alone; later ones also from Adam, which turns rounding into steps.
    assert abs(later[0] - whole[3]) <= 1e-6 * abs(whole[3])
    np.testing.assert_allclose(later, whole[3:], rtol=1e-3)
    assert whole[0] > whole[5], "training must have changed something"
    assert saved_keys(tmp_path) == engine_keys(directory)


def saved_keys(checkpoint: Path) -> set[str]:
    """Keys of the model's tensors; those of optimizer states have a prefix."""
    return {key for key in dist_checkpointing.load_tensors_metadata(str(checkpoint)) if not key.startswith("optimizer.")}


def engine_keys(model_dir: Path) -> set[str]:
    """Names under the Transformer Engine spec; layers are stacked, so that their numbers are gone."""
    hf_config = read_hf_config(model_dir)
    names = model_family(hf_config).shard(hf_config, Rank(0, Layout()), spec="te")
    return {re.sub(r"layers\.\d+\.", "layers.", name) for name in names}
