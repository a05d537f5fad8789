"""Batches of a loop by hand: the prompts of a step, and the samples drawn for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.cluster.calls import fetch_together
from megarl.controller.context import Context
from megarl.data.proto import Column, DataProto
from megarl.errors import DataError, explain
from megarl.types import Ragged, SampleInfo

SEQUENCES = "sequences"  # a column that is put together on the way: prompts, then responses


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one step: rows of the prepared data, where the tokens stay."""

    rows: np.ndarray  # [P] int64
    path: str  # the prepared file

    def __len__(self) -> int:
        return len(self.rows)


class TrainDataloader:
    """The prompts of steps, in an order that ``run.seed`` and the epoch decide.

    It goes on where it stopped: each ``next(iter(loader))`` is another batch, and a pass yields ``len(loader)`` of them.
    """

    def __init__(self, run: Context):
        self._run = run

    def __len__(self) -> int:
        """Batches of one pass over the data."""
        return max(1, self._run.cursor.rows // self._run.config.rollout.prompts_per_step)

    def __iter__(self) -> Iterator[PromptBatch]:
        for _ in range(len(self)):
            rows = self._run.cursor.take(self._run.config.rollout.prompts_per_step)
            yield PromptBatch(rows, str(self._run.paths.train_prompts))


@dataclass
class Estimate:
    """How advantages were computed, and who has learnt from them; all batches with these advantages share the record."""

    gamma: float
    lam: float
    whiten: bool
    metrics: dict[str, float]
    trained: list[str] = field(default_factory=list)  # roles


@dataclass(frozen=True)
class Penalty:
    """The KL penalty in the token rewards."""

    coef: float  # reward per nat
    kl: float  # mean per token, nats
    estimator: str


@dataclass(frozen=True)
class TrainerBatch:
    """Samples of a trainer: handles of their columns, and one score a sample. Immutable; every method gives another batch.

    Columns are ragged (no padding, so that there is no attention mask): ``to_local`` fetches them.
    """

    proto: DataProto = field(repr=False)
    run: Context = field(repr=False)  # of the trainer that drew them
    step: int  # the number of the draw, from 1
    drawn: int  # samples before any were dropped
    scores: np.ndarray | None = None  # [B] float64; None: not scored
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the draw: critic/score/mean, response_length/mean, ...
    estimate: Estimate | None = None  # of the advantages; None: there are none
    penalty: Penalty | None = None  # None: no KL penalty in the rewards

    def __len__(self) -> int:
        return len(self.proto)

    @property
    def info(self) -> SampleInfo:
        """Row, group and lengths of each sample."""
        return self.proto.info

    @property
    def column_names(self) -> tuple[str, ...]:
        """What ``to_local`` can fetch."""
        names = self.proto.column_names
        return (*names, SEQUENCES) if {"prompts", "responses"} <= set(names) else names

    def with_scores(self, scores: Sequence[float] | np.ndarray) -> TrainerBatch:
        """These samples with scores [B] given by hand. Raises DataError for another number of them, or one that is not finite."""
        found = np.asarray(scores, dtype=np.float64)
        if found.shape != (len(self),) or not np.isfinite(found).all():
            got = f"shape {found.shape}" if found.shape != (len(self),) else "a number that is not finite"
            raise DataError(
                explain("scores that don't fit the samples", where="with_scores", got=got, expected=f"{len(self)} finite numbers")
            )
        if self.estimate or self.penalty:
            do = "score the samples before compute_advantage and apply_kl_penalty"
            raise DataError(explain("the rewards were computed already", where="with_scores", do=do))
        return replace(self, scores=found)

    def select(self, columns: Sequence[str]) -> TrainerBatch:
        """These samples with only ``columns``."""
        if isinstance(columns, str):
            raise DataError(
                explain("select takes a list of columns", where="TrainerBatch.select", got=repr(columns), expected=f"[{columns!r}]")
            )
        return replace(self, proto=self.proto.select([c for c in columns if c != SEQUENCES]))

    def union(self, other: TrainerBatch) -> TrainerBatch:
        """The columns of both batches, which hold the same samples.

        Raises DataError for other samples, and for columns, scores or rewards that both have but computed differently.
        """
        _check_kind(other, "union")
        proto = self.proto.union(other.proto)
        merged = {name: _either(name, getattr(self, name), getattr(other, name)) for name in ("estimate", "penalty", "scores")}
        return replace(self, proto=proto, metrics={**other.metrics, **self.metrics}, **merged)

    __or__ = union

    def take(self, rows: Sequence[int]) -> TrainerBatch:
        """The samples at the positions ``rows``. From here on they count as all that were drawn."""
        scores = None if self.scores is None else self.scores[list(rows)]
        return replace(self, proto=self.proto.take(rows), scores=scores, drawn=len(rows))

    def split(self, n: int) -> list[TrainerBatch]:
        """``n`` batches of consecutive samples; advantages stay whitened over the whole."""
        self.proto.split(n)  # it says what is wrong with n
        return [self.take(rows.tolist()) for rows in np.array_split(np.arange(len(self)), n)]

    @staticmethod
    def concat(parts: Sequence[TrainerBatch]) -> TrainerBatch:
        """The samples of all ``parts`` in order: parts of one draw, or of several.

        Raises DataError where rewards or advantages were computed apart: join the parts first, and compute then.
        """
        proto = DataProto.concat([part.proto for part in parts])
        first = parts[0]
        for part in parts:
            _check_kind(part, "concat")
            if part.estimate is not first.estimate or part.penalty != first.penalty or (part.scores is None) != (first.scores is None):
                do = "concat first, then apply_kl_penalty and compute_advantage"
                raise DataError(explain("parts whose rewards or advantages were computed apart", where="TrainerBatch.concat", do=do))
        scores = None if first.scores is None else np.concatenate([part.scores for part in parts])
        drawn, step = sum(part.drawn for part in parts), max(part.step for part in parts)
        return replace(first, proto=proto, scores=scores, drawn=drawn, step=step, metrics={})

    def to_local(self, *columns: str) -> dict[str, Column]:
        """Fetch ``columns`` (all of them when none is named) to this process."""
        wanted = columns or self.column_names
        stored = dict.fromkeys(c for name in wanted for c in (("prompts", "responses") if name == SEQUENCES else (name,)))
        found = self.proto.to_local(*stored, fetch=fetch_together)
        if SEQUENCES in wanted:
            pairs = [np.concatenate([found["prompts"][i], found["responses"][i]]) for i in range(len(self))]
            found[SEQUENCES] = Ragged.from_list(pairs, found["prompts"].values.dtype)
        return {name: found[name] for name in wanted}

    def require(self, *columns: str, by: str) -> None:
        """Raise DataError that names the call to make where a column is missing. ``by``: who reads it."""
        for name in columns:
            if name not in self.proto.column_names:
                got = ", ".join(self.column_names) or "no columns"
                raise DataError(
                    explain(f"no column '{name}' in the batch", where=by, got=got, do=f"call {WRITERS[name]} before, and union")
                )


WRITERS = {
    "prompts": "actor_rollout_wg.generate_sequences",
    "responses": "actor_rollout_wg.generate_sequences",
    "log_probs": "actor_rollout_wg.compute_log_prob",
    "ref_log_probs": "ref_policy_wg.compute_ref_log_prob",
    "values": "critic_wg.compute_values",
    "last_values": "critic_wg.compute_values",
    "advantages": "compute_advantage",
    "returns": "compute_advantage",
}


def check_batch(batch: Any, by: str) -> TrainerBatch:
    """Raise DataError for anything but samples of a trainer."""
    if not isinstance(batch, TrainerBatch):
        do = "pass what generate_sequences gave"
        raise DataError(explain("not a batch of samples", where=by, got=type(batch).__name__, expected="a TrainerBatch", do=do))
    return batch


def numbered(proto: DataProto, step: int) -> DataProto:
    """The samples with ids and groups that no other step's have, so that batches of several draws can be joined."""
    base = np.int64(step) << np.int64(32)
    info = replace(proto.info, sample_id=proto.info.sample_id + base, group=proto.info.group + base)
    return DataProto(info, proto.columns)


def _check_kind(other: Any, by: str) -> None:
    check_batch(other, f"TrainerBatch.{by}")


def _either(name: str, ours: Any, theirs: Any) -> Any:
    """What one of two batches knows, or both know alike."""
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    same = np.array_equal(ours, theirs) if name == "scores" else ours is theirs or (name == "penalty" and ours == theirs)
    if not same:
        do = "score and penalise the samples, and compute advantages, on one batch"
        raise DataError(explain(f"both batches have their own {name}", where="TrainerBatch.union", do=do))
    return ours
