"""A Hugging Face directory against its config.json: where each tensor of the table is, what is left out, and what is wrong.

Files may have two forms beside the table's own: experts stacked in one tensor a layer, and weights in blocks of fp8 with their factors.
The converter and the start of a run ask here, so that what one takes the other takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.config.model_checks import other_weights
from megarl.config.safetensors_header import Entry
from megarl.errors import ModelError, explain
from megarl.weights import fp8
from megarl.weights.families import model_family
from megarl.weights.hf_headers import Scan, scan
from megarl.weights.hf_source import CODES, Files
from megarl.weights.numbers import NUMBERS
from megarl.weights.regions import Region, carry
from megarl.weights.table import Family

Forms = Mapping[str, tuple[Region, tuple[int, ...]]]  # tensor of the table -> the box that holds it, and the shape of all of that tensor
_NAMED = 4  # tensors that a message names
_COMPARED = 1 << 22  # elements at a time


def other_forms(family: Family, hf_config: Mapping[str, Any], head: str, names: Collection[str], directory: Path) -> Forms:
    """The table's tensors that a directory with the tensors ``names`` has in another form. Raises ModelError for one in both."""
    found = {name: where for name, where in family.stacked(hf_config, head=head).items() if where[0].name in names}
    if twice := [name for name in found if name in names]:
        raise ModelError(
            explain(
                "a tensor is there in two forms, and nothing says which is meant",
                where=str(directory),
                got=f"{twice[0]}, and {found[twice[0]][0].name}; {len(twice)} tensors in all",
                expected="the experts of a layer in one tensor, or apart",
                do="remove one of the two",
            )
        )
    return found


def locate(region: Region, forms: Forms) -> Region:
    """Where a box of the table's tensor is in the files; perhaps with one dimension of length 1 more in front."""
    if region.name not in forms:
        return region
    (name, box), _ = forms[region.name]
    more = len(box) - len(region.box)
    inner = tuple((0, stop - start) for start, stop in box[more:])
    return Region(name, (*box[:more], *carry(region.box, inner, box[more:])))


def tensor_problems(
    name: str, shape: tuple[int, ...], entry: Callable[[str], Entry | None], hf_config: Mapping[str, Any], directory: Path
) -> Iterator[ModelError]:
    """What is wrong with one stored tensor, which should be of ``shape``, and with the factors of its blocks."""
    found = entry(name)
    assert found is not None, "asked of tensors that are there"
    where = f"{name} in {directory / found.file}"
    if found.shape != shape:
        yield ModelError(explain("a tensor has another shape than config.json says", where=where, got=found.shape, expected=shape))
    if found.code not in CODES:
        yield _no_numbers(where, found.code, (*NUMBERS, fp8.STORED))
    if found.code != fp8.STORED:
        return
    block, factors = fp8.block_size(hf_config), entry(name + fp8.SCALES)
    wanted = fp8.scales_shape(shape, block) if block and len(shape) == 2 else None
    if wanted is None or factors is None or factors.shape != wanted:
        yield ModelError(
            explain(
                "a tensor of fp8 without the factors of its blocks",
                where=where,
                got=f"weight_block_size {block} in config.json; {name + fp8.SCALES}: {factors.shape if factors else 'missing'}",
                expected=f"{name + fp8.SCALES} of shape {wanted}, and quantization_config.weight_block_size",
                do="copy the model directory again, or use the model's unquantized weights",
            )
        )
    elif factors.code not in NUMBERS:
        yield _no_numbers(f"{name + fp8.SCALES} in {directory / factors.file}", factors.code, NUMBERS)


def _no_numbers(where: str, code: str, expected: Collection[str]) -> ModelError:
    return ModelError(
        explain(
            "a tensor is not of plain floating-point numbers",
            where=where,
            got=code,
            expected=", ".join(expected),
            do="use the model's unquantized weights",
        )
    )


@dataclass(frozen=True)
class StoredModel:
    """A directory that was looked at; ``scan.problems`` says what is wrong with it."""

    directory: Path
    hf_config: Mapping[str, Any]
    head: str
    shapes: Mapping[str, tuple[int, ...]]  # of the table's tensors; without an optional one that isn't there
    scan: Scan
    forms: Forms
    dropped: dict[str, str]  # stored tensor or file -> why it is left out

    def entry(self, tensor: str) -> Entry | None:
        """The stored tensor that holds the table's ``tensor``; None where there is none."""
        return self.scan.entries.get(self.forms[tensor][0].name if tensor in self.forms else tensor)


def examine(directory: Path, hf_config: Mapping[str, Any], head: str, optional: Collection[str] = ()) -> StoredModel:
    """Look at a whole directory by its index and headers, and at the numbers of an output layer that config.json ties.

    ``optional``: tensors of the table that may be missing. Every stored tensor is used, dropped for a reason, or a problem.
    """
    family, found = model_family(hf_config), scan(directory)
    shapes = family.hf_tensors(hf_config, head=head)
    try:
        forms = other_forms(family, hf_config, head, found.entries, directory)
    except ModelError as error:
        found.problems.append(error)
        forms = {}
    there = {name: shape for name, shape in shapes.items() if name not in optional or name in found.entries or name in forms}
    model = StoredModel(directory, hf_config, head, there, found, forms, {})
    if not found.files:
        return model
    used = {stored for name, shape in there.items() for stored in _check_tensor(model, name, shape)}
    _drop(model, family, used)
    _check_strangers(model, used)
    return model


