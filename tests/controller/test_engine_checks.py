"""An actor that the generation engine can't run is refused before anything starts."""

from __future__ import annotations

import pytest

from megarl.config.load import load_config
from megarl.controller.engine_checks import check_engine
from megarl.errors import ConfigError
from tests.e2e.demo import RECIPE
from tests.weights import reference

HEADS_OF_32 = {"head_dim": 32}


def test_a_model_that_it_can_run_passes() -> None:
    check_engine(load_config(RECIPE, []), reference.config(**HEADS_OF_32))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (reference.MOE | HEADS_OF_32, "qwen3_moe with 6 experts"),
        ({"head_dim": 16}, "heads of this size(.|\n)*got: +16(.|\n)*32, 64"),
    ],
)
def test_others_are_refused(changes: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_engine(load_config(RECIPE, []), reference.config(**changes))


def test_a_cluster_elsewhere_may_have_gpus_with_other_kernels() -> None:
    check_engine(load_config(RECIPE, ["cluster.address=auto"]), reference.config(head_dim=16))
