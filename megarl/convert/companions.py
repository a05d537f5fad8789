"""What a model directory holds beside its weights: configuration, generation configuration, tokenizer, chat templates, licence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = "config.json"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5",
            "*.msgpack", "*.onnx", "*.distcp", ".*")  # fmt: skip
_FOLDERS = ("chat_template*", "additional_chat_templates", "tokenizer*")


def companions(directory: Path) -> list[Path]:
    """Files and folders to take along; never weights of any form, nor code."""
    found = []
    for path in sorted(directory.iterdir()):
        patterns = _FOLDERS if path.is_dir() else ()
        is_weight = any(path.match(pattern) for pattern in _WEIGHTS)
        if (path.is_file() and not is_weight and path.suffix != ".py") or any(path.match(pattern) for pattern in patterns):
            found.append(path)
    return found


def copy_companions(source: Path, target: Path, *, config: Mapping[str, Any]) -> None:
    """Copy them into ``target``, which may have some of an earlier attempt; ``config`` becomes its config.json.

    Byte for byte where it says what the source's own says.
    """
    target.mkdir(exist_ok=True)
    for path in companions(source):
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        elif path.name != CONFIG:
            shutil.copyfile(path, target / path.name)
    own = source / CONFIG
    if own.is_file() and json.loads(own.read_text(encoding="utf-8")) == dict(config):
        shutil.copyfile(own, target / CONFIG)
    else:
        (target / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
