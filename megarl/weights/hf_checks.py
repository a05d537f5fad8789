"""Do a directory's tensors belong to its config.json? Asked of whole files, before any rank reads its part."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megarl.errors import ModelError, explain
from megarl.weights.families import model_family
from megarl.weights.hf_reader import HfReader
from megarl.weights.regions import Box, Region, whole

READ_AT_MOST = 16 << 30  # bytes: some seconds, and the ranks find them in memory afterwards. Ranks look at larger models themselves
_NAMED = 4  # tensors that a message names
_ROWS = 4096  # of an embedding, compared at a time


def check_tensors(directory: str | Path, hf_config: Mapping[str, Any], head: str, *, read: bool) -> None:
    """Raise ModelError for tensors that are missing or of another shape, that the model has no place for, are no plain numbers,
    contradict a tie, or are not finite.

    ``head``: "lm" or "value". ``read``: look at the numbers too, where all files together have no more than ``READ_AT_MOST`` bytes.
    """
    root, family = Path(directory), model_family(hf_config)
    shapes = family.hf_tensors(hf_config, head=head)
    with ExitStack() as files:
        reader = HfReader(root, files)
        optional = family.table(hf_config).value_head.hf[0].name
        present = {name: Region(name, whole(shape)) for name, shape in shapes.items() if name != optional or reader.has(name)}
        for region in present.values():
            reader.check(region)
        if extra := sorted(set(reader.file_of) - reader.used(shapes) - set(unread(reader, hf_config, head))):
            raise ModelError(
                explain(
                    "the weights have tensors that config.json has no place for",
                    where=str(root),
                    got=_some(extra),
                    expected=f"the {len(shapes)} tensors of a {hf_config['model_type']} with {hf_config['num_hidden_layers']} layers",
                    do="take config.json and weights from one model; merge adapters first",
                )
            )
        readable = read and sum((root / file).stat().st_size for file in set(reader.file_of.values())) <= READ_AT_MOST
        for region in present.values() if readable else ():
            reader.read(region)
        _check_tie(reader, hf_config, head)


def unread(reader: HfReader, hf_config: Mapping[str, Any], head: str) -> dict[str, str]:
    """Tensors of the directory that a model of this head leaves out, and why it may."""
    family, found = model_family(hf_config), {}
    shapes = family.hf_tensors(hf_config, head=head)
    causal = set(family.hf_tensors(hf_config)) - set(shapes)
    used = reader.used(shapes)
    for name in reader.file_of:
        reason = "the output layer, in whose place a value head stands" if name in causal else family.reason_unused(hf_config, name)
        if name not in used and reason is not None:
            found[name] = reason
    return found


def _check_tie(reader: HfReader, hf_config: Mapping[str, Any], head: str) -> None:
    """A tied output layer that was saved as well must be the embedding."""
    table = model_family(hf_config).table(hf_config)
    embedding, output = table.embedding.hf[0].region(table.sizes), table.output.hf[0].region(table.sizes)
    if not table.sizes.tied or head != "lm" or not (reader.has(embedding.name) and output.name in reader.file_of):
        return
    if not _equal(reader, embedding, output):
        raise ModelError(
            explain(
                "the output layer differs from the embedding, and config.json ties them",
                where=f"{output.name} in {reader.directory / reader.file_of[output.name]}",
                got="tie_word_embeddings: true, and two different tensors",
                expected="equal tensors, or tie_word_embeddings: false",
                do="set tie_word_embeddings to false in config.json if the model was trained so",
            )
        )


def _equal(reader: HfReader, a: Region, b: Region) -> bool:
    """Compared a few rows at a time."""
    reader.check(b)
    (_, rows), *others = a.box
    for start in range(0, rows, _ROWS):
        box: Box = ((start, min(start + _ROWS, rows)), *others)
        if not torch.equal(reader.read(Region(a.name, box)), reader.read(Region(b.name, box))):
            return False
    return True


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
