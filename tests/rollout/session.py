"""One vLLM engine in a process of its own, put through many checks; prints its findings as one line of JSON.

    python -m tests.rollout.session sync    DIR TENSOR  two syncs, from TP2 x PP2 training shards, into an engine of TENSOR ranks;
                                                        with one rank then generates until it is killed
    python -m tests.rollout.session short   DIR TENSOR  one sync and one generation, or the error that came of it
    python -m tests.rollout.session fresh   DIR TENSOR  the same generation by an engine that loaded its weights from disk

vLLM can't be started twice in one process, and an engine costs 10 to 40 s: hence one process per engine and many checks in each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.config.schema import RolloutConfig
from megarl.errors import MegarlError
from megarl.rollout.engine import RolloutEngine, collect, sampling_params
from megarl.rollout.environment import prepare_environment
from megarl.types import GenerationRequest, Layout, Ragged, Rank, SamplingSettings
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.hf_io import load_into
from megarl.weights.plan import RankShard, ReshardPlan, plan_reshard
from megarl.weights.shared import SharedParameters

VOCAB, MAX_PROMPT, MAX_RESPONSE = 61, 24, 12
STOPS = (5, 11)
SAMPLING = SamplingSettings(temperature=0.8, max_response_tokens=MAX_RESPONSE, stop_token_ids=STOPS)
TRAINING = Layout(tensor=2, pipeline=2)


def prompts_and_requests() -> tuple[Ragged, list[GenerationRequest]]:
    """24 prompts of 1 to 24 tokens, some twice, each with its own seed."""
    rng = np.random.default_rng(7)
    rows = [rng.integers(0, VOCAB, size=n) for n in (1, 24, 3, 3, 17, 8, 2, 24, 5, 11, 1, 16)]
    rows += rows
    return Ragged.from_list(rows, np.int32), [GenerationRequest(i, i, 1000 + 7 * i) for i in range(len(rows))]


class TrainingSide:
    """What the training ranks share, emulated: each rank's shards cut from a Hugging Face directory, in shared memory."""

    def __init__(self, model: Path):
        hf_config = read_hf_config(model)
        family = model_family(hf_config)
        self.ranks = [RankShard(i, 0, family.shard(hf_config, Rank(i, TRAINING))) for i in range(TRAINING.world_size)]
        self.memory = [SharedParameters.create({n: (s.shape, torch.float32) for n, s in r.shards.items()}) for r in self.ranks]
        self.load(model)

    def load(self, model: Path) -> None:
        for rank, memory in zip(self.ranks, self.memory, strict=True):
            load_into(memory.tensors, rank.shards, model)

    def manifests(self) -> dict[int, dict]:
        return {rank.rank: memory.manifest() for rank, memory in zip(self.ranks, self.memory, strict=True)}


def start(model: Path, tensor: int) -> RolloutEngine:
    config = RolloutConfig(
        tensor_parallel=tensor, prompts_per_step=12, max_response_tokens=MAX_RESPONSE, kv_cache_mib=16, max_concurrent_samples=8
    )
    return RolloutEngine(model, config, MAX_PROMPT, seed=0)


def bits(drawn: Any) -> dict:
    """Everything that was drawn, exactly."""
    responses = [drawn.responses[i].tolist() for i in range(len(drawn.responses))]
    log_probs = [drawn.log_probs[i].view(np.int32).tolist() for i in range(len(drawn.log_probs))]
    return {"responses": responses, "log_prob_bits": log_probs, "truncated": drawn.truncated.tolist()}


def one_by_one(engine: RolloutEngine) -> dict:
    """Every third request alone, last one first; by position."""
    prompts, requests = prompts_and_requests()
    return {str(i): bits(engine.generate([requests[i]], prompts.take([i]), SAMPLING)) for i in reversed(range(0, len(requests), 3))}


