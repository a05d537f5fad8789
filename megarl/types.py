"""The records that cross rooms: frozen dataclasses, shapes beside fields.

Legend of shapes: B samples, N tokens of all samples together (ragged, never padded).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Ragged:
    """B sequences of unequal length, stored end to end.

    numpy and not torch: Ray shares numpy arrays between processes without a copy.
    """

    values: np.ndarray  # [N]
    offsets: np.ndarray  # [B + 1] int64; sequence i is values[offsets[i]:offsets[i + 1]]

    @classmethod
    def from_list(cls, rows: Sequence[Any], dtype: Any) -> "Ragged":
        """Join ``rows`` (each 1-d, possibly empty) into one Ragged of ``dtype``."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
        return cls(values, offsets)

    @classmethod
    def concat(cls, parts: Sequence["Ragged"]) -> "Ragged":
        """The sequences of all ``parts``, in order (at least one part)."""
        lengths = np.concatenate([p.lengths for p in parts])
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(np.concatenate([p.values for p in parts]), offsets)

    @property
    def lengths(self) -> np.ndarray:
        """[B] int64."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def take(self, rows: Iterable[int]) -> "Ragged":
        """The sequences ``rows``, in that order."""
        return Ragged.from_list([self[r] for r in rows], self.values.dtype)


class Handle(Protocol):
    """A shard that lives elsewhere. The Ray form is in ``cluster``; ``LocalHandle`` serves tests and one process."""

    def fetch(self) -> dict[str, Any]:
        """Bring the shard here: column name -> Ragged, or array [B]."""
        ...


@dataclass(frozen=True)
class LocalHandle:
    """A shard in this process."""

    columns: dict[str, Any]

    def fetch(self) -> dict[str, Any]:
        return self.columns


@dataclass(frozen=True)
class Layout:
    """How one model is cut over the ranks of its worker group. All sizes are counts of ranks."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1  # model chunks per pipeline rank
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def experts_apart(self) -> bool:
        """True where experts are cut over other ranks than the rest of the model, and so have other replicas."""
        return (self.expert, self.expert_tensor) != (1, self.tensor)

    @property
    def expert_data(self) -> int:
        """Replicas of each expert: experts are cut over the ranks of one stage by ``expert_tensor`` and ``expert`` alone."""
        return self.tensor * self.context * self.data // (self.expert_tensor * self.expert)


@dataclass(frozen=True)
class Rank:
    """One process of a worker group, and where it stands.

    The order of ranks is Megatron's: tensor fastest, then context, data, pipeline; inside experts expert_tensor, expert, expert_data,
    pipeline.
    """

    index: int
    layout: Layout

    @property
    def tensor(self) -> int:
        return self.index % self.layout.tensor

    @property
    def context(self) -> int:
        return self.index // self.layout.tensor % self.layout.context

    @property
    def data(self) -> int:
        return self.index // (self.layout.tensor * self.layout.context) % self.layout.data

    @property
    def pipeline(self) -> int:
        return self.index // (self.layout.tensor * self.layout.context * self.layout.data)

    @property
    def expert_tensor(self) -> int:
        return self.index % self.layout.expert_tensor

    @property
    def expert(self) -> int:
        return self.index // self.layout.expert_tensor % self.layout.expert

    @property
    def expert_data(self) -> int:
        return self.index // (self.layout.expert_tensor * self.layout.expert) % self.layout.expert_data

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline == self.layout.pipeline - 1

    @property
    def reports(self) -> bool:
        """True on the one rank of each data-parallel replica that returns results: last stage, first tensor and context rank."""
        return self.is_last_stage and self.tensor == 0 and self.context == 0

    def holds(self, edge: str, chunk: int) -> bool:
        """Whether model chunk ``chunk`` of this rank is the model's "first" or "last" one."""
        if edge == "first":
            return self.is_first_stage and chunk == 0
        return self.is_last_stage and chunk == self.layout.virtual_pipeline - 1


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are drawn; the same temperature is used in every later re-score."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    max_response_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One response to draw. ``seed`` makes it independent of its neighbours, of batching and of restarts."""

    sample_id: int  # unique in the step
    row: int  # row of the prepared prompts
    seed: int


@dataclass(frozen=True)
class SampleInfo:
    """What the controller knows of each sample: scalars only, never tokens."""

    sample_id: np.ndarray  # [B] int64
    row: np.ndarray  # [B] int64, row of the prepared prompts
    group: np.ndarray  # [B] int64, samples of one prompt share it
    prompt_length: np.ndarray  # [B] int64, tokens
    response_length: np.ndarray  # [B] int64, tokens, end-of-sequence token included
    truncated: np.ndarray  # [B] bool, stopped by the length limit and not by a stop token

    def take(self, rows: Sequence[int]) -> "SampleInfo":
        index = np.asarray(rows, dtype=np.int64)
        return SampleInfo(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Scores:
    """What the reward functions said, one entry a sample. A failed call is a status and never a score."""

    score: np.ndarray  # [B] float64; NaN where status is not "ok"
    status: tuple[str, ...]  # "ok" | "error" | "timeout" | "invalid"
    extra: dict[str, np.ndarray] = field(default_factory=dict)  # name -> [B], further numbers of the functions
    message: tuple[str, ...] = ()  # what failed calls said, first few
