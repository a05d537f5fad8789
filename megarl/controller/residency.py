"""Who holds the devices when. Only groups that share devices (``cluster.placement: colocated``) have anything to do here.

    phase        trainers                                        engines
    generation   all but cached memory                           weights, key/value cache, CUDA graphs
    the rest     weights, gradients, optimizer states, activations   CUDA graphs

A phase begins with one of the two calls below. Engines lose their weights when they sleep, so that each generation begins with a sync.
"""

from __future__ import annotations

from megarl.cluster.calls import wait_all
from megarl.cluster.rollout_group import SyncResult
from megarl.controller.context import Context


def to_generation(run: Context) -> SyncResult | None:
    """Bring the engines to the actor's weights as they are now, and wake them; None when they hold those already.

    Trainers first give the memory that they don't use back: the actor's ranks as a part of the sync, others here.
    """
    groups = run.groups
    if run.config.cluster.placement == "colocated":
        wait_all(*(group.release_memory() for group in groups.trainers() if group is not groups.actor))
    return groups.rollout.sync_weights(groups.actor, "actor", run.version)


def to_training(run: Context) -> float:
    """Let the engines give the devices back; returns seconds."""
    return run.groups.rollout.sleep()
