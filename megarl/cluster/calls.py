"""Waiting for remote calls: always with a deadline, always with a name, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from megarl.errors import MegarlError, WorkerError, explain
from megarl.types import Handle, Ragged

T = TypeVar("T")


@dataclass(frozen=True)
class RayHandle:
    """A shard in Ray's object store, owned by the controller; it outlives the worker that computed it."""

    ref: ray.ObjectRef

    def fetch(self) -> dict[str, Any]:
        return ray.get(self.ref)


def fetch_together(handles: Sequence[Handle]) -> list[dict[str, Any]]:
    """Fetch shards in one call to the object store; those that are elsewhere (a file, this process) fetch themselves."""
    remote = iter(ray.get([h.ref for h in handles if isinstance(h, RayHandle)]))
    return [next(remote) if isinstance(h, RayHandle) else h.fetch() for h in handles]


@dataclass
class Meter:
    """What the controller itself costs: seconds spent waiting for workers, and bytes that it fetched."""

    waited_s: float = 0.0
    bytes_received: int = 0

    def reset(self) -> None:
        self.waited_s, self.bytes_received = 0.0, 0


METER = Meter()


@dataclass(frozen=True)
class Call:
    """Remote calls of one phase that run side by side, one reference per worker."""

    phase: str
    names: tuple[str, ...]  # of the workers, in order
    refs: tuple[ray.ObjectRef, ...]
    deadline_s: float

    def wait(self) -> list[Any]:
        """The results in order.

        Raises WorkerError that names the phase and the workers which answered, which did not, or which failed first. A deliberate error
        of a worker (MegarlError) is raised as it is.
        """
        began = time.monotonic()
        try:
            return self._collect(began)
        finally:
            METER.waited_s += time.monotonic() - began

    def _collect(self, began: float) -> list[Any]:
        # Whichever finishes first is looked at first, so that one dead worker is reported and not the others that wait for it.
        pending = dict(zip(self.refs, self.names, strict=True))
        while pending:
            left = self.deadline_s - (time.monotonic() - began)
            done, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, left))
            if not done:
                raise self._late(list(pending.values()))
            self._check(done[0], pending.pop(done[0]))
        results = ray.get(list(self.refs))
        METER.bytes_received += sum(count_bytes(r) for r in results)
        return results

    def _check(self, ref: ray.ObjectRef, name: str) -> None:
        try:
            ray.get(ref, timeout=5)
        except RayActorError as error:
            raise WorkerError(
                explain(f"{name} died", where=f"phase {self.phase}", got=_last_lines(error), do="look at its log in the run directory")
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, MegarlError):
                raise error.cause from None
            raise WorkerError(explain(f"{name} failed", where=f"phase {self.phase}", got=str(error))) from error
        except GetTimeoutError as error:
            raise self._late([name]) from error

    def _late(self, silent: list[str]) -> WorkerError:
        answered = [n for n in self.names if n not in silent]
        return WorkerError(
            explain(
                f"no answer within {self.deadline_s:g} s from {', '.join(silent)}",
                where=f"phase {self.phase}",
                got=f"answers from {', '.join(answered) or 'nobody'}",
                do="look at the workers' logs in the run directory; a longer cluster.call_deadline_s helps only where work was going on",
            )
        )


@dataclass(frozen=True)
class Pending(Generic[T]):
    """Work that goes on elsewhere; ``result()`` waits and finishes it."""

    call: Call
    finish: Callable[[list[Any]], T] = field(repr=False)

    def result(self) -> T:
        return self.finish(self.call.wait())


def wait_all(*pending: Pending[Any]) -> tuple[Any, ...]:
    """Results of phases that run side by side, in the order given."""
    return tuple(p.result() for p in pending)


def count_bytes(value: Any) -> int:
    """Bytes of array data in a result, to show that no token-level tensor reaches the controller."""
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, Ragged):
        return value.values.nbytes + value.offsets.nbytes
    if isinstance(value, dict):
        return sum(count_bytes(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(count_bytes(v) for v in value)
    if hasattr(value, "__dataclass_fields__"):
        return sum(count_bytes(getattr(value, f)) for f in value.__dataclass_fields__)
    return len(value) if isinstance(value, (bytes, str)) else 8


def _last_lines(error: BaseException, count: int = 15) -> str:
    """The end of what Ray says, where the reason stands (a constructor's traceback begins with megarl's and vLLM's own frames)."""
    return "\n            ".join(str(error).strip().splitlines()[-count:])


def names_of(group: str, count: int) -> tuple[str, ...]:
    """Names of a group's workers as errors print them."""
    return tuple(f"{group} rank {i}" for i in range(count))


def start_call(phase: str, names: Sequence[str], refs: Sequence[ray.ObjectRef], deadline_s: float) -> Call:
    """Bundle the references of one phase."""
    return Call(phase, tuple(names), tuple(refs), deadline_s)
