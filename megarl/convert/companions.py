"""What a model directory holds beside its weights: configuration, generation configuration, tokenizer, chat templates, licence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megarl.convert.aside import JOURNAL
from megarl.errors import ModelError, explain

CONFIG = "config.json"
_WEIGHTS = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.distcp")
_FOLDERS = ("chat_template*", "additional_chat_templates", "tokenizer*")
_TOKENIZERS = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "spiece*")


def companions(directory: Path) -> list[Path]:
    """Files and folders to take along; never weights of any form, nor code."""
    return [path for path in sorted(directory.iterdir()) if _reason(path) is None]


def left_out(directory: Path) -> dict[str, str]:
    """Other file or folder -> why it isn't taken along. The safetensors are what is converted."""
    reasons = {path.name: _reason(path) for path in sorted(directory.iterdir())}
    return {name: reason for name, reason in reasons.items() if reason}


def has_tokenizer(directory: Path) -> bool:
    """Whether there is a file of a tokenizer among the companions."""
    return any(_is(path.name, _TOKENIZERS) for path in companions(directory))


def check_companions(directory: Path) -> None:
    """Raise ModelError for one that can't be copied: a link to nowhere, or what may not be read."""
    for _name, path in _files(directory):
        if not path.is_file():
            raise ModelError(explain("neither a file nor a folder among the files of the tokenizer", where=str(path), do="remove it"))
        if not os.access(path, os.R_OK):
            raise ModelError(explain("a file of the model can't be read", where=str(path), do="mend its permissions"))


def copy_companions(source: Path, target: Path, *, config: Mapping[str, Any]) -> None:
    """Copy them into ``target``; ``config`` becomes its config.json, byte for byte where it says what the source's own says.

    Raises ModelError as :func:`check_companions` does.
    """
    target.mkdir(exist_ok=True)
    for name, path in _files(source):
        if name != CONFIG:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name)
    if _read(source / CONFIG) == dict(config):
        shutil.copyfile(source / CONFIG, target / CONFIG)
    else:
        (target / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> Any:
    """What a file of JSON says; None where it isn't one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _reason(path: Path) -> str | None:
    """Why something in a model directory isn't taken along; "" where others tell of it, None where it is taken."""
    by_name = {
        (".*",): "hidden: it belongs to the directory, not to the model",
        ("*.safetensors", "*.safetensors.index.json"): "",
        _WEIGHTS: "weights in another form",
        ("*.py",): "code, which a conversion neither runs nor hands on",
        (JOURNAL,): "notes of a conversion, of no use any more",
    }
    for patterns, reason in by_name.items():
        if _is(path.name, patterns):
            return reason
    if path.is_dir():
        return None if _is(path.name, _FOLDERS) else "a folder, and none of a tokenizer's"
    return "neither a file nor a folder" if path.exists() and not path.is_file() else None


def _is(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _files(directory: Path) -> Iterator[tuple[str, Path]]:
    """(path below the directory, file) of all that is taken along."""
    for path in companions(directory):
        yield from _below(path, path.name, ())


def _below(path: Path, name: str, above: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """The files of a folder, or the file itself. ``above``: the folders that it is in, since links may lead back to one."""
    real = os.path.realpath(path)
    if not os.path.exists(path) or real in above:
        raise ModelError(
            explain(
                "a link among the files of the tokenizer leads nowhere",
                where=str(path),
                got=os.readlink(path) if path.is_symlink() else None,
                do="copy the directory again with what its links lead to, or remove the link",
            )
        )
    if not path.is_dir():
        yield name, path
        return
    for inner in sorted(path.iterdir()):
        yield from _below(inner, f"{name}/{inner.name}", (*above, real))
