"""One vLLM engine in a process of its own, put through many checks; prints its findings as one line of JSON.

    python -m tests.rollout.session sync  DIR TENSOR    two syncs, from TP2 training shards, into an engine of TENSOR ranks
    python -m tests.rollout.session fresh MODEL TENSOR  the same generation by an engine that loaded MODEL itself

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
from megarl.types import GenerationRequest, Layout, Ragged, SamplingSettings
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.hf_io import load_into
from megarl.weights.plan import GenerationRank, RankShard, ReshardPlan, plan_reshard
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
        places = [(tp, pp) for pp in range(TRAINING.pipeline) for tp in range(TRAINING.tensor)]
        self.ranks = [RankShard(i, 0, family.shard(hf_config, TRAINING, tp, pp)) for i, (tp, pp) in enumerate(places)]
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
    """Each request alone, last one first."""
    prompts, requests = prompts_and_requests()
    singles = [engine.generate([requests[i]], prompts.take([i]), SAMPLING) for i in reversed(range(len(requests)))]
    singles.reverse()
    parts = [bits(single) for single in singles]
    return {key: [part[key][0] for part in parts] for key in parts[0]}


def staggered(engine: RolloutEngine) -> dict:
    """Requests that arrive while others are being answered, two steps apart."""
    prompts, requests = prompts_and_requests()
    core = engine._llm.llm_engine
    done: dict[str, Any] = {}
    waiting = list(range(len(requests)))
    while waiting or core.has_unfinished_requests():
        for i in waiting[:3]:
            core.add_request(f"staggered-{i}", {"prompt_token_ids": prompts[i].tolist()}, sampling_params(SAMPLING, requests[i].seed))
        waiting = waiting[3:]
        for _ in range(2):
            done |= {output.request_id.rsplit("-", 1)[0] if output.request_id.count("-") > 1 else output.request_id: output.outputs[0]
                     for output in core.step() if output.finished}  # fmt: skip
    return bits(collect([done[f"staggered-{i}"] for i in range(len(requests))]))


def error_of(action: Any) -> str:
    """The message of the error that ``action`` ends in; empty when it doesn't."""
    try:
        action()
    except MegarlError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_sync(directory: Path, tensor: int) -> dict:
    prompts, requests = prompts_and_requests()
    training = TrainingSide(directory / "first")
    engine = start(directory / "first", tensor)
    found: dict[str, Any] = {"before_sync": error_of(lambda: engine.generate(requests, prompts, SAMPLING))}
    layout = engine.layout()
    found["layout"] = layout
    plan = plan_reshard(training.ranks, [GenerationRank(r, 0, c) for r, c in enumerate(layout)], bytes_per_element=4)
    plan = ReshardPlan.from_json(plan.to_json())
    for version, name in enumerate(("first", "second")):
        training.load(directory / name)
        report = engine.sync(plan, training.manifests(), version, check=True)
        found[name] = bits(engine.generate(requests, prompts, SAMPLING))
        found[name] |= {"digests": engine._llm.collective_rpc("megarl_digests"), "bytes": report.bytes, "stages": report.stages}
    found["alone"] = one_by_one(engine)
    found["staggered"] = staggered(engine)
    found["log_probs"] = np.asarray(found["second"]["log_prob_bits"][1], dtype=np.int32).view(np.float32).tolist()
    found["too_long"] = error_of(lambda: engine.generate(requests[:1], Ragged.from_list([[1] * (MAX_PROMPT + 1)], np.int32), SAMPLING))
    gone = training.manifests() | {0: training.manifests()[0] | {"inode": 1}}
    found["gone"] = error_of(lambda: engine.sync(plan, gone, 2, check=False)) if tensor == 1 else "skipped"
    found["after_failure"] = error_of(lambda: engine.generate(requests, prompts, SAMPLING)) if tensor == 1 else "skipped"
    engine.close()
    return found


def run_fresh(model: Path, tensor: int) -> dict:
    """An engine as vLLM's users start it, weights from disk; only the sampling settings are ours."""
    from megarl.rollout.environment import prepare_environment

    prepare_environment()
    from vllm import LLM

    prompts, requests = prompts_and_requests()
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="float32",
        tensor_parallel_size=tensor,
        max_model_len=MAX_PROMPT + MAX_RESPONSE,
        enable_chunked_prefill=False,
        max_num_batched_tokens=2048,
        enforce_eager=True,
        kv_cache_memory_bytes=16 << 20,
        logprobs_mode="processed_logprobs",
        worker_extension_cls="megarl.rollout.receiver.WeightReceiver" if "digests" in sys.argv else "",
    )
    inputs = [{"prompt_token_ids": prompts[i].tolist()} for i in range(len(prompts))]
    outputs = llm.generate(inputs, [sampling_params(SAMPLING, request.seed) for request in requests], use_tqdm=False)
    found: dict[str, Any] = bits(collect([output.outputs[0] for output in outputs]))
    if "digests" in sys.argv:
        found["digests"] = llm.collective_rpc("megarl_digests")
    return found


if __name__ == "__main__":
    kind, path, tensor = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    result = run_sync(path, tensor) if kind == "sync" else run_fresh(path, tensor)
    print("\nFOUND " + json.dumps(result), flush=True)
