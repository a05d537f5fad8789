"""The weight of each token in a loss.

loss = sum over all tokens of weight x per-token loss. The denominators are those of the whole mini-batch and are arguments,
so the sum over micro-batches, data-parallel ranks and context-parallel shards is the same however the samples are packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.errors import ConfigError, DataError, explain

LOSS_AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def token_weights(lengths: Tensor, mode: str, *, total_tokens: int, total_samples: int) -> Tensor:
    """Weights [N] float32 of the tokens of one micro-batch.

    token-mean: every token of the mini-batch weighs the same (DAPO, arXiv:2503.14476); seq-mean-token-mean: every response
    weighs the same (GRPO, arXiv:2402.03300); seq-mean-token-sum: the sum over a response, averaged over responses.

    Args:
        lengths: [B] int64, response tokens of the samples of this micro-batch.
        mode: one of ``LOSS_AGGREGATIONS``.
        total_tokens: response tokens of the whole mini-batch, over all ranks.
        total_samples: samples of the whole mini-batch, over all ranks.

    Raises:
        ConfigError: unknown mode.
        DataError: totals smaller than what this micro-batch holds.
    """
    local_tokens, local_samples = int(lengths.sum()), lengths.numel()
    if total_tokens < max(local_tokens, 1) or total_samples < max(local_samples, 1):
        raise DataError(
            explain(
                "totals of the mini-batch are smaller than one micro-batch of it",
                where="token_weights",
                got=f"total_tokens={total_tokens}, total_samples={total_samples}",
                expected=f"at least {max(local_tokens, 1)} tokens and {max(local_samples, 1)} samples",
                do="pass the sums over all micro-batches and ranks",
            )
        )
    if mode == "token-mean":
        weights = torch.full((local_samples,), 1.0 / total_tokens, dtype=torch.float64, device=lengths.device)
    elif mode == "seq-mean-token-mean":
        weights = 1.0 / (lengths.double() * total_samples)
    elif mode == "seq-mean-token-sum":
        weights = torch.full((local_samples,), 1.0 / total_samples, dtype=torch.float64, device=lengths.device)
    else:
        raise ConfigError(explain("unknown loss aggregation", got=repr(mode), expected=" | ".join(LOSS_AGGREGATIONS)))
    return weights.repeat_interleave(lengths).float()
