"""Which experts see a token, as DeepSeek-V2 and V3 choose them: experts come in groups, and a token sees few groups.

megatron-core's router ranks groups by another sum than DeepSeek-V2 does, always normalizes sigmoid scores, and changes the bias of its own
accord in every step; the one here computes what transformers computes and leaves the bias alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Routing:
    """One value a model."""

    chosen: int  # experts a token sees
    sigmoid: bool = False  # scores; else a softmax over all experts
    groups: int = 1  # of neighbouring experts, equally many in each
    groups_chosen: int = 1  # that a token's experts come from
    group_best: int = 1  # a group is ranked by the sum of so many best scores in it
    normalize: bool = False  # weights of the chosen experts sum to 1, before ``scale``
    scale: float = 1.0  # factor of the weights
    bias: bool = False  # a number an expert is added to its score where experts are ranked, and not to its weight


def choose(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, whether chosen), both [T, experts], from ``logits`` [T, experts] and ``bias`` [experts]. Weights elsewhere are 0.

    Source: DeepSeek-V2 (arXiv:2405.04434) section 2.1.3, DeepSeek-V3 (arXiv:2412.19437) section 2.1.2.
    """
    logits = logits.float()
    scores = logits.sigmoid() if routing.sigmoid else logits.softmax(dim=-1)
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if routing.groups_chosen < routing.groups:
        grouped = ranked.view(len(ranked), routing.groups, -1)
        best = grouped.topk(routing.group_best, dim=-1).values.sum(dim=-1)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(routing.groups_chosen, dim=-1).indices, True)
        ranked = grouped.masked_fill(~allowed[..., None], float("-inf")).view_as(ranked)
    experts = ranked.topk(routing.chosen, dim=-1).indices
    weights = scores.gather(1, experts)
    if routing.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, experts, True)
    return torch.zeros_like(scores).scatter(1, experts, weights * routing.scale), chosen


class GroupRouter(TopKRouter):
    """megatron-core's module with the choice of ours.

    The bias is a buffer, float32 whatever the model's dtype, which training never changes.
    """

    def __init__(self, config: TransformerConfig, **kwargs: Any):
        super().__init__(config=config, **kwargs)
        self.rule: Routing = config.routing  # type: ignore[attr-defined]
        if self.rule.bias:
            del self.expert_bias
            self.register_buffer("expert_bias", torch.zeros(self.num_experts, dtype=torch.float32))

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, whether chosen), both [tokens, experts]. ``logits``: [s, b, experts]; no token is padding in packed sequences."""
        weights, chosen = choose(logits.view(-1, self.num_experts), self.rule, self.expert_bias)
        return weights.type_as(logits), chosen
