"""Is a directory a whole Hugging Face model? Known from its files' names and headers, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.config.safetensors_header import once, read_header
from megarl.errors import ModelError, explain

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")  # what PEFT writes
_PICKLED = ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt")


def check_model_files(directory: str | Path) -> None:
    """Raise ModelError for a directory that is missing, or without whole ``config.json`` and safetensors. Reads names and headers."""
    root = Path(directory)
    try:
        _check_files(root)
    except OSError as error:
        raise ModelError(explain("a model can't be read", where=str(root), got=error, do="mend its permissions")) from error


def _check_files(root: Path) -> None:
    if not root.is_dir():
        raise ModelError(
            explain(
                "no model here: it is a file" if root.exists() else "no such directory",
                where=str(root),
                expected="a local directory in Hugging Face's form",
                do="download the model first, and name the directory; megarl fetches nothing",
            )
        )
    if not (root / "config.json").is_file():
        raise ModelError(
            explain(
                "no Hugging Face model here: config.json is missing",
                where=str(root),
                got=_names(root),
                do="name a directory that save_pretrained wrote",
            )
        )
    (root / "config.json").open("rb").close()
    for name in weight_files(root):
        if not (root / name).is_file():
            raise ModelError(
                explain(
                    "a weight file is missing",
                    where=str(root / name),
                    got=f"{INDEX} names it; {_names(root)}",
                    do="check that the model directory is complete",
                )
            )
        read_header(root / name)
    _check_one_model(root)
    other_weights(root)


def _check_one_model(root: Path) -> None:
    """Raise ModelError where readers could take the directory for different models."""
    if adapters := [name for name in _ADAPTERS if (root / name).exists()]:
        raise ModelError(
            explain(
                "an adapter beside the model, which would be left out",
                where=str(root),
                got=", ".join(adapters),
                expected="whole weights alone",
                do="merge it first (PeftModel's merge_and_unload, then save_pretrained), or remove its files to use the base",
            )
        )
    if not ((root / INDEX).is_file() and (root / WEIGHTS).is_file()):
        return
    if (named := weight_files(root)) != [WEIGHTS]:  # transformers prefers the single file, megarl the index
        raise ModelError(
            explain(
                "weights twice, and nothing says which are meant",
                where=str(root),
                got=f"{WEIGHTS}, and {INDEX}, which names {', '.join(named[:3])}{', ...' if named[3:] else ''}",
                expected="one of the two",
                do="remove one: the single file, or the index and its files",
            )
        )


def weight_files(root: Path) -> list[str]:
    """Names of the weight files that the directory should have. Raises ModelError for none, and for a damaged index."""
    if (root / INDEX).is_file():
        return sorted(set(read_index(root / INDEX).values()))
    if (root / WEIGHTS).is_file():
        return [WEIGHTS]
    if any(root.glob("*.safetensors")):
        raise ModelError(
            explain(
                "weights in several files, without the index that says what is where",
                where=str(root),
                got=_names(root),
                expected=INDEX,
                do="copy the index too",
            )
        )
    pickled = sorted(path.name for pattern in _PICKLED for path in root.glob(pattern))
    do = "copy the weights into it"
    if pickled:
        do = "convert them: from_pretrained(DIR).save_pretrained(DIR) of transformers writes safetensors; megarl reads no pickle files"
    raise ModelError(explain("a model directory without weights", where=str(root), got=_names(root), expected=f"weights: {WEIGHTS}", do=do))


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises ModelError for a file of another form."""
    expected = '{"weight_map": {tensor: file}}'
    try:
        found: Any = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ModelError(explain("not an index of safetensors", where=str(index), got=error, expected=expected)) from error
    table = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(table, dict) or not table or not all(isinstance(file, str) and Path(file).name == file for file in table.values()):
        raise ModelError(explain("not an index of safetensors", where=str(index), got=repr(found)[:80], expected=expected))
    return table


def other_weights(root: Path) -> dict[str, str]:
    """Safetensors files that belong to the model and are not read -> why. Raises ModelError for one that nothing names."""
    known = {*weight_files(root), *_ADAPTERS}
    others = sorted(path.name for path in root.glob("*.safetensors") if path.name not in known)
    if strangers := [name for name in others if not name.startswith("consolidated")]:
        raise ModelError(
            explain(
                "a weight file that nothing names, and which would be left out",
                where=str(root / strangers[0]),
                got=", ".join(strangers[:3]) + (", ..." if strangers[3:] else ""),
                expected=f"the files that {INDEX} names" if (root / INDEX).is_file() else f"{WEIGHTS} alone, or {INDEX}",
                do="copy the index that names it, or move the file elsewhere",
            )
        )
    return dict.fromkeys(others, "the same weights in their author's own form, which the index doesn't name")


def _names(root: Path) -> str:
    return ", ".join(sorted(path.name for path in root.iterdir())) or "an empty directory"
