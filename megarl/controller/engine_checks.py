"""Can the generation engine run the actor? Known before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from megarl.config.schema import Config
from megarl.device import on_gpu
from megarl.errors import ConfigError, explain
from megarl.rollout.start import kv_cache_bytes
from megarl.weights.families import model_family

# What vLLM's attention on a CPU is compiled for (0.32; its CPUAttentionBackend.get_supported_head_sizes).
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_engine(config: Config, hf_config: Mapping[str, Any]) -> None:
    """The engine can take over and cut the actor, and its cache holds at least one sample. Raises ConfigError."""
    check_engine_cut(config, hf_config)
    sizes = model_family(hf_config).sizes(hf_config)
    if config.cluster.address is None and not on_gpu() and sizes.head_dim not in _CPU_HEAD_SIZES:
        raise ConfigError(
            explain(
                "vLLM on a CPU has no attention for heads of this size",
                where="model",
                got=f"{sizes.head_dim} (head_dim, or hidden_size / num_attention_heads, of config.json)",
                expected=", ".join(map(str, _CPU_HEAD_SIZES)),
                do="use a model with such heads, or run it on a GPU",
            )
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    needed = kv_cache_bytes(replace(config.rollout, kv_cache_mib=0, max_concurrent_samples=1), longest, hf_config)
    if kv_cache_bytes(config.rollout, longest, hf_config) < needed:
        raise ConfigError(
            explain(
                "the engine's key/value cache can't hold one sample of full length",
                where="rollout.kv_cache_mib",
                got=config.rollout.kv_cache_mib,
                expected=f"at least {ceil(needed / 2**20)}, for {longest} tokens (data.max_prompt_tokens + rollout.max_response_tokens)",
                do="raise it (0: as much as rollout.max_concurrent_samples need), or shorten the samples",
            )
        )


def check_engine_cut(config: Config, hf_config: Mapping[str, Any]) -> None:
    """The engine can take over the actor's weights and split its heads, on whatever machine. Raises ConfigError."""
    sizes, ranks = model_family(hf_config).sizes(hf_config), config.rollout.tensor_parallel
    if sizes.experts:
        raise ConfigError(
            explain(
                "the weights of experts can't reach the engine yet",
                where="model",
                got=f"{hf_config['model_type']} with {sizes.experts} experts",
                expected="a dense model as the actor (critic and reference may be mixtures of experts)",
                do="use a dense model; the first version that reshards experts will lift this",
            )
        )
    heads, groups = sizes.heads, sizes.query_groups
    if heads % ranks or max(groups, ranks) % min(groups, ranks):
        raise ConfigError(
            explain(
                "the engine can't split the model's heads over its ranks",
                where="rollout.tensor_parallel",
                got=ranks,
                expected=f"a divisor of {heads} (num_attention_heads), and a divisor or a multiple of {groups} (num_key_value_heads)",
                do="choose another number of ranks, and more rollout.engines if devices are left over",
            )
        )
