"""Checkpoints between megatron-core versions: a newer one reads what an older one wrote; an older one refuses and says why."""

from __future__ import annotations

from pathlib import Path

import megatron.core

from megarl.errors import CheckpointError
from megarl.megatron.checkpoint import load_engine, reads_common_state_inside, save_engine
from megarl.megatron.engine import Engine
from megarl.megatron.model import Role
from megarl.megatron.world import Rank
from megarl.types import Layout
from megarl.weights.families import read_hf_config
from tests.megatron.models import tiny_qwen2
from tests.megatron.ranks import run_ranks


def save_as_newer_and_load(rank: Rank, model_dir: Path, target: Path) -> str:
    """A save, without the file that only older versions write; then a load, and what came of it."""
    engine = Engine(read_hf_config(model_dir), rank, Role("lm", trainable=False))
    engine.load_hf(model_dir)
    save_engine(engine, target)
    (target / "common.pt").unlink(missing_ok=True)
    try:
        load_engine(engine, target)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_an_older_megatron_core_refuses_what_a_newer_one_wrote(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    target.mkdir()
    (found,) = run_ranks(Layout(), save_as_newer_and_load, tiny_qwen2(tmp_path / "model"), target)
    older = tuple(int(part) for part in megatron.core.__version__.split(".")[:2]) < (0, 19)
    assert reads_common_state_inside() is not older
    assert ("too old" in found and "common.pt" in found) if older else found == "loaded"
