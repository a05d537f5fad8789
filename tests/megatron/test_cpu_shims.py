"""What stands in for CUDA on a CPU does so under every megatron-core version that megarl names as tested."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import megatron.core
import pytest
import torch

from megarl.device import compute_device
from megarl.megatron.checkpoint import save_engine
from megarl.megatron.cpu import TESTED_VERSIONS, check_version, on_compute_device
from megarl.megatron.engine import Engine
from megarl.megatron.model import Role
from megarl.types import Layout, Rank
from megarl.weights.families import read_hf_config
from tests.megatron.models import tiny_qwen2
from tests.megatron.ranks import run_ranks


def test_names_of_cuda_mean_the_compute_device() -> None:
    with on_compute_device():
        made, moved = torch.zeros(2, device="cuda"), torch.zeros(2).cuda()
    assert made.device.type == moved.device.type == compute_device().type


def test_the_locked_version_is_a_tested_one() -> None:
    assert check_version() is None


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_a_commit_behind_a_tested_version_is_no_other_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", f"{version}+1a2b3c4")
    assert check_version() is None


def test_an_untested_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.18.0")
    warning = check_version()
    assert warning is not None and "0.18.0" in warning and all(version in warning for version in TESTED_VERSIONS)


def processes_after_a_save(rank: Rank, model_dir: Path, target: Path) -> list[str]:
    engine = Engine(read_hf_config(model_dir), rank, Role("lm", trainable=False))
    engine.load_hf(model_dir)
    save_engine(engine, target)
    return [child.name for child in multiprocessing.active_children()]


def test_a_save_starts_no_other_process(tmp_path: Path) -> None:
    """A multiprocessing manager for one queue would cost a quarter of a minute at the first save."""
    target = tmp_path / "checkpoint"
    target.mkdir()
    assert run_ranks(Layout(), processes_after_a_save, tiny_qwen2(tmp_path / "model"), target) == [[]]
