"""One model on this rank: forward passes, optimizer steps, weights. It knows nothing of Ray, of roles, or of algorithms.

Each data-parallel replica works on its own rows; all tensor and pipeline ranks of a replica are given the same rows.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.device import compute_device, has_transformer_engine, release_cached_memory
from megarl.megatron.cpu import on_compute_device
from megarl.megatron.head import on_all_context_ranks, vocab_parallel_log_probs
from megarl.megatron.layers import layer_spec
from megarl.megatron.losses import LossSpec, MiniBatchTotals
from megarl.megatron.model import Role, build_model, unwrap, wrap_for_training
from megarl.megatron.optimizer import OptimizerSettings, build_optimizer, optimizer_step
from megarl.megatron.packed import ContextRank, PackedTokens, pack
from megarl.types import Ragged, Rank
from megarl.weights.families import model_family
from megarl.weights.hf_io import load_into
from megarl.weights.table import chunk_prefix


@dataclass(frozen=True)
class MicroBatch:
    """The rows that go through the model together."""

    prompts: Ragged
    responses: Ragged
    columns: dict[str, Ragged]  # per response token, what the loss needs
    # A value head over tokens of its own vocabulary, which are the prompts here: the place of the one that speaks of each response token.
    predictors: Ragged | None = None

    @property
    def response_lengths(self) -> np.ndarray:
        """[B] int64: response tokens, as ``columns`` and outputs count them."""
        return (self.responses if self.predictors is None else self.predictors).lengths


# One token and no response: what a rank computes where others need its company.
_FILLER = MicroBatch(Ragged.from_list([[0]], np.int32), Ragged.from_list([[]], np.int32), {})


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step says; the same on every rank of the group."""

    sums: dict[str, float]
    grad_norm: float
    applied: bool  # False: a loss or gradient was not finite, and nothing was changed


