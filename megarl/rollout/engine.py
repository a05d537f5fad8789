"""One vLLM engine: weights come in by sync only, token ids go in and out, each request has its own seed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.schema import RolloutConfig
from megarl.device import on_gpu
from megarl.errors import ConfigError, DivergedError, SyncError, explain
from megarl.profiling import Recorded, Window
from megarl.rollout.environment import prepare_environment
from megarl.rollout.start import start_vllm
from megarl.types import GenerationRequest, Ragged, SamplingSettings
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.plan import GenerationRank, ReshardPlan
from megarl.weights.regions import Copy, Region

_NO_VERSION = -1


@dataclass(frozen=True)
class Generated:
    """Responses in the order of their requests."""

    responses: Ragged  # int32; the stop token, where one was drawn, is the last
    log_probs: Ragged  # float32; of each response token under the distribution it was drawn from (temperature, top-p and top-k applied)
    truncated: np.ndarray  # [B] bool, ended by the length limit


@dataclass(frozen=True)
class SyncReport:
    """One hand-over of weights to one engine."""

    version: int
    bytes: int  # over all ranks of the engine
    seconds: float  # the whole window, as the caller sees it
    stages: dict[str, float]  # stage -> seconds of its slowest rank


class RolloutEngine:
    """vLLM in this process (its tensor-parallel ranks in child processes). It serves nothing until its first sync."""

    def __init__(self, model_dir: str | Path, config: RolloutConfig, max_prompt_tokens: int, seed: int, *, shares_device: bool = False):
        """Start the engine. ``model_dir`` gives the shapes alone: weights are random until :meth:`sync`.

        ``shares_device``: others compute on its device too, so that it can :meth:`sleep`.
        Raises ModelError when the model's family isn't supported, before anything is started.
        """
        hf_config = read_hf_config(model_dir)
        model_family(hf_config).hf_tensors(hf_config)
        prepare_environment()
        self.config = config
        self.max_prompt_tokens = max_prompt_tokens
        self.version = _NO_VERSION  # of the weights in use
        self._frees_memory = shares_device and on_gpu()  # vLLM can't do so on a CPU, whose memory is nobody's share
        self._sleeping: set[str] = set()  # of vLLM's kinds of memory
        self._llm = start_vllm(str(model_dir), config, max_prompt_tokens, seed, hf_config, can_sleep=self._frees_memory)

    def layout(self) -> list[GenerationRank]:
        """For each tensor-parallel rank, what it copies out of Hugging Face tensors, recorded from vLLM's own loader."""
        answers = _results(self._llm.collective_rpc("megarl_layout"))
        return [
            GenerationRank(rank, found["device"], tuple(Copy(Region(*source), Region(*target)) for source, target in found["copies"]))
            for rank, found in enumerate(answers)
        ]

    def sleep(self) -> float:
        """Give the device's memory back (CUDA graphs and communicators stay); the weights are gone until the next sync. Returns seconds."""
        began = time.monotonic()
        self.version = _NO_VERSION
        if self._frees_memory and not self._sleeping:
            self._llm.sleep(level=2)
            self._sleeping = {"weights", "kv_cache"}
        return time.monotonic() - began

    def sync(self, plan: ReshardPlan, manifests: Mapping[int, Mapping[str, Any]], version: int, check: bool) -> SyncReport:
        """Take over the training ranks' weights as ``version``; an engine that sleeps wakes.

        Args:
            plan: from :func:`megarl.weights.plan.plan_reshard`, with this engine's tensor-parallel ranks as generation ranks.
            manifests: training rank -> manifest of its parameters (:mod:`megarl.weights.shared`, :mod:`megarl.weights.cuda_ipc`).
            check: compare every slice with its source, byte for byte, after copying.

        Raises SyncError; the engine then refuses to generate until a sync succeeds. One that slept stays as far awake as it came.
        """
        if version <= _NO_VERSION:
            raise SyncError(explain("not a version of weights", got=version, expected="0 or more"))
        began = time.monotonic()
        self.version = _NO_VERSION  # half-written weights must not serve
        plain = {rank: [(s.source_rank, tuple(s.source), tuple(s.target)) for s in slices] for rank, slices in plan.slices.items()}
        wake_weights = self._wake("weights")
        reports = _results(self._llm.collective_rpc("megarl_sync", args=(plain, dict(manifests), check)))
        # Last, so that the trainer's weights and the cache need not fit beside each other.
        wake_cache = self._wake("kv_cache")
        if not self._llm.reset_prefix_cache():
            raise SyncError(explain("requests are in flight during a sync", do="wait for generate() to return"))
        self.version = version
        stages = {stage: max(report[stage] for report in reports) for stage in reports[0] if stage != "bytes"}
        stages |= {"wake_weights": wake_weights, "wake_cache": wake_cache}
        return SyncReport(version, int(sum(report["bytes"] for report in reports)), time.monotonic() - began, stages)

    def _wake(self, tag: str) -> float:
        """Take memory for vLLM's "weights" or "kv_cache" again, with nothing in it. Returns seconds."""
        began = time.monotonic()
        if tag in self._sleeping:
            self._llm.wake_up(tags=[tag])
            self._sleeping.remove(tag)
        return time.monotonic() - began

    def generate(self, requests: Sequence[GenerationRequest], prompts: Ragged, sampling: SamplingSettings) -> Generated:
        """Draw one response a request.

        Args:
            requests: B requests; ``seed`` decides the draw. On a CPU the result depends on nothing else, not even on batching.
            prompts: B prompts (int32 token ids), that of request i at position i.
            sampling: settings of all; a response ends with the first of ``stop_token_ids``.

        Raises SyncError before the first sync, ConfigError for a prompt or response longer than the engine was started for,
        DivergedError when a log-prob is not finite.
        """
        self._check(requests, prompts, sampling)
        inputs = [{"prompt_token_ids": prompts[i].tolist()} for i in range(len(prompts))]
        params = [sampling_params(sampling, request.seed) for request in requests]
        outputs = [output.outputs[0] for output in self._llm.generate(inputs, params, use_tqdm=False)]
        return collect(outputs)

    def start_profile(self, window: Window) -> None:
        """Have ranks that are processes of their own record themselves; one rank is recorded with the caller's process."""
        if self.config.tensor_parallel > 1:
            self._llm.collective_rpc("megarl_start_profile", args=(asdict(window),))

    def stop_profile(self) -> Recorded:
        """Have them write what they recorded."""
        found = Recorded()
        if self.config.tensor_parallel > 1:
            for one in self._llm.collective_rpc("megarl_stop_profile"):
                found.files += one["files"]
                found.failures += one["failures"]
        return found

    def _check(self, requests: Sequence[GenerationRequest], prompts: Ragged, sampling: SamplingSettings) -> None:
        if self.version == _NO_VERSION:
            raise SyncError(explain("the engine holds no weights yet", where="generate", do="sync it first"))
        if len(requests) != len(prompts):
            raise ConfigError(explain("requests and prompts differ in number", got=f"{len(requests)} and {len(prompts)}"))
        longest = int(prompts.lengths.max(initial=0))
        if longest > self.max_prompt_tokens or sampling.max_response_tokens > self.config.max_response_tokens:
            raise ConfigError(
                explain(
                    "longer than the engine was started for",
                    where="generate",
                    got=f"a prompt of {longest} tokens, responses of up to {sampling.max_response_tokens}",
                    expected=f"at most {self.max_prompt_tokens} and {self.config.max_response_tokens}",
                    do="raise data.max_prompt_tokens or rollout.max_response_tokens",
                )
            )

    def close(self) -> None:
        """Stop the engine and its child processes."""
        self._llm.llm_engine.engine_core.shutdown()
        self.version = _NO_VERSION


def _results(answers: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What all ranks answered. Raises SyncError with the message of the first that failed."""
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise SyncError(f"generation rank {rank}: {answer['error']}")
    return [answer["result"] for answer in answers]


def sampling_params(sampling: SamplingSettings, seed: int) -> Any:
    """vLLM's form of the settings. Stop tokens are those given and no others: ``ignore_eos`` leaves the model's own out."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_response_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        seed=seed,
        logprobs=0,  # of the drawn token alone
        detokenize=False,
    )


def collect(outputs: Sequence[Any]) -> Generated:
    """vLLM's completions as ragged arrays. Raises DivergedError when a log-prob is not finite."""
    tokens = [output.token_ids for output in outputs]
    log_probs = [[step[token].logprob for step, token in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]
    drawn = Generated(
        responses=Ragged.from_list(tokens, np.int32),
        log_probs=Ragged.from_list(log_probs, np.float32),
        truncated=np.array([output.finish_reason == "length" for output in outputs], dtype=bool),
    )
    if not np.isfinite(drawn.log_probs.values).all():
        raise DivergedError(explain("a log-prob of the generation engine is not finite", do="look at the last updates of the actor"))
    return drawn
