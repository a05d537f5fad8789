"""Log-probs mean the same in vLLM and in Megatron at any temperature; what top-k and top-p change, and what stop tokens do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config.sampling_checks import MIN_TEMPERATURE
from megarl.megatron.engine import Engine, MicroBatch
from megarl.megatron.model import Role
from megarl.types import Layout, Ragged
from megarl.weights.families import read_hf_config
from tests.megatron.ranks import run_ranks
from tests.rollout.sampling_session import CUTS, TEMPERATURES, settings
from tests.rollout.session import MAX_RESPONSE, STOPS, prompts_and_requests
from tests.rollout.test_engine import make_models

# The fixture starts an engine, 15 s alone and a minute on a loaded machine.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

GAP = 1e-4  # nats, fp32 on both sides


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("sampling"), tied=True)


@pytest.fixture(scope="module")
def drawn(model: Path) -> dict[str, dict[str, Any]]:
    """Settings by name -> responses, rollout log-probs (float32) and truncation, of the same prompts and seeds."""
    log = model / "sampling.log"
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.rollout.sampling_session", "sampling", str(model), "1"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        line = next((line for line in process.stdout if line.startswith("FOUND ")), None)
        assert line is not None, log.read_text()[-4000:]
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = json.loads(line.removeprefix("FOUND "))
    for one in found.values():
        one["log_probs"] = [np.asarray(bits, dtype=np.int32).view(np.float32) for bits in one["log_prob_bits"]]
    return found


def score(rank: Any, model: Path, batches: dict[str, tuple[float, MicroBatch]]) -> dict[str, np.ndarray]:
    """Log-probs of each batch at its temperature, by a Megatron engine; empty on ranks that aren't the last stage."""
    engine = Engine(read_hf_config(model / "first"), rank, Role(head="lm", trainable=False, dtype="float32"))
    engine.load_hf(model / "first")
    scored = {name: engine.forward([batch], temperature=t) for name, (t, batch) in batches.items()}
    return {name: result["log_probs"][0] for name, result in scored.items() if result}


@pytest.fixture(scope="module")
def trained(model: Path, drawn: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    """The same tokens' log-probs in Megatron, two tensor-parallel ranks and two stages, at the temperature of their sampling alone."""
    prompts, _ = prompts_and_requests()
    batches = {
        name: (settings()[name].temperature, MicroBatch(prompts, Ragged.from_list(found["responses"], np.int32), {}))
        for name, found in drawn.items()
    }
    ranks = run_ranks(Layout(tensor=2, pipeline=2), score, model, batches)
    return next(result for result in reversed(ranks) if result)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_both_sides_say_the_same_at_any_temperature(drawn: dict, trained: dict, temperature: float) -> None:
    ours, theirs = trained[str(temperature)], np.concatenate(drawn[str(temperature)]["log_probs"])
    gap = float(np.abs(ours - theirs).max())
    print(f"temperature {temperature}: largest difference {gap:.2g} nats over {len(ours)} tokens")
    assert gap < GAP
    assert theirs.std() > 0.01  # not all the same


def test_temperatures_differ_in_what_they_draw_and_in_its_log_probs(drawn: dict) -> None:
    means = [np.concatenate(drawn[str(t)]["log_probs"]).mean() for t in TEMPERATURES]
    assert means == sorted(means, reverse=True) and means[0] - means[-1] > 0.5


def test_the_lowest_temperature_that_is_accepted_is_the_lowest_that_vllm_obeys(drawn: dict, trained: dict) -> None:
    """Below it vLLM draws as at it, without an error, and the trainer would re-score at another temperature."""
    lowest, below = drawn[str(MIN_TEMPERATURE)], drawn["0.005"]
    assert below["responses"] == lowest["responses"] and below["log_prob_bits"] == lowest["log_prob_bits"]
    assert np.abs(trained[str(MIN_TEMPERATURE)] - np.concatenate(lowest["log_probs"])).max() < GAP / MIN_TEMPERATURE
    assert np.abs(trained["0.005"] - np.concatenate(below["log_probs"])).max() > 0.1


def cut_log_probs(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Log-probs [T, V] of the distribution that is left: the ``top_k`` likeliest, then the fewest of them that hold ``top_p``."""
    values, order = logits.sort(dim=-1, descending=True)
    kept = torch.ones_like(values, dtype=torch.bool)
    if top_k > 0:
        kept[:, top_k:] = False
    mass = values.masked_fill(~kept, -torch.inf).softmax(-1)
    kept &= mass.cumsum(-1) - mass < top_p
    kept[:, 0] = True
    cut = values.masked_fill(~kept, -torch.inf).log_softmax(-1)
    return torch.empty_like(cut).scatter_(-1, order, cut)


@pytest.mark.parametrize("name", CUTS)
def test_under_top_k_and_top_p_the_engines_log_probs_are_those_of_the_cut_distribution(
    model: Path, drawn: dict, trained: dict, name: str
) -> None:
    """Never -inf for a token that was drawn; and never below the trainer's, which are those of the full distribution."""
    prompts, _ = prompts_and_requests()
    temperature, top_p, top_k = CUTS[name]
    hf = AutoModelForCausalLM.from_pretrained(model / "first", dtype=torch.float32).eval()
    for i, response in enumerate(drawn[name]["responses"]):
        tokens = torch.tensor([*prompts[i].tolist(), *response])
        with torch.no_grad():
            logits = hf(tokens[None]).logits[0][len(prompts[i]) - 1 : -1] / temperature
        expected = cut_log_probs(logits, top_p, top_k).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(drawn[name]["log_probs"][i], expected, atol=GAP)
    theirs = np.concatenate(drawn[name]["log_probs"])
    assert np.isfinite(theirs).all()
    cut_off = theirs - trained[name]
    assert (cut_off > -GAP).all() and cut_off.max() > 0.1


def test_a_stop_token_is_the_last_of_its_response_and_no_truncation(drawn: dict) -> None:
    """Its log-prob is among those compared above: both sides count it."""
    for found in drawn.values():
        for response, log_probs, truncated in zip(found["responses"], found["log_probs"], found["truncated"], strict=True):
            assert len(log_probs) == len(response) and not set(response[:-1]) & set(STOPS)
            assert truncated == (response[-1] not in STOPS)
            assert len(response) == MAX_RESPONSE or not truncated
    assert any(not t for t in drawn["1.0"]["truncated"]) and any(drawn["1.0"]["truncated"])
