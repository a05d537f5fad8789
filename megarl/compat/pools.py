"""What a worker group is made of, as values: how many processes, and which role. Nothing here starts anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.errors import ConfigError, explain


@dataclass(frozen=True, eq=False)
class RayResourcePool:
    """Processes for one worker group: one a Megatron rank.

    Two pools are the same only if they are one object: groups that are given one object share its processes.

    Args:
        process_on_nodes: processes on each node. Their sum is what is reserved; Ray packs them onto as few nodes as hold them.
        use_gpu: True: each process has a GPU; False: none has; None: GPUs where the cluster has any.

    Raises:
        ConfigError: no processes, numbers that are no counts, or another use_gpu.
    """

    process_on_nodes: Sequence[int]
    use_gpu: bool | None = None

    def __post_init__(self) -> None:
        counts = self.process_on_nodes
        whole = isinstance(counts, Sequence) and not isinstance(counts, str) and len(counts) > 0
        if not whole or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts):
            raise ConfigError(
                explain(
                    "a pool without processes", where="RayResourcePool.process_on_nodes", got=repr(counts), expected="as in [4] or [8, 8]"
                )
            )
        if self.use_gpu is not None and not isinstance(self.use_gpu, bool):
            expected = "True, False or None"
            raise ConfigError(explain("no yes or no", where="RayResourcePool.use_gpu", got=repr(self.use_gpu), expected=expected))
        object.__setattr__(self, "process_on_nodes", tuple(counts))

    @property
    def world_size(self) -> int:
        """All processes of the pool."""
        return sum(self.process_on_nodes)


@dataclass(frozen=True)
class ActorRolloutWorker:
    """The role that is trained and generates. ``config``: ``model_name_or_path`` and keys of ``actor`` (``megarl config list``)."""

    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CriticWorker:
    """The value function. ``config``: ``model_name_or_path`` and keys of ``critic``."""

    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RefPolicyWorker:
    """The frozen reference. ``config``: ``model_name_or_path``, ``layout``, ``dtype``, ``max_tokens_per_micro_batch``."""

    config: Mapping[str, Any] = field(default_factory=dict)


Role = ActorRolloutWorker | CriticWorker | RefPolicyWorker


class RayClassWithInitArgs:
    """A role and the arguments that it is made with when its group is spawned.

    Raises:
        ConfigError: a class that is no role of megarl.
    """

    def __init__(self, cls: type[Role], *args: Any, **kwargs: Any):
        roles = (ActorRolloutWorker, CriticWorker, RefPolicyWorker)
        if cls not in roles:
            got = getattr(cls, "__name__", repr(cls))
            raise ConfigError(
                explain(
                    "a worker class that is no role", where="RayClassWithInitArgs", got=got, expected=", ".join(r.__name__ for r in roles)
                )
            )
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def role(self) -> Role:
        """The role described. Raises ConfigError for arguments that it doesn't take."""
        try:
            return self.cls(*self.args, **self.kwargs)
        except TypeError as error:
            raise ConfigError(
                explain(
                    "a role takes one argument, config", where=self.cls.__name__, got=error, do="pass config={'model_name_or_path': ...}"
                )
            ) from error
