"""Record what vLLM's own weight loader does, as copies from regions of Hugging Face tensors to regions of vLLM's parameters.

A second model is built on the meta device (no memory, no arithmetic) with the worker's own configuration and parallel groups, and
``load_weights`` is given meta tensors. A dispatch mode sees each copy; the storages of both sides tell which tensors they are views of.
So the layout never has to be guessed: fused projections, key/value heads repeated over ranks and vocabulary padding are whatever this
version of vLLM does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.errors import SyncError, explain
from megarl.weights.regions import Box, Copy, Region, box_shape, merge, overlap, volume


@dataclass(frozen=True)
class LoaderRecording:
    """What one tensor-parallel rank of vLLM loads."""

    copies: tuple[Copy, ...]  # Hugging Face region -> region of a parameter
    fills: tuple[tuple[Region, float], ...]  # regions that hold one number: vocabulary padding


def record_loader(vllm_config: Any, hf_tensors: Mapping[str, tuple[int, ...]]) -> LoaderRecording:
    """Record the loader of this rank's model. To be called inside a vLLM worker whose parallel groups exist.

    Args:
        vllm_config: the worker's ``VllmConfig``.
        hf_tensors: name -> shape of every tensor of the Hugging Face model.

    Raises SyncError naming the parameter when a tensor isn't copied box by box, or when a parameter isn't covered exactly once; and for
    a model that this vLLM doesn't have itself.
    """
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype = vllm_config.model_config.dtype
    with set_default_torch_dtype(dtype), torch.device("meta"):
        model = initialize_model(vllm_config=_with_own_layer_registry(vllm_config))
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in hf_tensors.items()}
    parameters = dict(model.named_parameters())
    _check_own_model(model, vllm_config.model_config.architecture)
    mode = _CopyRecorder(tensors, parameters)
    with torch.no_grad(), mode:
        model.load_weights(iter(tensors.items()))
    recording = LoaderRecording(tuple(merge(mode.copies)), tuple(mode.fills))
    _check_complete(recording, parameters)
    return recording


def _check_own_model(model: torch.nn.Module, architecture: str) -> None:
    """vLLM runs what it has no model for through transformers' code, whose weights are not laid out by loaders that can be recorded."""
    here = sorted(name for name, parameter in model.named_parameters() if not parameter.is_meta)
    if here:
        raise SyncError(
            explain(
                "this vLLM has no model of its own for the actor's family, so that its weights can't be kept up to date",
                where=architecture,
                got=f"{type(model).__module__}.{type(model).__name__}; {len(here)} parameters outside its loader, as {here[0]}",
                expected="a model of vLLM's own",
                do="use another version of vLLM, or an actor of another family; as critic or reference this one works",
            )
        )


def _with_own_layer_registry(vllm_config: Any) -> Any:
    """The same configuration, but attention layers of the recorded model don't register over those that serve; nothing is compiled."""
    from vllm.config import CompilationMode

    twin = copy.copy(vllm_config)
    twin.compilation_config = copy.copy(vllm_config.compilation_config)
    twin.compilation_config.mode = CompilationMode.NONE
    twin.compilation_config.static_forward_context = {}
    twin.compilation_config.static_all_moe_layers = []
    return twin


class _CopyRecorder(TorchDispatchMode):
    """Notes ``copy_``, ``fill_`` and ``zero_`` into parameters; other operations (views) pass."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]):
        super().__init__()
        self.copies: list[Copy] = []
        self.fills: list[tuple[Region, float]] = []
        self._sources = {_storage(tensor): (name, tensor.shape) for name, tensor in tensors.items()}
        self._targets = {_storage(parameter): (name, parameter.shape) for name, parameter in parameters.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        aten = torch.ops.aten
        if func is aten.copy_.default:
            self._copy(args[0], args[1])
        elif func is aten.fill_.Scalar:
            self._fill(args[0], float(args[1]))
        elif func is aten.zero_.default:
            self._fill(args[0], 0.0)
        elif func._schema.is_mutable and _storage(args[0]) in self._targets:
            raise SyncError(explain("vLLM's loader changes a parameter by something else than a copy", where=self._name(args[0]), got=func))
        return func(*args, **(kwargs or {}))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.numel() == 0:
            return
        if _storage(source) not in self._sources or _storage(target) not in self._targets:
            raise SyncError(
                explain(
                    "vLLM's loader transforms a tensor before it copies it",
                    where=self._name(target),
                    expected="a copy of a box of a Hugging Face tensor",
                    do="use a model whose weights vLLM copies unchanged",
                )
            )
        found, landed = _region(source, *self._sources[_storage(source)]), _region(target, *self._targets[_storage(target)])
        if box_shape(found.box) != box_shape(landed.box):
            raise SyncError(explain("vLLM's loader reshapes a tensor", where=landed, got=found, expected="boxes of one shape"))
        self.copies.append(Copy(found, landed))

    def _fill(self, target: torch.Tensor, value: float) -> None:
        if target.numel() and _storage(target) in self._targets:
            self.fills.append((_region(target, *self._targets[_storage(target)]), value))

    def _name(self, target: torch.Tensor) -> str:
        return self._targets.get(_storage(target), ("a tensor that is no parameter", None))[0]


def _storage(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor; meta tensors have no address."""
    return tensor.untyped_storage()._cdata


def _region(view: torch.Tensor, name: str, shape: torch.Size) -> Region:
    """The box that ``view`` is of the contiguous tensor ``name``. Raises SyncError when it is no box."""
    strides = torch.empty(shape, device="meta").stride()
    offset = view.storage_offset()
    box = []
    for axis, stride in enumerate(strides):
        start, offset = divmod(offset, stride)
        size = view.shape[axis] if view.ndim == len(shape) else -1
        if size < 0 or start + size > shape[axis] or (size > 1 and view.stride(axis) != stride):
            raise SyncError(
                explain(
                    "vLLM's loader takes something else than a box of a tensor",
                    where=name,
                    got=f"shape {tuple(view.shape)}, strides {view.stride()}",
                    expected=f"a box of {tuple(shape)}",
                )
            )
        box.append((start, start + size))
    return Region(name, tuple(box))


def _check_complete(recording: LoaderRecording, parameters: Mapping[str, torch.Tensor]) -> None:
    """Each element of each parameter is written exactly once; else a sync would leave stale or random numbers."""
    boxes: dict[str, list[Box]] = {name: [] for name in parameters}
    for _, target in recording.copies:
        boxes[target.name].append(target.box)
    for target, _ in recording.fills:
        boxes[target.name].append(target.box)
    for name, parts in boxes.items():
        covered = sum(volume(box) for box in parts)
        if covered != parameters[name].numel() or overlap(parts) is not None:
            raise SyncError(
                explain(
                    "vLLM's loader doesn't write a parameter exactly once",
                    where=name,
                    got=f"{covered} elements in {len(parts)} parts",
                    expected=f"{parameters[name].numel()} elements, no two parts overlapping",
                )
            )
