"""Which tensor of a Hugging Face directory to be written goes into which file, and where in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megarl.config.model_checks import INDEX, WEIGHTS
from megarl.config.safetensors_header import Entry
from megarl.weights.hf_source import CODE_OF


@dataclass(frozen=True)
class Laid:
    """Files of a directory: where each tensor will be."""

    entries: Mapping[str, Entry]
    headers: Mapping[str, bytes]  # file -> its first bytes
    sizes: Mapping[str, int]  # file -> bytes

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def lay_out(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], shard_bytes: int) -> Laid:
    """Deal tensors in order to files of at most ``shard_bytes``, unless one tensor is larger, under the names that transformers gives."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtypes[name].itemsize
        if groups[-1] and used + size > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    entries, headers, sizes = {}, {}, {}
    for i, group in enumerate(groups, start=1):
        file = WEIGHTS if len(groups) == 1 else f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        header, end = {"__metadata__": {"format": "pt"}}, 0
        # Wider elements first, so that each tensor begins at a multiple of its element's size.
        for name in sorted(group, key=lambda n: -dtypes[n].itemsize):
            begin, end = end, end + prod(shapes[name]) * dtypes[name].itemsize
            header[name] = {"dtype": CODE_OF[dtypes[name]], "shape": list(shapes[name]), "data_offsets": [begin, end]}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        headers[file] = len(encoded).to_bytes(8, "little") + encoded
        sizes[file] = len(headers[file]) + end
        for name in group:
            at = len(headers[file]) + header[name]["data_offsets"][0]
            entries[name] = Entry(file, CODE_OF[dtypes[name]], shapes[name], at)
    return Laid(entries, headers, sizes)


def index_of(laid: Laid) -> dict | None:
    """Content of the index; None for one file, which needs none."""
    if len(laid.sizes) == 1:
        return None
    weight_map = {name: entry.file for name, entry in laid.entries.items()}
    return {"metadata": {"total_size": sum(entry.nbytes for entry in laid.entries.values())}, "weight_map": weight_map}


def write_index(directory: Path, laid: Laid) -> None:
    """Write the index, where the directory needs one."""
    if (index := index_of(laid)) is not None:
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
