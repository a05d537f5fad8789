"""Read a Hugging Face directory into the shards of one rank, only the byte ranges that the rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from megarl.errors import ModelError, explain
from megarl.weights.casts import cast
from megarl.weights.hf_reader import HfReader
from megarl.weights.regions import as_slices, volume
from megarl.weights.table import ParameterShard


def load_into(params: Mapping[str, torch.Tensor], shards: Mapping[str, ParameterShard], hf_dir: str | Path) -> tuple[str, ...]:
    """Fill ``params`` (name -> the rank's tensor) in place from a directory of safetensors; padding becomes zero.

    Numbers are cast to each parameter's dtype. Returns the parameters whose tensor the directory doesn't have and needn't (a
    value head over a language model): they are left as they are. Raises ModelError that names file and tensor when something
    is missing, has another shape, is not finite, or has no room in the parameter's dtype.
    """
    check_parameters(params, shards)
    absent = []
    with ExitStack() as files, torch.no_grad():
        reader = HfReader(hf_dir, files)
        for name, shard in shards.items():
            if shard.optional and not all(reader.has(tensor.name) for tensor in shard.hf_tensors):
                absent.append(name)
                continue
            for tensor in shard.hf_tensors:
                reader.check(tensor)
            parameter = params[name]
            if sum(volume(copy.target.box) for copy in shard.copies) != parameter.numel():
                parameter.zero_()
            for source, target in shard.copies:
                parameter[as_slices(target.box)] = cast(reader.read(source), parameter.dtype, f"{source.name} in {hf_dir}")
    return tuple(absent)


def check_parameters(params: Mapping[str, torch.Tensor], shards: Mapping[str, ParameterShard]) -> None:
    """Raise ModelError unless ``params`` are those of ``shards``, name by name and shape by shape."""
    if params.keys() != shards.keys():
        raise ModelError(
            explain(
                "the parameters of the model are not those of its table",
                where="megarl/weights/families",
                got=f"only in the model: {sorted(params.keys() - shards.keys())}",
                expected=f"also in the model: {sorted(shards.keys() - params.keys())}",
            )
        )
    for name, shard in shards.items():
        if tuple(params[name].shape) != shard.shape:
            raise ModelError(
                explain(
                    "a parameter has another shape than its table says", where=name, got=tuple(params[name].shape), expected=shard.shape
                )
            )
