"""Mixtral on Megatron computes what transformers computes, with and without a sliding window."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.types import Layout
from tests.megatron.mixture_parity import check_parity, parity_cases
from tests.megatron.mixtures import MODELS, make

LAYOUTS = {
    "one rank": Layout(),
    "tp2 sp": Layout(tensor=2, sequence_parallel=True),
    "pp2": Layout(pipeline=2),  # 3 layers: unequal stages
    "cp2": Layout(context=2),
    "ep2": Layout(expert=2, data=2),
    "ep3 pp2": Layout(pipeline=2, expert=3, data=3),
    "ep2 etp2 tp2 sp": Layout(tensor=2, expert=2, expert_tensor=2, data=2, sequence_parallel=True),
}
CASES = [("mixtral", name) for name in LAYOUTS] + [("mixtral window", name) for name in ("one rank", "cp2", "tp2 sp")]
FAST = [("mixtral", "ep2"), ("mixtral window", "cp2")]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(name, tmp_path_factory.mktemp("model")) for name in MODELS if name.startswith("mixtral")}


@pytest.mark.parametrize(("model", "layout"), parity_cases(CASES, FAST))
def test_equals_hugging_face(model: str, layout: str, model_dirs: dict[str, Path]) -> None:
    check_parity(model_dirs[model], LAYOUTS[layout])
