"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algo.ragged import check_same_shape
from megarl.errors import ConfigError, explain


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """0.5 max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2), the value clip of PPO's reference code.

    Args:
        values: [N], carries the gradient.
        old_values: [N], before the update.
        returns: [N].
        clip: greatest distance from ``old_values`` that is rewarded; 0 turns the clip off.

    Returns:
        Loss per token [N], and a bool mask [N] of the tokens where the clipped square is the larger.

    Raises:
        ConfigError: a negative clip.
        DataError: tensors of unequal shape.
    """
    if not 0.0 <= clip < float("inf"):
        raise ConfigError(explain("value clip out of range", where="clipped_value_loss", got=clip, expected="0 (off) or more"))
    check_same_shape("clipped_value_loss", values=values, old_values=old_values, returns=returns)
    plain = (values - returns).square()
    if clip == 0:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    near_old = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    clipped = (near_old - returns).square()
    return 0.5 * torch.maximum(plain, clipped), clipped > plain
