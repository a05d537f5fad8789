"""One vLLM engine: weights come in by sync only, token ids go in and out, each request has its own seed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.schema import RolloutConfig
from megarl.device import on_gpu
from megarl.errors import ConfigError, DivergedError, SyncError, explain
from megarl.rollout.environment import prepare_environment
from megarl.types import GenerationRequest, Ragged, SamplingSettings
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.plan import ReshardPlan
from megarl.weights.regions import Copy, Region

_BATCHED_TOKENS = 2048  # prompt tokens of one prefill pass: enough to fill it from many short prompts
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

    def __init__(self, model_dir: str | Path, config: RolloutConfig, max_prompt_tokens: int, seed: int):
        """Start the engine. ``model_dir`` gives the shapes alone: weights are random until :meth:`sync`.

        Raises ModelError when the model's family isn't supported, before anything is started.
        """
        model_family(hf_config := read_hf_config(model_dir)).hf_tensors(hf_config)
        prepare_environment()
        self.config = config
        self.max_prompt_tokens = max_prompt_tokens
        self.version = _NO_VERSION  # of the weights in use
        self._llm = _start_vllm(str(model_dir), config, max_prompt_tokens, seed)

    def layout(self) -> list[tuple[Copy, ...]]:
        """For each tensor-parallel rank, what it copies out of Hugging Face tensors, recorded from vLLM's own loader."""
        ranks = _results(self._llm.collective_rpc("megarl_layout"))
        return [tuple(Copy(Region(*source), Region(*target)) for source, target in copies) for copies in ranks]

    def sync(self, plan: ReshardPlan, manifests: Mapping[int, Mapping[str, Any]], version: int, check: bool) -> SyncReport:
        """Take over the training ranks' weights as ``version``.

        Args:
            plan: from :func:`megarl.weights.plan.plan_reshard`, with this engine's tensor-parallel ranks as generation ranks.
            manifests: training rank -> manifest of its :class:`~megarl.weights.shared.SharedParameters`.
            check: compare every slice with its source, byte for byte, after copying.

        Raises SyncError; the engine then refuses to generate until a sync succeeds.
        """
        if version <= _NO_VERSION:
            raise SyncError(explain("not a version of weights", got=version, expected="0 or more"))
        began = time.monotonic()
        self.version = _NO_VERSION  # half-written weights must not serve
        plain = {rank: [(s.source_rank, tuple(s.source), tuple(s.target)) for s in slices] for rank, slices in plan.slices.items()}
        reports = _results(self._llm.collective_rpc("megarl_sync", args=(plain, dict(manifests), check)))
        if not self._llm.reset_prefix_cache():
            raise SyncError(explain("requests are in flight during a sync", do="wait for generate() to return"))
        self.version = version
        stages = {stage: max(report[stage] for report in reports) for stage in reports[0] if stage != "bytes"}
        return SyncReport(version, int(sum(report["bytes"] for report in reports)), time.monotonic() - began, stages)

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


def _start_vllm(model_dir: str, config: RolloutConfig, max_prompt_tokens: int, seed: int) -> Any:
    """vLLM's engine, set up so that only a sync gives it weights."""
    from vllm import LLM

    max_tokens = max_prompt_tokens + config.max_response_tokens
    on_cpu: dict[str, Any] = {
        "enable_chunked_prefill": False,  # a seeded request whose prefill is chunked kills vLLM's CPU engine
        "kv_cache_memory_bytes": config.kv_cache_mib << 20,
    }
    return LLM(
        model=model_dir,
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",  # not the model's own temperature and stop tokens
        dtype=config.dtype,
        tensor_parallel_size=config.tensor_parallel,
        distributed_executor_backend="mp" if config.tensor_parallel > 1 else "uni",
        max_model_len=max_tokens,
        max_num_batched_tokens=max(max_tokens, min(_BATCHED_TOKENS, max_tokens * config.max_concurrent_samples)),
        max_num_seqs=config.max_concurrent_samples,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",  # after temperature, as the trainer computes them
        seed=seed,
        worker_extension_cls="megarl.rollout.receiver.WeightReceiver",
        **({} if on_gpu() else on_cpu),
    )
