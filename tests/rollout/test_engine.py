"""Weights that arrived as slices are, bit for bit, weights loaded from disk; and draws depend on seed and weights alone."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.weights.families import read_hf_config
from tests.megatron.models import random_qwen2
from tests.rollout.session import MAX_RESPONSE, SAMPLING, STOPS, VOCAB, prompts_and_requests
from tests.weights import reference

# A fixture starts up to three engines, each 15 s alone and a minute on a loaded machine.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

DRAWN = ("responses", "log_prob_bits", "truncated")


def make_models(directory: Path, *, tied: bool) -> Path:
    """Two models of one shape, "first" and "second", with weights large enough that a wrong one shows."""
    for seed, name in enumerate(("first", "second")):
        random_qwen2(directory / name, vocab=VOCAB, hidden=128, ffn=192, spread=0.1, tied=tied, seed=seed)
    return directory


@contextmanager
def session(kind: str, directory: Path, tensor: int) -> Iterator[dict]:
    """What a session found; afterwards it is killed, as a crash would, with all its children, unless it ends by itself."""
    log = directory / f"{kind}.log"
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.rollout.session", kind, str(directory), str(tensor)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        line = next((line for line in process.stdout if line.startswith("FOUND ")), None)
        assert line is not None, log.read_text()[-4000:]
        yield json.loads(line.removeprefix("FOUND "))
        if (kind, tensor) != ("sync", 1):
            process.wait(60)  # killed together with its resource tracker, an engine of two ranks would leave shared memory behind
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """TP2 x PP2 training ranks, tied embeddings, into one rank; killed while generating, then replaced by vLLM on its own."""
    directory = make_models(tmp_path_factory.mktemp("tied"), tied=True)
    with session("sync", directory, 1) as found:
        pass
    with session("fresh", directory, 1) as fresh:  # another process: the requests of the killed engine are sent again
        return found | {"fresh": fresh, "directory": directory}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The same with an output layer of its own, into two ranks."""
    directory = make_models(tmp_path_factory.mktemp("untied"), tied=False)
    with session("sync", directory, 2) as found:
        return found | {"directory": directory}


@pytest.fixture(params=["one_rank", "two_ranks"])
def found(request: pytest.FixtureRequest) -> dict:
    return request.getfixturevalue(request.param)


def same(a: dict, b: dict) -> bool:
    return all(a[key] == b[key] for key in DRAWN)


def test_an_engine_without_weights_refuses(found: dict) -> None:
    assert "holds no weights yet" in found["before_sync"]


def test_every_parameter_is_the_references_after_each_sync(found: dict) -> None:
    ranks = len(found["first"]["digests"])
    for name in ("first", "second"):
        c = read_hf_config(found["directory"] / name) | {"head_dim": 32}
        hf = load_file(found["directory"] / name / "model.safetensors")
        for rank in range(ranks):
            expected = {
                key: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
                for key, value in reference.vllm(c, hf, ranks, rank).items()
            }
            assert found[name]["digests"][rank] == expected


def test_outputs_are_those_of_a_fresh_vllm_after_a_kill(one_rank: dict) -> None:
    """Weights by sync or from disk, one process or the next: the same requests draw the same bits."""
    assert same(one_rank["second"], one_rank["fresh"])
    assert not same(one_rank["first"], one_rank["second"])


def test_log_probs_are_those_of_transformers(found: dict) -> None:
    """At the sampling temperature; stop tokens count."""
    prompts, _ = prompts_and_requests()
    for name in ("first", "second"):
        model = AutoModelForCausalLM.from_pretrained(found["directory"] / name, dtype=torch.float32).eval()
        for i, response in enumerate(found[name]["responses"]):
            tokens = torch.tensor([*prompts[i].tolist(), *response])
            with torch.no_grad():
                logits = model(tokens[None]).logits[0] / SAMPLING.temperature
            expected = logits.log_softmax(-1)[len(prompts[i]) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
            got = torch.from_numpy(np.asarray(found[name]["log_prob_bits"][i], dtype=np.int32).view(np.float32))
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_a_draw_does_not_depend_on_its_neighbours(found: dict) -> None:
    assert same(found["second"], found["staggered"])
    assert len(found["alone"]) == 8
    for i, alone in found["alone"].items():
        assert all(alone[key][0] == found["second"][key][int(i)] for key in DRAWN)


def test_responses_end_with_a_stop_token_or_at_the_limit(found: dict) -> None:
    drawn = found["second"]
    assert 0 < sum(drawn["truncated"]) < len(drawn["truncated"])
    for response, truncated in zip(drawn["responses"], drawn["truncated"], strict=True):
        assert not set(response[:-1]) & set(STOPS)
        assert len(response) == MAX_RESPONSE if truncated else response[-1] in STOPS


def test_prompts_of_one_text_and_two_seeds_differ(found: dict) -> None:
    responses = found["second"]["responses"]
    assert sum(responses[i] != responses[i + 12] for i in range(12)) >= 10


def test_a_failed_sync_leaves_the_engine_without_weights_until_the_next(found: dict) -> None:
    assert "not those of the manifest" in found["gone"]
    assert "holds no weights yet" in found["after_failure"]
    assert same(found["recovered"], found["second"])


def test_a_prompt_longer_than_planned_is_refused(found: dict) -> None:
    assert "a prompt of 25 tokens" in found["too_long"]


def test_each_engine_receives_its_parameters_bytes_and_no_more(one_rank: dict, two_ranks: dict) -> None:
    for found in (one_rank, two_ranks):
        ranks = len(found["first"]["digests"])
        directory = found["directory"] / "first"
        c, hf = read_hf_config(directory) | {"head_dim": 32}, load_file(directory / "model.safetensors")
        held = sum(tensor.nbytes for rank in range(ranks) for tensor in reference.vllm(c, hf, ranks, rank).values())
        embeddings = 1 if c["tie_word_embeddings"] else 2
        padding = embeddings * (64 - VOCAB) * 128 * 4
        assert found["second"]["bytes"] == held - padding
