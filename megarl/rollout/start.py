"""Start vLLM so that only a sync gives it weights."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from megarl.config.schema import RolloutConfig
from megarl.device import on_gpu
from megarl.weights.families import model_family

_BLOCK_CPU, _BLOCK_GPU = 128, 16  # tokens of one block of the key/value cache, vLLM's defaults
# Tokens of one forward pass, prompts for the most part: enough to fill it from many short prompts.
_BATCHED_TOKENS_CPU = 2048
_BATCHED_TOKENS_GPU = 16384


def start_vllm(
    model_dir: str, config: RolloutConfig, max_prompt_tokens: int, seed: int, hf_config: Mapping[str, Any], *, can_sleep: bool
) -> Any:
    """vLLM's engine in this process, its tensor-parallel ranks in child processes where there are several. ``can_sleep``: GPU only."""
    from vllm import LLM

    max_tokens = max_prompt_tokens + config.max_response_tokens
    return LLM(
        model=model_dir,
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",  # not the model's own temperature and stop tokens
        dtype=config.dtype,
        tensor_parallel_size=config.tensor_parallel,
        distributed_executor_backend="mp" if config.tensor_parallel > 1 else "uni",
        max_model_len=max_tokens,
        max_num_seqs=config.max_concurrent_samples,
        kv_cache_memory_bytes=kv_cache_bytes(config, max_tokens, hf_config),
        logprobs_mode="processed_logprobs",  # after temperature, as the trainer computes them
        seed=seed,
        worker_extension_cls="megarl.rollout.receiver.WeightReceiver",
        **(_on_gpu(can_sleep) if on_gpu() else _on_cpu(config, max_tokens)),
    )


def kv_cache_bytes(config: RolloutConfig, max_tokens: int, hf_config: Mapping[str, Any]) -> int:
    """Bytes of one engine rank's key/value cache: what the recipe says, else room for all concurrent samples at full length.

    A token takes 2 (key and value) x layers x key/value heads of the rank x head size numbers. One block is vLLM's own.
    """
    if config.kv_cache_mib:
        return config.kv_cache_mib << 20
    sizes = model_family(hf_config).sizes(hf_config)
    heads = max(1, sizes.query_groups // config.tensor_parallel)  # fewer heads than ranks are repeated
    token = 2 * sizes.layers * heads * sizes.head_dim * {"float32": 4, "bfloat16": 2}[config.dtype]
    block = _BLOCK_GPU if on_gpu() else _BLOCK_CPU
    return (config.max_concurrent_samples * ceil(max_tokens / block) + 1) * block * token


def _on_cpu(config: RolloutConfig, max_tokens: int) -> dict[str, Any]:
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,  # a seeded request whose prefill is chunked kills vLLM's CPU engine
        "max_num_batched_tokens": max(max_tokens, min(_BATCHED_TOKENS_CPU, max_tokens * config.max_concurrent_samples)),
    }


def _on_gpu(can_sleep: bool) -> dict[str, Any]:
    return {
        "enable_sleep_mode": can_sleep,
        "max_num_batched_tokens": _BATCHED_TOKENS_GPU,
        # Not used for the cache, whose size is given, but vLLM refuses to start where so large a share of the GPU isn't free.
        "gpu_memory_utilization": 0.02,
    }
