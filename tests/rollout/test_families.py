"""An engine of each family: weights that came as slices, log-probs as transformers computes them from those weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.rollout.session import SAMPLING, prompts_and_requests
from tests.rollout.test_engine import session
from tests.weights.families import save_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

# Heads of 32, the smallest that vLLM has on a CPU.
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "mistral": {"head_dim": 32},
    "phi3": {"hidden_size": 128},
    "gemma2": {"head_dim": 32},
    "gemma3": {"head_dim": 32},
}


def two_models(name: str, directory: Path, **changes: Any) -> Path:
    for seed, which in enumerate(("first", "second")):
        save_model(name, directory / which, seed=seed, eos_token_id=None, bos_token_id=None, **changes)
    return directory


@pytest.mark.parametrize("name", CHANGES)
def test_log_probs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    with session("short", two_models(name, tmp_path, **CHANGES[name]), 1) as found:
        drawn = found["drawn"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "second", dtype=torch.float32, attn_implementation="eager")
    prompts, requests = prompts_and_requests()
    gaps = []
    for i in range(len(requests)):
        response = drawn["responses"][i]
        tokens = torch.tensor([*prompts[i].tolist(), *response])[None]
        with torch.no_grad():
            rows = model(tokens).logits[0, len(prompts[i]) - 1 : -1] / SAMPLING.temperature
        theirs = rows.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()
        gaps.append(np.abs(np.array(drawn["log_prob_bits"][i], dtype=np.int32).view(np.float32) - theirs).max())
    assert max(gaps) < 5e-5


def test_a_family_without_a_model_of_vllms_own_is_refused(tmp_path: Path) -> None:
    with session("short", two_models("seed_oss", tmp_path, head_dim=32), 1) as found:
        assert "no model of its own" in found["error"]
