"""The names that users import, and what an import costs."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import megarl


def test_every_exported_name_is_there() -> None:
    assert set(megarl.__all__) == {*megarl._EXPORTS, "__version__"}
    for name in megarl.__all__:
        assert getattr(megarl, name) is not None
        assert name in dir(megarl)
    with pytest.raises(AttributeError, match="megarl.*NoSuchName"):
        megarl.NoSuchName  # noqa: B018


@pytest.mark.parametrize(
    "module, names",
    [
        ("megarl.workers.ray_trainer", ("RayPPOTrainer", "ActorRolloutWorker", "CriticWorker", "compute_advantage", "apply_kl_penalty")),
        ("megarl.utils.ray", ("RayResourcePool", "RayClassWithInitArgs", "RayWorkerGroup")),
        ("megarl.algorithms.kl_controller", ("AdaptiveKLController", "apply_kl_penalty")),
    ],
)
def test_other_paths_lead_to_the_same_objects(module: str, names: tuple[str, ...]) -> None:
    for name in names:
        assert getattr(import_module(module), name) is getattr(megarl, name)


def test_importing_megarl_brings_nothing_along() -> None:
    source = (
        "import time; began = time.perf_counter(); import megarl; took = time.perf_counter() - began\n"
        "import sys; heavy = {'torch', 'ray', 'vllm', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "print(took < 0.1, heavy, megarl.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[0] == f"True set() {megarl.__version__}"
