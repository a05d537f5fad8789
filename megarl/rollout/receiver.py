"""The receiving side of resharding, inside each vLLM worker process.

vLLM adds :class:`WeightReceiver` to its worker class; the methods are called by name through ``collective_rpc`` and take and return
plain data only. So are errors: between processes vLLM turns what is raised into a RuntimeError, and stops the engine's other ranks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from megarl.device import device_id, synchronize
from megarl.errors import MegarlError, SyncError, explain
from megarl.profiling import Profiler, Window
from megarl.rollout.packing import finish_written_modules, keep_plain_weights
from megarl.rollout.recorder import record_loader
from megarl.weights.cuda_ipc import open_exported
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.regions import Region, as_slices
from megarl.weights.shared import open_shared

# vLLM imports this module in each worker process just before it builds the model: the one moment at which this can still take effect.
keep_plain_weights()

Answer = dict[str, Any]  # {"result": plain data} or {"error": message}
Slices = Sequence[tuple[int, tuple[str, Any], tuple[str, Any]]]  # (training rank, source region, target region)


class WeightReceiver:
    """Methods of a vLLM worker. Their names carry a prefix: vLLM refuses an extension that hides one of its own."""

    vllm_config: Any  # of the worker that this class is mixed into
    model_runner: Any
    rank: int
    megarl_fills: Sequence[tuple[Region, float]] = ()  # what the loader sets to one number: vocabulary padding
    megarl_profiler: Profiler  # made at megarl_layout, as megarl_opened is
    megarl_opened: dict[int, tuple[str, dict[str, torch.Tensor]]]  # training rank -> token of its manifest, its parameters (CUDA)

    def megarl_layout(self) -> Answer:
        """Record this rank's loader; answer with its device and its copies as (Hugging Face region, parameter region)."""
        return _answer(self._megarl_layout)

    def megarl_sync(self, plan: Mapping[int, Slices], manifests: Mapping[int, Mapping[str, Any]], check: bool) -> Answer:
        """Copy this rank's slices out of the training ranks' shared parameters, in place; then let vLLM process what changed.

        Answers with bytes copied and the seconds of each stage (open, copy, check, process), or with an error: a training process is
        gone, a parameter has another dtype, or a slice differs from its source afterwards.
        """
        with self.megarl_profiler.phase("sync weights"):
            return _answer(lambda: self._megarl_sync(plan, manifests, check))

    def megarl_start_profile(self, window: Mapping[str, Any]) -> None:
        """Begin to record this rank, where it is a process of its own. ``window``: fields of :class:`megarl.profiling.Window`."""
        self.megarl_profiler.start(Window(**{**window, "name": f"{window['name']}_tensor_{self.rank}"}))

    def megarl_stop_profile(self) -> dict[str, list[str]]:
        """Write what was recorded; answer with the fields of :class:`megarl.profiling.Recorded`."""
        return asdict(self.megarl_profiler.stop())

    def megarl_digests(self) -> dict[str, str]:
        """Parameter -> SHA-256 of its bytes: what two engines are compared by."""
        parameters = self.model_runner.get_model().named_parameters()
        return {name: hashlib.sha256(_raw(parameter.detach()).cpu().numpy().tobytes()).hexdigest() for name, parameter in parameters}

    def _megarl_layout(self) -> dict[str, Any]:
        hf_config = read_hf_config(self.vllm_config.model_config.model)
        recording = record_loader(self.vllm_config, model_family(hf_config).hf_tensors(hf_config))
        self.megarl_fills = recording.fills
        self.megarl_opened = {}
        self.megarl_profiler = Profiler()
        return {"device": device_id(), "copies": [(tuple(source), tuple(target)) for source, target in recording.copies]}

    def _megarl_sync(self, plan: Mapping[int, Slices], manifests: Mapping[int, Mapping[str, Any]], check: bool) -> dict[str, float]:
        slices = plan[self.rank]
        model = self.model_runner.get_model()
        parameters = dict(model.named_parameters())
        clock = _StageClock()
        opened = {rank: self._megarl_open(rank, manifests[rank]) for rank in {source_rank for source_rank, _, _ in slices}}
        clock.mark("open")
        pairs = [_pair(opened, parameters, entry) for entry in slices]
        with torch.no_grad():
            # In few kernels: one by one, hundreds of small slices would wait for their launches.
            torch._foreach_copy_([target for _, target, _ in pairs], [source for source, _, _ in pairs])
            for region, value in self.megarl_fills:  # each time: an engine that slept has forgotten them
                parameters[region.name][as_slices(region.box)] = value
        clock.mark("copy")
        if check:
            _compare(pairs)
        clock.mark("check")
        finish_written_modules(model, {target[0] for _, _, target in slices})
        clock.mark("process")
        return {"bytes": float(sum(target.nbytes for _, target, _ in pairs)), **clock.seconds}

    def _megarl_open(self, rank: int, manifest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The parameters of one training rank. CUDA buffers stay open from sync to sync, until the rank has others."""
        if manifest["kind"] != "cuda":
            return open_shared(manifest)
        if rank not in self.megarl_opened or self.megarl_opened[rank][0] != manifest["token"]:
            self.megarl_opened.pop(rank, None)  # closed first: two of them need not fit
            self.megarl_opened[rank] = manifest["token"], open_exported(manifest)
        return self.megarl_opened[rank][1]


def _answer(action: Callable[[], Any]) -> Answer:
    try:
        return {"result": action()}
    except MegarlError as error:
        return {"error": str(error)}


class _StageClock:
    """Seconds between marks."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, stage: str) -> None:
        synchronize()
        now = time.monotonic()
        self.seconds[stage], self._last = now - self._last, now


def _pair(opened: Mapping[int, Mapping[str, torch.Tensor]], parameters: Mapping[str, torch.Tensor], entry: Any) -> tuple:
    """One slice as two views of one shape and dtype, and its name for messages."""
    source_rank, (source_name, source_box), (target_name, target_box) = entry
    source, target = opened[source_rank][source_name], parameters[target_name]
    if source.dtype != target.dtype:
        raise SyncError(
            explain(
                "the generation engine keeps its weights in another dtype than the trainer",
                where=target_name,
                got=target.dtype,
                expected=source.dtype,
                do="set actor.dtype and rollout.dtype alike",
            )
        )
    return (
        source[as_slices(source_box)],
        target[as_slices(target_box)],
        f"{target_name}{list(target_box)} from rank {source_rank}'s {source_name}",
    )


def _compare(pairs: Sequence[tuple]) -> None:
    """Raise SyncError unless each target holds its source's bytes, now that all have been copied (a second copy into it would show)."""
    for source, target, what in pairs:
        if not torch.equal(_raw(source), _raw(target)):
            raise SyncError(explain("a slice arrived changed", where=what, do="this is a bug of megarl or bad memory; restart the engine"))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, as integers: NaN equals itself, and 0.0 differs from -0.0."""
    return tensor.contiguous().view(torch.uint8)
