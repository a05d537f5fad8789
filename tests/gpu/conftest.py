"""Tests of this directory need a CUDA device; without one they are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.device import on_gpu

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.gpu)
            if not on_gpu():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
