"""Who holds the devices when. Only groups that share devices (``cluster.placement: colocated``) have anything to do here.

    phase                    trainers                                            engines
    generation, evaluation   all but cached memory                               weights, key/value cache, CUDA graphs
    all others               weights, gradients, optimizer states, activations   CUDA graphs

Engines lose their weights when they sleep, so that each generation begins with a sync. A run begins with engines that sleep.
"""

from __future__ import annotations

from megarl.cluster.rollout_group import SyncResult
from megarl.controller.context import Context


def to_generation(run: Context) -> SyncResult | None:
    """Bring the engines to the actor's weights as they are now, and wake them; None when they hold those already.

    The actor's ranks, which are all there are on shared devices, give memory that they don't use back as a part of it.
    """
    return run.groups.rollout.sync_weights(run.groups.actor, "actor", run.version)


def to_training(run: Context) -> float:
    """Let the engines give the devices back; returns seconds."""
    return run.groups.rollout.sleep()
