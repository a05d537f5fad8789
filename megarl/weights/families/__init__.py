"""The supported model families. A new one is a table in its own file, listed here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

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
    """The parsed ``config.json`` of a Hugging Face directory. Raises ModelError when it is missing or no JSON object."""
    path = Path(hf_dir) / "config.json"
    if not path.is_file():
        raise ModelError(
            explain(
                "no Hugging Face model here: config.json is missing", where=str(hf_dir), do="name a directory that save_pretrained wrote"
            )
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(explain("config.json is no JSON", where=str(path), got=error)) from error
    if not isinstance(config, dict):
        raise ModelError(explain("config.json is no JSON object", where=str(path), got=type(config).__name__, expected="an object"))
    return config


def model_family(hf_config: Mapping) -> Family:
    """The family of a model by its ``model_type``. Raises ModelError that names the supported ones."""
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
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
