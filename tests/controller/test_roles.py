"""What can't be placed on GPUs yet is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.controller.roles import check_weights_can_reach
from megarl.errors import PlacementError

S0 = Path(__file__).resolve().parents[2] / "recipes" / "bench" / "S0.yaml"


@pytest.mark.parametrize("overrides", [[], ["actor.layout.data=4", "rollout.engines=4"]])
def test_one_replica_on_each_gpu_passes(overrides: list[str]) -> None:
    check_weights_can_reach(load_config(S0, overrides))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cluster.placement=separate", "set it to colocated"),
        ("actor.layout.tensor=2", "tensor 2, pipeline 1"),
        ("actor.layout.pipeline=2", "tensor 1, pipeline 2"),
        ("actor.layout.expert=2", "expert 2"),
    ],
)
def test_weights_on_other_gpus_are_refused(override: str, says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        check_weights_can_reach(load_config(S0, [override]))