def _check_tensor(model: StoredModel, name: str, shape: tuple[int, ...]) -> set[str]:
    """Note what is wrong with one tensor of the table; returns the stored tensors that it is made of."""
    entries, problems = model.scan.entries, model.scan.problems
    where, expected = (model.forms[name][0].name, model.forms[name][1]) if name in model.forms else (name, shape)
    if where not in entries:
        problems.append(_missing(model, name))
        return set()
    if name not in model.forms or not any(start for start, _ in model.forms[name][0].box):  # of a stacked one, with its first part
        problems.extend(tensor_problems(where, expected, entries.get, model.hf_config, model.directory))
    return {where, where + fp8.SCALES} if entries[where].code == fp8.STORED else {where}


def _missing(model: StoredModel, name: str) -> ModelError:
    file = dict(model.scan.unlisted).get(name)
    return ModelError(
        explain(
            "a tensor is missing from the index, though a file has it" if file else "a tensor is missing from the model directory",
            where=str(model.directory / file) if file else str(model.directory),
            expected=name,
            do="copy the index again" if file else "check that config.json and the weights belong together, and that the copy is whole",
        )
    )


def _drop(model: StoredModel, family: Family, used: set[str]) -> None:
    """Note what may be left out. A tied output layer that differs from the embedding is a problem instead."""
    outputs = set(family.hf_tensors({**model.hf_config, "tie_word_embeddings": False})) - set(model.shapes)
    for name in model.scan.entries.keys() - used:
        if name in outputs and model.head == "value":
            model.dropped[name] = "output layer of a language model: this model has a value head"
        elif name in outputs:
            model.dropped[name] = "tied: equal to the embedding"
            model.scan.problems.extend(_tie_problems(model, name))
        elif (reason := family.reason_unused(model.hf_config, name)) is not None:
            model.dropped[name] = reason
    for name, _ in model.scan.unlisted:
        if name not in model.scan.entries and (reason := family.reason_unused(model.hf_config, name)) is not None:
            model.dropped[name] = reason
    try:
        model.dropped.update(other_weights(model.directory))
    except ModelError as error:
        model.scan.problems.append(error)


def _check_strangers(model: StoredModel, used: set[str]) -> None:
    strangers = sorted(model.scan.entries.keys() - used - model.dropped.keys())
    if strangers:
        model.scan.problems.append(
            ModelError(
                explain(
                    "the weights have tensors that config.json has no place for",
                    where=str(model.directory),
                    got=_some(strangers),
                    expected=f"the {len(model.shapes)} tensors of a {model.hf_config['model_type']} "
                    f"with {model.hf_config['num_hidden_layers']} layers",
                    do="take config.json and weights from one model; merge adapters first",
                )
            )
        )
    # One that the table misses was named already.
    unlisted = [f"{name} in {file}" for name, file in model.scan.unlisted if name not in model.dropped and not _is_missed(model, name)]
    if unlisted:
        model.scan.problems.append(
            ModelError(
                explain(
                    "files have tensors that the index doesn't place there",
                    where=str(model.directory),
                    got=_some(unlisted),
                    expected="each tensor in one file, the one that the index names",
                    do="copy index and files from one model",
                )
            )
        )


def _is_missed(model: StoredModel, name: str) -> bool:
    return name in model.shapes and name not in model.scan.entries and name not in model.forms


def _tie_problems(model: StoredModel, output: str) -> Iterator[ModelError]:
    """A problem unless the stored output layer holds the numbers of the embedding."""
    embedding, entries = next(iter(model.shapes)), model.scan.entries  # tables begin with it
    if embedding not in entries:
        return  # it is reported as missing
    a, b = entries[embedding], entries[output]
    if a.shape == b.shape and a.code in CODES and b.code in CODES and _equal(model, embedding, output):
        return
    yield ModelError(
        explain(
            "the output layer differs from the embedding, and config.json ties them",
            where=f"{output} in {model.directory / b.file}",
            got="tie_word_embeddings: true, and two different tensors",
            expected="equal tensors, or tie_word_embeddings: false",
            do="set tie_word_embeddings to false in config.json if the model was trained so",
        )
    )


def _equal(model: StoredModel, a: str, b: str) -> bool:
    """Bit for bit in one dtype; in two, as numbers."""
    with Files(model.directory, model.scan.entries) as files:
        for x, y in zip(files.blocks(a, _COMPARED), files.blocks(b, _COMPARED), strict=True):
            same = torch.equal(x.view(torch.uint8), y.view(torch.uint8)) if x.dtype is y.dtype else torch.equal(x.double(), y.double())
            if not same:
                return False
    return True


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
