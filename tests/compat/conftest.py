"""One model and data set for all tests of the room."""

from pathlib import Path

import pytest

from tests.compat.places import make_place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return make_place(tmp_path_factory.mktemp("place"))
