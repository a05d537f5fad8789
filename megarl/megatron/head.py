"""What stands on top of the last layer: a value head, and log-probs from logits that are cut over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(MegatronModule):
    """One value per token, in place of Megatron's output layer. [T, 1, hidden] -> [T, 1, 1], the same on every tensor-parallel rank.

    It starts at zero: the first advantages are then the rewards themselves and carry no noise of an untrained head.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[torch.Tensor, None]:
        if self.config.sequence_parallel:
            # Each rank computes the same values from the gathered tokens, so backward only takes the own part out again.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return torch.nn.functional.linear(hidden, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict[str, Any]:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets)


def vocab_parallel_log_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    with_entropy: bool,
    entropy_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of ``targets``, and the entropy of each distribution, from this rank's columns of the logits.

    Args:
        logits: [R, V / tp], columns [tp_rank * V / tp, ...) of a vocabulary padded to V. Not changed.
        targets: [R] int64, below ``vocab_size``.
        vocab_size: columns at and behind it are padding and have probability 0, as vLLM has it.
        temperature: logits are divided by it first, as they were when the tokens were drawn.
        with_entropy: also compute -sum p log p, nats.
        entropy_gradient: False: the entropy is only looked at, and a large vocabulary is spared its backward pass.

    Returns:
        log-probs [R] and entropy [R] or None, float32, the same on all tensor-parallel ranks; differentiable.
    """
    width = logits.shape[1]
    first = parallel_state.get_tensor_model_parallel_rank() * width
    scores = logits.float() / temperature
    valid = max(0, min(width, vocab_size - first))
    if valid < width:
        padding = torch.arange(width, device=logits.device) >= valid
        scores = scores.masked_fill(padding, torch.finfo(torch.float32).min)

    peak = scores.detach().amax(dim=1)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    shifted = scores - peak[:, None]
    exponentials = shifted.exp()
    local = targets - first
    mine = (local >= 0) & (local < width)
    picked = shifted.gather(1, local.clamp(0, width - 1)[:, None])[:, 0] * mine
    parts = [exponentials.sum(dim=1), picked]
    if with_entropy:
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            parts.append((exponentials * shifted.clamp_min(-1e4)).sum(dim=1))  # a padded column: 0 * -1e4 = 0
    total, target_score, *weighted = reduce_from_tensor_model_parallel_region(torch.stack(parts)).unbind()
    log_total = total.log()
    entropy = log_total - weighted[0] / total if with_entropy else None
    if entropy is not None and not entropy_gradient:
        entropy = entropy.detach()
    return target_score - log_total, entropy


def on_all_context_ranks(part: torch.Tensor, picks: torch.Tensor, total: int) -> torch.Tensor:
    """All ``total`` numbers on each context-parallel rank, of which this one computed those at ``picks``.

    Losses then see whole sequences. Gradients flow to ``part`` alone: what others computed is a constant here, and Megatron's sum over
    the ranks puts the whole gradient together.
    """
    whole = part.new_zeros(total).index_put((picks,), part)
    if parallel_state.get_context_parallel_world_size() == 1:
        return whole
    everywhere = whole.detach().clone()
    dist.all_reduce(everywhere, group=parallel_state.get_context_parallel_group())
    return whole + (everywhere - whole.detach())
