"""Packed sequences: the only form in which tokens enter a model, on every device.

The sequences of a micro-batch are laid end to end, never padded to each other. ``PackedTokens`` holds what the embedding, the
attention and the output head need to tell them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.types import Ragged


@dataclass
class PackedSequences(PackedSeqParams):
    """megatron-core's record of a packed batch, plus the lengths as Python integers (no device read in each layer)."""

    lengths: tuple[int, ...] = ()

    @cached_property
    def length_buckets(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Sequences of similar length, for kernels that need a rectangle.

        A list of (index [b, s], valid [b, s]): row positions in the packed batch, and which of them are real. Lengths are grouped by
        their multiple of 16, so that at most 15 positions a sequence are filled up. Causal attention never looks at what is behind.
        """
        device = self.cu_seqlens_q.device
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        buckets: dict[int, list[int]] = {}
        for i, length in enumerate(self.lengths):
            if length:
                buckets.setdefault(-(-length // 16), []).append(i)
        result = []
        for rows in buckets.values():
            lengths = np.array([self.lengths[i] for i in rows])
            steps = np.arange(lengths.max())
            valid = steps[None, :] < lengths[:, None]
            index = offsets[rows][:, None] + np.where(valid, steps[None, :], 0)
            result.append((torch.from_numpy(index).to(device), torch.from_numpy(valid).to(device)))
        return result


@dataclass(frozen=True)
class PackedTokens:
    """One micro-batch on its way through a model. T tokens of all sequences, R response tokens among them."""

    tokens: torch.Tensor  # [1, T] int64, alignment tail included
    positions: torch.Tensor  # [1, T] int64, from 0 in each sequence
    sequences: PackedSequences
    predictors: torch.Tensor  # [R] int64: packed position whose output speaks of each response token (the one before it)
    targets: torch.Tensor  # [R] int64: the response tokens
    finals: torch.Tensor  # [B] int64: packed position of the last token of each sequence
    response_offsets: torch.Tensor  # [B + 1] int64

    @property
    def total(self) -> int:
        return self.tokens.shape[1]


def pack(prompts: Ragged, responses: Ragged, *, align: int, device: torch.device) -> PackedTokens:
    """Lay ``prompts[i] + responses[i]`` end to end, and mark the response tokens.

    Every prompt has at least one token, since the first response token is predicted from the last prompt token. ``align``: the total
    is filled up to a multiple of it (sequence parallelism cuts it evenly) by a last sequence that nothing reads.
    """
    prompt_lengths, response_lengths = prompts.lengths, responses.lengths
    if (prompt_lengths < 1).any():
        raise ValueError(f"row {int(np.argmin(prompt_lengths))}: a prompt without tokens can't predict a response")
    lengths = prompt_lengths + response_lengths
    starts = np.concatenate([[0], np.cumsum(lengths)])
    total = int(starts[-1])
    tokens = np.empty(total + (-total) % align, dtype=np.int64)
    tokens[total:] = 0
    positions = np.empty_like(tokens)
    predictors = np.empty(int(response_lengths.sum()), dtype=np.int64)
    cursor = 0
    for i in range(len(prompts)):
        begin, middle, end = starts[i], starts[i] + prompt_lengths[i], starts[i + 1]
        tokens[begin:middle] = prompts[i]
        tokens[middle:end] = responses[i]
        positions[begin:end] = np.arange(lengths[i])
        predictors[cursor : cursor + response_lengths[i]] = np.arange(middle - 1, end - 1)
        cursor += int(response_lengths[i])
    tail = len(tokens) - total
    positions[total:] = np.arange(tail)
    packed_lengths = tuple(int(n) for n in lengths) + ((tail,) if tail else ())
    return PackedTokens(
        tokens=torch.from_numpy(tokens).unsqueeze(0).to(device),
        positions=torch.from_numpy(positions).unsqueeze(0).to(device),
        sequences=_sequences(packed_lengths, device),
        predictors=torch.from_numpy(predictors).to(device),
        targets=torch.from_numpy(responses.values.astype(np.int64)).to(device),
        finals=torch.from_numpy(starts[1:] - 1).to(device),
        response_offsets=torch.from_numpy(responses.offsets.astype(np.int64)).to(device),
    )


def _sequences(lengths: tuple[int, ...], device: torch.device) -> PackedSequences:
    offsets = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=device)
    longest = max(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
    )
