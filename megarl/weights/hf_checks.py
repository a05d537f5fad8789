"""Do a directory's tensors belong to its config.json? Asked of whole files, before any rank reads its part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megarl.errors import ModelError, explain
from megarl.weights.families import model_family

READ_AT_MOST = 16 << 30  # bytes: some seconds, and the ranks find them in memory afterwards. Ranks look at larger models themselves
_BUFFERS = ("rotary_emb.inv_freq", "masked_bias")  # older writers saved them; they follow from config.json
_UNREAD = {"lm": (), "value": ("lm_head.weight",)}  # what a model of this head leaves out, and may
_NUMBERS = ("F64", "F32", "F16", "BF16")
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_NAMED = 4  # tensors that a message names
_ROWS = 4096  # of an embedding, compared at a time


def check_tensors(directory: str | Path, hf_config: Mapping[str, Any], files: Mapping[str, str], head: str, *, read: bool) -> None:
    """Raise ModelError for tensors that the model has no place for, are no plain numbers, contradict a tie, or are not finite.

    ``files``: tensor name -> file name. ``head``: "lm" or "value". ``read``: look at the numbers too, where all files together have no
    more than ``READ_AT_MOST`` bytes.
    """
    root = Path(directory)
    known = model_family(hf_config).hf_tensors(hf_config, head=head)
    tied = _OUTPUT not in known and _OUTPUT in files and head == "lm"
    extra = [n for n in files if n not in known and not n.endswith(_BUFFERS) and n not in _UNREAD[head] and not (tied and n == _OUTPUT)]
    if extra:
        raise ModelError(
            explain(
                "the weights have tensors that config.json has no place for",
                where=str(root),
                got=_some(sorted(extra)),
                expected=f"the {len(known)} tensors of a {hf_config['model_type']} with {hf_config['num_hidden_layers']} layers",
                do="take config.json and weights from one model; merge adapters first",
            )
        )
    by_file: dict[str, list[str]] = {}
    for name, file in files.items():
        by_file.setdefault(file, []).append(name)
    readable = read and sum((root / file).stat().st_size for file in by_file) <= READ_AT_MOST
    for file, names in by_file.items():
        with safe_open(root / file, framework="pt") as opened:
            for name in names:
                if name in known:
                    _check_numbers(opened, name, root / file, readable)
    if tied and _EMBEDDING in files:
        _check_tie(root, files)


def check_finite(tensor: torch.Tensor, name: str, where: str) -> None:
    """Raise ModelError for NaN or infinity. One pass at the speed of memory."""
    if not tensor.numel():
        return
    low, high = (float(x) for x in torch.aminmax(tensor))
    if not (torch.isfinite(torch.tensor([low, high])).all()):
        raise ModelError(
            explain(
                "a weight is not finite",
                where=f"{name} in {where}",
                got=f"values from {low} to {high}",
                expected="finite numbers",
                do="the model diverged before it was saved, or the file is damaged: take an earlier or another copy",
            )
        )


def _check_numbers(opened: Any, name: str, file: Path, readable: bool) -> None:
    kind = opened.get_slice(name).get_dtype()
    if kind not in _NUMBERS:
        raise ModelError(
            explain(
                "a tensor is not of plain floating-point numbers",
                where=f"{name} in {file}",
                got=kind,
                expected=", ".join(_NUMBERS),
                do="use the model's unquantized weights",
            )
        )
    if readable:
        check_finite(opened.get_tensor(name), name, str(file))


def _check_tie(root: Path, files: Mapping[str, str]) -> None:
    """A tied output layer that was saved as well must be the embedding."""
    with safe_open(root / files[_EMBEDDING], framework="pt") as a, safe_open(root / files[_OUTPUT], framework="pt") as b:
        embedding, output = a.get_slice(_EMBEDDING), b.get_slice(_OUTPUT)
        rows = embedding.get_shape()[0]
        same = embedding.get_shape() == output.get_shape() and all(
            torch.equal(embedding[row : row + _ROWS], output[row : row + _ROWS]) for row in range(0, rows, _ROWS)
        )
    if not same:
        raise ModelError(
            explain(
                "the output layer differs from the embedding, and config.json ties them",
                where=f"{_OUTPUT} in {root / files[_OUTPUT]}",
                got="tie_word_embeddings: true, and two different tensors",
                expected="equal tensors, or tie_word_embeddings: false",
                do="set tie_word_embeddings to false in config.json if the model was trained so",
            )
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
