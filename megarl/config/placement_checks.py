"""What can be wrong with how models are cut and where they are placed."""

from __future__ import annotations

from megarl.config.schema import Config, LayoutConfig
from megarl.errors import ConfigError, explain


def check_layout(layout: LayoutConfig, where: str) -> None:
    """Raise ConfigError for sizes that contradict each other or that this version can't run."""
    if layout.sequence_parallel and layout.tensor == 1:
        raise ConfigError(
            explain(
                "sequence parallelism without tensor parallelism",
                where=where,
                got="sequence_parallel: true, tensor: 1",
                expected="tensor of 2 or more: sequence-parallel ranks are the tensor-parallel ranks",
                do="set sequence_parallel to false, or raise tensor",
            )
        )
    if layout.virtual_pipeline > 1 and layout.pipeline == 1:
        raise ConfigError(
            explain(
                "several model chunks a rank without pipeline parallelism",
                where=f"{where}.virtual_pipeline",
                got=f"virtual_pipeline: {layout.virtual_pipeline}, pipeline: 1",
                expected="pipeline of 2 or more",
                do="set virtual_pipeline to 1, or raise pipeline",
            )
        )
    ranks, experts = layout.tensor * layout.context * layout.data, layout.expert * layout.expert_tensor
    if ranks % experts:
        raise ConfigError(
            explain(
                "experts can't be spread over the ranks of a pipeline stage",
                where=where,
                got=f"expert {layout.expert} x expert_tensor {layout.expert_tensor} = {experts}",
                expected=f"a divisor of tensor x context x data = {ranks}",
                do="lower expert or expert_tensor, or raise data",
            )
        )


def check_placement(config: Config, *, with_critic: bool) -> None:
    """Colocated roles share processes and devices, rank by rank."""
    if config.cluster.placement != "colocated":
        return
    if with_critic and config.critic.layout != config.actor.layout:
        raise ConfigError(
            explain(
                "a colocated critic lives in the actor's processes, and is cut as the actor is",
                where="critic.layout",
                got=config.critic.layout,
                expected=f"{config.actor.layout}, as actor.layout",
                do="give both the same layout, or set cluster.placement to separate",
            )
        )
    layout = config.actor.layout
    ranks = layout.tensor * layout.pipeline * layout.context * layout.data
    if config.rollout.engines != ranks:
        raise ConfigError(
            explain(
                "colocated, each of the actor's ranks has one engine beside it",
                where="rollout.engines",
                got=config.rollout.engines,
                expected=f"{ranks}, the ranks of actor.layout",
                do=f"set it to {ranks}, or set cluster.placement to separate",
            )
        )
    if config.rollout.tensor_parallel != 1:
        raise ConfigError(
            explain(
                "a colocated engine of several ranks is not supported yet",
                where="rollout.tensor_parallel",
                got=config.rollout.tensor_parallel,
                expected=1,
                do="set it to 1 with one engine on each of the actor's devices, or set cluster.placement to separate",
            )
        )
