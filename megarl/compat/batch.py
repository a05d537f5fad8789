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
    superseded: bool = False  # a KL penalty was applied to the samples afterwards, and advantages computed anew


@dataclass
class Life:
    """Whether a trainer's processes, which hold the columns, are there; all its batches share the record."""

    closed: bool = False


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
    life: Life = field(default_factory=Life, repr=False)  # of the trainer

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
        try:
            found = np.asarray(scores, dtype=np.float64)
        except (TypeError, ValueError) as error:
            expected = f"{len(self)} finite numbers"
            raise DataError(explain("scores that are no numbers", where="with_scores", got=error, expected=expected)) from error
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

    def take(self, rows: Sequence[int] | np.ndarray) -> TrainerBatch:
        """The samples at the positions ``rows``, or where a mask [B] of bools is true. From here on they count as all that were drawn.

        Raises DataError for no sample, a position outside the batch or twice, and a mask of another length.
        """
        chosen = _positions(rows, len(self))
        scores = None if self.scores is None else self.scores[chosen]
        return replace(self, proto=self.proto.take(chosen.tolist()), scores=scores, drawn=len(chosen))

    def split(self, n: int) -> list[TrainerBatch]:
        """``n`` batches of consecutive samples; advantages stay whitened over the whole."""
        self.proto.split(n)  # it says what is wrong with n
        return [self.take(rows.tolist()) for rows in np.array_split(np.arange(len(self)), n)]

    @staticmethod
    def concat(parts: Sequence[TrainerBatch]) -> TrainerBatch:
        """The samples of all ``parts`` in order: parts of one draw, or of several.

        Raises DataError where rewards or advantages were computed apart (join the parts first, and compute then), for a sample that is in
        two parts, and for parts of different trainers.
        """
        for part in parts:
            _check_kind(part, "concat")
        proto = DataProto.concat([part.proto for part in parts])
        first = parts[0]
        for part in parts:
            if part.run is not first.run:
                raise DataError(explain("batches of different trainers", where="TrainerBatch.concat", expected="parts of one trainer"))
            if part.estimate is not first.estimate or part.penalty != first.penalty or (part.scores is None) != (first.scores is None):
                do = "concat first, then apply_kl_penalty and compute_advantage"
                raise DataError(explain("parts whose rewards or advantages were computed apart", where="TrainerBatch.concat", do=do))
        twice = len(proto) - len(np.unique(proto.info.sample_id))
        if twice:
            do = "join parts that share no sample"
            raise DataError(explain("samples that are in the parts twice", where="TrainerBatch.concat", got=f"{twice} of them", do=do))
        scores = None if first.scores is None else np.concatenate([part.scores for part in parts])
        drawn, step = sum(part.drawn for part in parts), max(part.step for part in parts)
        return replace(first, proto=proto, scores=scores, drawn=drawn, step=step, metrics={})

    def to_local(self, *columns: str) -> dict[str, Column]:
        """Fetch ``columns`` (all of them when none is named) to this process. Raises DataError where the trainer is closed."""
        check_batch(self, "TrainerBatch.to_local")
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


def check_batch(batch: Any, by: str, run: Context | None = None) -> TrainerBatch:
    """Raise DataError for anything but samples of a trainer that runs; of ``run``, where one is given."""
    if not isinstance(batch, TrainerBatch):
        do = "pass what generate_sequences gave"
        raise DataError(explain("not a batch of samples", where=by, got=type(batch).__name__, expected="a TrainerBatch", do=do))
    if batch.life.closed:
        do = "call to_local before close, or draw new samples with another trainer"
        raise DataError(explain("the trainer that drew these samples is closed, and their columns are gone", where=by, do=do))
    if run is not None and batch.run is not run:
        do = "pass what this trainer's generate_sequences gave"
        raise DataError(
            explain("samples of another trainer", where=by, got=batch.run and batch.run.paths.root, expected=run.paths.root, do=do)
        )
    return batch


def check_trainable(batch: TrainerBatch, by: str) -> None:
    """Raise DataError for advantages in the place of which others were computed."""
    if batch.estimate is not None and batch.estimate.superseded:
        do = "train on what apply_kl_penalty returned"
        raise DataError(explain("a KL penalty was applied to these samples afterwards", where=by, do=do))


def check_whole_groups(batch: TrainerBatch, by: str) -> None:
    """Raise DataError for a part of a group. (The policy for failed rewards leaves out whole groups.)"""
    expected = batch.run.config.rollout.responses_per_prompt
    groups, counts = np.unique(batch.info.group, return_counts=True)
    cut = np.flatnonzero(counts != expected)
    if len(cut):
        first = int(groups[cut[0]])
        place = int(np.flatnonzero(batch.info.group == first)[0])
        got = f"{len(cut)} of {len(groups)} groups; of the prompt of sample {place} there are {counts[cut[0]]}"
        what = f"{batch.run.config.algorithm.advantage_estimator} compares the samples of a prompt, and some are missing"
        do = "compute advantages of the whole batch; take and split after compute_advantage"
        raise DataError(explain(what, where=by, got=got, expected=f"{expected} samples of each prompt", do=do))


def numbered(proto: DataProto, step: int) -> DataProto:
    """The samples with ids and groups that no other step's have, so that batches of several draws can be joined."""
    base = np.int64(step) << np.int64(32)
    info = replace(proto.info, sample_id=proto.info.sample_id + base, group=proto.info.group + base)
    return DataProto(info, proto.columns)


def _check_kind(other: Any, by: str) -> None:
    check_batch(other, f"TrainerBatch.{by}")


def _positions(rows: Any, count: int) -> np.ndarray:
    """Positions [n], each once, of a batch of ``count`` samples. Raises DataError."""
    try:
        found = np.asarray(rows)
    except ValueError:  # lists of different lengths
        found = np.asarray(None)
    flat = found.ndim == 1
    if flat and found.dtype == bool and len(found) == count:
        found = np.flatnonzero(found)
    if not flat or not len(found) or not np.issubdtype(found.dtype, np.integer):
        what = "no sample" if flat and not len(found) else f"shape {found.shape}, {found.dtype}"
        expected = f"positions from 0 to {count - 1}, or a mask of {count}"
        raise DataError(explain("no positions of samples", where="TrainerBatch.take", got=what, expected=expected))
    if found.min() < 0 or found.max() >= count:
        got = found[(found < 0) | (found >= count)].tolist()[:8]
        raise DataError(explain("positions outside the batch", where="TrainerBatch.take", got=got, expected=f"0 to {count - 1}"))
    numbers, times = np.unique(found, return_counts=True)
    if len(numbers) < len(found):
        got = numbers[times > 1].tolist()[:8]
        raise DataError(explain("samples taken twice", where="TrainerBatch.take", got=got, expected="each position at most once"))
    return found


def _either(name: str, ours: Any, theirs: Any) -> Any:
    """What one of two batches knows, or both know alike."""
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    same = np.array_equal(ours, theirs) if name == "scores" else ours is theirs or (name == "penalty" and ours == theirs)
    if not same:
        do = "score and penalise the samples, and compute advantages, on one batch"
        raise DataError(explain(f"both batches have their own {name}", where="TrainerBatch.union", do=do))
    return ours