def staggered(engine: RolloutEngine) -> dict:
    """Requests that arrive while others are being answered, two steps apart."""
    prompts, requests = prompts_and_requests()
    core = engine._llm.llm_engine
    done: dict[int, Any] = {}
    waiting = list(range(len(requests)))
    while waiting or core.has_unfinished_requests():
        for i in waiting[:3]:
            core.add_request(f"staggered-{i}", {"prompt_token_ids": prompts[i].tolist()}, sampling_params(SAMPLING, requests[i].seed))
        waiting = waiting[3:]
        for output in [*core.step(), *core.step()]:
            if output.finished:
                done[int(output.request_id.split("-")[1])] = output.outputs[0]
    return bits(collect([done[i] for i in range(len(requests))]))


def error_of(action: Any) -> str:
    """The message of the error that ``action`` ends in; empty when it doesn't."""
    try:
        action()
    except MegarlError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def plan_into(engine: RolloutEngine, training: TrainingSide) -> ReshardPlan:
    """The plan, once through JSON."""
    return ReshardPlan.from_json(plan_reshard(training.ranks, engine.layout(), bytes_per_element=4).to_json())


def run_sync(directory: Path, tensor: int) -> None:
    prompts, requests = prompts_and_requests()
    training = TrainingSide(directory / "first")
    engine = start(directory / "first", tensor)
    found: dict[str, Any] = {"before_sync": error_of(lambda: engine.generate(requests, prompts, SAMPLING))}
    plan = plan_into(engine, training)
    for version, name in enumerate(("first", "second")):
        training.load(directory / name)
        report = engine.sync(plan, training.manifests(), version, check=True)
        found[name] = bits(engine.generate(requests, prompts, SAMPLING))
        found[name] |= {"digests": digests(engine), "bytes": report.bytes, "stages": report.stages, "version": engine.version}
    found["alone"] = one_by_one(engine)
    found["staggered"] = staggered(engine)
    too_long = Ragged.from_list([[1] * (MAX_PROMPT + 1)], np.int32)
    found["too_long"] = error_of(lambda: engine.generate(requests[:1], too_long, SAMPLING))
    stale = training.manifests()
    stale[0] = stale[0] | {"inode": 1}
    found["gone"] = error_of(lambda: engine.sync(plan, stale, 2, check=False))
    found["after_failure"] = error_of(lambda: engine.generate(requests, prompts, SAMPLING))
    engine.sync(plan, training.manifests(), 3, check=False)
    found["recovered"] = bits(engine.generate(requests, prompts, SAMPLING))
    tell(found)
    while tensor == 1:  # to be killed in the middle
        engine.generate(requests, prompts, SAMPLING)
    engine.close()


def run_short(directory: Path, tensor: int) -> None:
    prompts, requests = prompts_and_requests()
    training = TrainingSide(directory / "second")
    try:
        engine = start(directory / "first", tensor)
        engine.sync(plan_into(engine, training), training.manifests(), 0, check=True)
        tell({"drawn": bits(engine.generate(requests, prompts, SAMPLING))})
        engine.close()
    except MegarlError as error:
        tell({"error": str(error)})


def run_fresh(directory: Path, tensor: int) -> None:
    """vLLM as its users start it, weights from disk; only layout of arguments and sampling settings are ours."""
    prepare_environment()
    from vllm import LLM

    prompts, requests = prompts_and_requests()
    llm = LLM(
        model=str(directory / "second"),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="float32",
        tensor_parallel_size=tensor,
        max_model_len=MAX_PROMPT + MAX_RESPONSE,
        enable_chunked_prefill=False,
        enforce_eager=True,
        kv_cache_memory_bytes=16 << 20,
        logprobs_mode="processed_logprobs",
    )
    inputs = [{"prompt_token_ids": prompts[i].tolist()} for i in range(len(prompts))]
    outputs = llm.generate(inputs, [sampling_params(SAMPLING, request.seed) for request in requests], use_tqdm=False)
    tell(bits(collect([output.outputs[0] for output in outputs])))


def digests(engine: RolloutEngine) -> list[dict[str, str]]:
    """Of each rank's parameters."""
    return engine._llm.collective_rpc("megarl_digests")


def tell(found: dict) -> None:
    print("\nFOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    {"sync": run_sync, "short": run_short, "fresh": run_fresh}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