class Engine:
    """A model in one layout, with an optimizer where it is trained."""

    def __init__(self, hf_config: dict[str, Any], rank: Rank, role: Role, optimizer: OptimizerSettings | None = None):
        self.hf_config, self.rank, self.role = hf_config, rank, role
        self.device = compute_device()
        self.spec = layer_spec(role.dtype, has_transformer_engine())
        self.chunks = build_model(hf_config, rank, role, self.spec)
        self.shards = model_family(hf_config).shard(hf_config, rank, head=role.head, spec=self.spec)
        self._mark_experts()
        self.vocab_size = int(hf_config["vocab_size"])
        self.optimizer: Any = None
        self._optimizer_settings = optimizer

    def _mark_experts(self) -> None:
        """Say of each expert's weight whose gradients are to be summed: those of its own replicas, or of the whole model's.

        megatron-core tells them apart by the number of expert-parallel ranks alone. With one, experts that are cut otherwise than the rest
        (``expert_tensor`` other than ``tensor``) would silently lose the gradients of some ranks, or count them twice.
        """
        for name, parameter in self.named_parameters().items():
            if self.shards[name].expert:
                parameter.allreduce = not self.rank.layout.experts_apart

    def load_hf(self, directory: Path) -> None:
        """Load this rank's slices of a Hugging Face directory, in place. A value head that the directory lacks keeps its zeros."""
        load_into(self.named_parameters(), self.shards, directory)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def enable_training(self) -> None:
        """Wrap the model and build its optimizer; after the weights were loaded, since master weights are copied from them."""
        settings = self._optimizer_settings
        assert settings is not None, "enable_training needs optimizer settings"
        self.chunks = wrap_for_training(self.chunks, distributed_optimizer=settings.distributed)
        self.optimizer = build_optimizer(self.chunks, settings, self.role.dtype)
        self.config.finalize_model_grads_func = _finalize_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def discard(self) -> None:
        """Free model and optimizer; the engine is of no use afterwards.

        By themselves they would live on: the optimizer's view of a float32 parameter refers to autograd's graph, the graph by a hook to the
        model, and the model's configuration to the optimizer, and Python can't see the graph's part of that circle.
        """
        self.config.grad_scale_func = None
        self.chunks, self.optimizer = [], None
        gc.collect()
        release_cached_memory()

    @property
    def config(self) -> Any:
        return unwrap(self.chunks[0]).config

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """This rank's parameters under Megatron's local names, with the model chunk before them where there are several.

        The bias of a router is among them, which Megatron keeps as a buffer: the table names it, and no gradient reaches it.
        """
        found: dict[str, torch.Tensor] = {}
        for i, chunk in enumerate(self.chunks):
            model, prefix = unwrap(chunk), chunk_prefix(self.rank.layout, i)
            found |= {prefix + name: parameter for name, parameter in model.named_parameters()}
            found |= {prefix + name: buffer for name, buffer in model.named_buffers() if prefix + name in self.shards}
        return found

    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[MicroBatch], *, temperature: float = 1.0, with_entropy: bool = False
    ) -> dict[str, list[np.ndarray]]:
        """Outputs at the response tokens of each micro-batch, without gradients.

        Returns name -> one array a micro-batch, in order, float32: ``log_probs`` (and ``entropy``) [R], or ``values`` [R] and
        ``last_values`` [B], the value after the last token of each sequence. Empty on ranks that are not the last stage.
        """
        self._set_training(False)
        outputs = self.run_schedule(
            micro_batches, partial(self._outputs, temperature=temperature, with_entropy=with_entropy), forward_only=True
        )
        if not outputs:
            return {}
        return {name: [o[name].cpu().numpy() for o in outputs] for name in outputs[0]}

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: LossSpec, totals: MiniBatchTotals, *, lr: float, temperature: float = 1.0
    ) -> StepResult:
        """One optimizer step on a mini-batch, of which ``micro_batches`` are this replica's part.

        Nothing is changed when a loss or gradient anywhere in the group is not finite (``applied`` is then False).
        """
        self._set_training(True)
        sums = self.gradients(micro_batches, loss, totals, temperature=temperature)
        grad_norm, applied = optimizer_step(self.optimizer, lr, finite=all(np.isfinite(v) for v in sums.values()))
        return StepResult(sums, grad_norm, applied)

    def gradients(
        self, micro_batches: Sequence[MicroBatch], loss: LossSpec, totals: MiniBatchTotals, *, temperature: float = 1.0
    ) -> dict[str, float]:
        """Put the gradients of a mini-batch into the parameters' ``main_grad``; returns the loss's sums over the group."""
        # Both: the optimizer makes ``grad`` an alias of ``main_grad``, and a second backward pass would then add it to itself.
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def with_loss(
            packed: PackedTokens, micro_batch: MicroBatch, logits: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            if micro_batch is _FILLER:  # nothing to learn from it, and its record is not collected
                return 0.0 * logits.float().sum(), torch.ones((), dtype=torch.int, device=self.device), {}
            outputs = self._outputs(
                packed,
                micro_batch,
                logits,
                temperature=temperature,
                with_entropy=loss.with_entropy,
                entropy_gradient=loss.entropy_gradient,
            )
            columns = {n: torch.from_numpy(micro_batch.columns[n].values).to(self.device) for n in loss.needs}
            lengths = torch.from_numpy(micro_batch.response_lengths).to(self.device)
            value, sums = loss(outputs, columns, lengths, totals)
            return value, torch.ones((), dtype=torch.int, device=self.device), sums

        collected = self.run_schedule(micro_batches, with_loss, forward_only=False)
        return self._sum_over_group(collected)

    def _outputs(
        self,
        packed: PackedTokens,
        micro_batch: MicroBatch,
        logits: torch.Tensor,
        *,
        temperature: float,
        with_entropy: bool,
        entropy_gradient: bool = False,
    ) -> dict[str, torch.Tensor]:
        """What the model says at the response tokens of all context-parallel ranks.

        ``logits``: [1, T, V / tp], or [1, T, 1] of a value head; T tokens of this rank.
        """
        at_responses = logits[0].index_select(0, packed.predictors)
        everywhere = partial(on_all_context_ranks, picks=packed.picks, total=packed.responses)
        if self.role.head == "value":
            last = logits[0].index_select(0, packed.finals)[:, 0].float()
            return {
                "values": everywhere(at_responses[:, 0].float()),
                "last_values": on_all_context_ranks(last, packed.final_picks, packed.samples),
            }
        log_probs, entropy = vocab_parallel_log_probs(
            at_responses,
            packed.targets,
            vocab_size=self.vocab_size,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
        )
        return {"log_probs": everywhere(log_probs)} | ({"entropy": everywhere(entropy)} if entropy is not None else {})

    def run_schedule(self, micro_batches: Sequence[MicroBatch], at_the_end: Any, *, forward_only: bool) -> list[Any]:
        """Drive Megatron's pipeline schedule over the micro-batches.

        ``at_the_end(packed, micro_batch, logits)`` is called on the last stage, with logits [1, T, V / tp] (or [1, T, 1] of a value
        head). With ``forward_only`` it returns anything, else Megatron's (loss, token count, record). Returns what it gave (the records)
        in the order of the micro-batches; empty on other stages. Raises ValueError without micro-batches.
        """
        if not micro_batches:
            raise ValueError("a replica without micro-batches would leave the others waiting")
        packs = [(self._pack(m), m) for m in [*micro_batches, *[_FILLER] * self._missing(len(micro_batches))]]

        def forward_step(batches: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
            packed, micro_batch = next(batches)
            output = model(packed.tokens, packed.positions, attention_mask=None, packed_seq_params=packed.sequences)
            finish = partial(at_the_end, packed, micro_batch)
            return output, (lambda logits, non_loss_data=False: finish(logits))

        with on_compute_device():
            collected = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(packs) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(packs),
                seq_length=packs[0][0].tokens.shape[1],  # only a hint: variable_seq_lengths exchanges true shapes
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        return collected[: len(micro_batches)] if collected else []

    def _pack(self, micro_batch: MicroBatch) -> PackedTokens:
        layout = self.rank.layout
        if micro_batch.predictors is not None and self.role.head != "value":
            raise ValueError("predictors of another vocabulary are a value head's: a log-prob needs the response token itself")
        return pack(
            micro_batch.prompts,
            micro_batch.responses,
            align=layout.tensor if layout.sequence_parallel else 1,
            device=self.device,
            context=ContextRank(self.rank.context, layout.context),
            predictors=micro_batch.predictors,
        )

    def _missing(self, count: int) -> int:
        """How many micro-batches without a response to add to ``count``.

        Experts of several replicas meet in every layer, so that all replicas need as many; an interleaved pipeline takes a multiple of its
        stages.
        """
        layout, wanted = self.rank.layout, count
        if (layout.tensor * layout.context) % (layout.expert * layout.expert_tensor):  # a group of experts reaches into other replicas
            most = torch.tensor(count, device=self.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
            wanted = int(most)
        if layout.virtual_pipeline > 1:
            wanted = -(-wanted // layout.pipeline) * layout.pipeline
        return wanted - count

    def _set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            unwrap(chunk).train(training)

    def _sum_over_group(self, collected: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Sums over micro-batches and replicas, known to every rank. Tensor and context ranks of the last stage hold equal values."""
        box: list[Any] = [None]
        if self.rank.is_last_stage:
            names = sorted(collected[0])
            total = torch.stack([torch.stack([c[n].double() for n in names]) for c in collected]).sum(dim=0)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
            box = [dict(zip(names, total.tolist(), strict=True))]
        if self.rank.layout.pipeline > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast_object_list(box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return box[0]


def _finalize_grads(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Reduce the gradients over replicas, tied embeddings and sequence-parallel norms, and scale by nothing.

    The denominators are in the loss already; Megatron's token count would divide a second time.
    """
    finalize_model_grads(model, None, **kwargs)
