"""What groups that share devices ask for together."""

from __future__ import annotations

import pytest

from megarl.cluster.placement import Slots, shared_by
from megarl.errors import PlacementError


def test_one_process_of_each_group_on_each_device() -> None:
    together = shared_by([Slots("actor", 4, 0.5, 0.5), Slots("rollout", 4, 0.25, 0.5)])
    assert together == Slots("actor + rollout", 4, 0.75, 1.0)


def test_unequal_groups_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"actor: 4; rollout: 2(.|\n)*make rollout.engines equal"):
        shared_by([Slots("actor", 4, 0.5, 0.5), Slots("rollout", 2, 0.25, 0.5)])
