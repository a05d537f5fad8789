"""The supported model families. A new one is a table in its own file, listed here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megarl.errors import ModelError, explain
from megarl.weights.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megarl.weights.families.gemma import GEMMA2, GEMMA3
from megarl.weights.families.gpt_neox import GPT_NEOX
from megarl.weights.families.llama import LLAMA
from megarl.weights.families.mistral import MISTRAL
from megarl.weights.families.mixtral import MIXTRAL
from megarl.weights.families.phi3 import PHI3
from megarl.weights.families.qwen2 import QWEN2
from megarl.weights.families.qwen3 import QWEN3
from megarl.weights.families.qwen3_moe import QWEN3_MOE
from megarl.weights.families.seed_oss import SEED_OSS
from megarl.weights.table import Family

_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, PHI3, GPT_NEOX, GEMMA2, GEMMA3, DEEPSEEK_V2, DEEPSEEK_V3, SEED_OSS)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}


def read_hf_config(hf_dir: str | Path) -> dict:
    """The parsed ``config.json`` of a Hugging Face directory.

    Raises ModelError when it is missing, can't be read, is no JSON object, or says a key twice.
    """
    path = Path(hf_dir) / "config.json"
    if not _is_file(path):
        raise ModelError(
            explain(
                "no Hugging Face model here: config.json is missing", where=str(hf_dir), do="name a directory that save_pretrained wrote"
            )
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=partial(_object, path))
    except OSError as error:
        raise ModelError(explain("config.json can't be read", where=str(path), got=error)) from error
    except (ValueError, RecursionError) as error:  # a wrong encoding is a ValueError too
        raise ModelError(explain("config.json is no JSON", where=str(path), got=error)) from error
    if not isinstance(config, dict):
        raise ModelError(explain("config.json is no JSON object", where=str(path), got=type(config).__name__, expected="an object"))
    return config


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # a directory that this user may not enter
        raise ModelError(explain("config.json can't be read", where=str(path), got=error)) from error


def _object(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. json by itself takes the last of two equal keys, and says nothing."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ModelError(
                explain(
                    f"config.json says `{key}` twice",
                    where=str(path),
                    got=f"{found[key]!r}, then {value!r}",
                    expected="each key once",
                    do="remove the one that isn't meant",
                )
            )
        found[key] = value
    return found


def model_family(hf_config: Mapping) -> Family:
    """The family of a model by its ``model_type``. Raises ModelError that names the supported ones."""
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        towers = [key for key in ("vision_config", "audio_config") if key in hf_config]
        raise ModelError(
            explain(
                "unsupported model family",
                where="model_type of config.json",
                got=f"{model_type}, which has {' and '.join(towers)}" if towers else model_type,
                expected=", ".join(sorted(FAMILIES)),
                do="save its language model by itself" if towers else "use a supported model, or add a table under megarl/weights/families",
            )
        )
    return FAMILIES[model_type]
