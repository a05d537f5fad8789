"""How much memory the engine's key/value cache takes when the recipe leaves it open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.schema import RolloutConfig
from megarl.rollout.start import kv_cache_bytes
from megarl.weights.families import read_hf_config
from tests.megatron.models import tiny_qwen2


@pytest.fixture(scope="module")
def hf_config(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return read_hf_config(tiny_qwen2(tmp_path_factory.mktemp("model")))


CONFIG = RolloutConfig(prompts_per_step=4, max_response_tokens=100, max_concurrent_samples=3)
TOKEN = 2 * 4 * 2 * 16 * 4  # key and value x 4 layers x 2 key/value heads x head size 16 x 4 bytes


def test_all_samples_fit_at_full_length(hf_config: dict) -> None:
    # 200 tokens are two of a CPU's blocks of 128; one block more is vLLM's own.
    assert kv_cache_bytes(CONFIG, 200, hf_config) == (3 * 2 + 1) * 128 * TOKEN
    assert kv_cache_bytes(CONFIG, 256, hf_config) == (3 * 2 + 1) * 128 * TOKEN
    assert kv_cache_bytes(CONFIG, 257, hf_config) == (3 * 3 + 1) * 128 * TOKEN


def test_ranks_share_heads_and_bfloat16_is_half(hf_config: dict) -> None:
    whole = kv_cache_bytes(CONFIG, 200, hf_config)
    assert kv_cache_bytes(replace(CONFIG, tensor_parallel=2), 200, hf_config) == whole // 2
    assert kv_cache_bytes(replace(CONFIG, tensor_parallel=4), 200, hf_config) == whole // 2, "a head can't be cut, it is repeated"
    assert kv_cache_bytes(replace(CONFIG, dtype="bfloat16"), 200, hf_config) == whole // 2


def test_the_recipe_decides(hf_config: dict) -> None:
    assert kv_cache_bytes(replace(CONFIG, kv_cache_mib=7), 10**6, hf_config) == 7 << 20
