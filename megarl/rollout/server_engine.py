"""vLLM's asynchronous engine with a tokenizer at each end: texts or messages in, texts out."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megarl.data.parquet import PromptRecord
from megarl.data.tokenise import apply_template
from megarl.errors import DataError, ModelError, WorkerError, explain
from megarl.rollout.environment import prepare_environment
from megarl.rollout.server_requests import MAX_SEED, GenerateRequest, Prompt, RequestError
from megarl.rollout.server_settings import ServedModel, ServerSettings
from megarl.types import SamplingSettings

_END_S = 1.0  # it holds nothing worth saving, and takes many seconds over an orderly exit
_BATCHED_TOKENS_GPU = 16384  # of one forward pass, as in megarl.rollout.start


@dataclass(frozen=True)
class Answer:
    """The response to one prompt."""

    text: str  # without special tokens
    tokens: int  # drawn, the stop token included
    finish_reason: str  # stop | length


def load_tokenizer(directory: str, model: ServedModel) -> Any:
    """The tokenizer of a local directory. Raises ModelError when it can't be loaded or has ids that the model doesn't know."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(explain("the tokenizer can't be loaded", where=directory, got=error, do="copy the directory again")) from error
    if len(tokenizer) > model.vocabulary:
        raise ModelError(
            explain(
                "the tokenizer has token ids that the model doesn't know",
                where=f"--tokenizer_name_or_path {directory}",
                got=f"{len(tokenizer)} ids",
                expected=f"at most {model.vocabulary}, as many as the model's vocab_size",
                do="name the tokenizer that the model was trained with",
            )
        )
    return tokenizer


def start_engine(settings: ServerSettings, model: ServedModel, sockets: str) -> Any:
    """vLLM's AsyncLLM, which computes in a child process. To be called inside the event loop that will use it.

    ``sockets``: a directory for those over which the two processes talk.
    Raises WorkerError when the engine can't start; vLLM's own account of why is in the log.
    """
    prepare_environment()
    os.environ["VLLM_RPC_BASE_PATH"] = sockets
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about choices that are made here on purpose
    if settings.device.startswith("cuda:"):
        _show_only(int(settings.device.removeprefix("cuda:")))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        # Not into a local variable: the import leaves this frame behind, and with it all that it holds.
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(settings, model)))
    except (RuntimeError, ValueError, OSError) as error:
        raise WorkerError(
            explain("vLLM's engine did not start", where=settings.model_dir, got=error, do="read the lines above: vLLM says why there")
        ) from error


def engine_arguments(settings: ServerSettings, model: ServedModel) -> dict[str, Any]:
    """vLLM's arguments. Token ids go in and out; the tokenizer is this process's."""
    common = {
        "model": settings.model_dir,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the model's own temperature and stop tokens
        "dtype": model.dtype,
        "max_model_len": settings.max_tokens,
        "max_num_seqs": settings.max_concurrent,
        "kv_cache_memory_bytes": model.kv_cache_bytes,
        "block_size": settings.block_size or None,
        "disable_log_stats": True,
        "worker_extension_cls": "megarl.rollout.server_watch.EndsWithParent",
    }
    if settings.device != "cpu":
        # vLLM refuses to start where so large a share of the GPU isn't free; the cache's size is given.
        return common | {"max_num_batched_tokens": max(_BATCHED_TOKENS_GPU, settings.max_tokens), "gpu_memory_utilization": 0.02}
    return common | {
        "enforce_eager": True,
        "enable_chunked_prefill": False,  # a seeded request whose prefill is chunked kills vLLM's CPU engine
        "max_num_batched_tokens": settings.max_tokens * settings.max_concurrent,
    }


def _show_only(index: int) -> None:
    """Hide all GPUs but one from vLLM, whose processes take the first that they see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)


def _stopped() -> RequestError:
    return RequestError(503, explain("generation was broken off: the server is stopping", where="POST /generate"))


class ServerEngine:
    """Answers checked requests; those of all clients share the engine's batches."""

    def __init__(self, llm: Any, tokenizer: Any, settings: ServerSettings, model: ServedModel):
        self.settings = settings
        self.vocabulary = model.vocabulary
        stops = model.stop_token_ids or tuple(i for i in (tokenizer.eos_token_id,) if i is not None)
        self.defaults = SamplingSettings(settings.temperature, settings.top_p, settings.top_k, settings.max_new_tokens, stops)
        self._llm = llm
        self._tokenizer = tokenizer
        self._ids = itertools.count()
        self._running: set[asyncio.Future[list[Any]]] = set()
        self._stopping = False
        # One thread: a long prompt must not hold up the event loop, and a tokenizer may not be used by two threads at once.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    @property
    def dead(self) -> bool:
        """True once vLLM's process has failed; nothing brings it back."""
        return self._llm.errored

    async def bind_to_parent(self) -> None:
        """Make vLLM's process end with this one, however this one ends."""
        await self._llm.collective_rpc("megarl_end_with_parent")

    async def generate(self, request: GenerateRequest) -> tuple[list[Answer], int]:
        """One answer a prompt, in order, and the seed they were drawn with: prompt i has seed + i.

        On a CPU an answer depends on prompt, settings and seed alone. On a GPU neighbours in the batch change the rounding of
        logits, and so, rarely, a token.

        Raises RequestError for a prompt that can't be used (400), or when the engine fails or stops (503).
        """
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._thread, self.encode, request.prompts)
        seed = next(s for s in (request.seed, self.settings.seed, secrets.randbelow(2**31)) if s is not None)
        drawn = [self._draw(tokens, request.sampling, (seed + i) % (MAX_SEED + 1)) for i, tokens in enumerate(prompts)]
        outputs = await self._finish(asyncio.gather(*drawn))
        texts = await loop.run_in_executor(self._thread, self._decode, [output.token_ids for output in outputs])
        return [Answer(text, len(o.token_ids), o.finish_reason) for text, o in zip(texts, outputs, strict=True)], seed

    async def _finish(self, drawn: asyncio.Future[list[Any]]) -> list[Any]:
        """What ``drawn`` gives, unless :meth:`break_off` comes first."""
        self._running.add(drawn)
        try:
            return await drawn
        except asyncio.CancelledError as error:
            if self._stopping:
                raise _stopped() from error
            raise
        finally:
            self._running.discard(drawn)

    def break_off(self) -> None:
        """End all generation; its requests are answered with 503."""
        self._stopping = True
        for drawn in self._running:
            drawn.cancel()

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of each prompt. Raises RequestError for one that has none or too many, or that the chat template refuses."""
        return [self._encode(prompt, i) for i, prompt in enumerate(prompts)]

    def _encode(self, prompt: Prompt, index: int) -> list[int]:
        if isinstance(prompt, str):
            tokens = list(self._tokenizer.encode(prompt))
        else:
            record = PromptRecord("prompts", index, prompt, "", None, {}, {})
            try:
                tokens, _ = apply_template(self._tokenizer, record)
            except (DataError, ModelError) as error:
                raise RequestError(400, str(error)) from error
        limit = self.settings.max_prompt_tokens
        if not 1 <= len(tokens) <= limit:
            what = f"prompts[{index}] is too long" if tokens else f"prompts[{index}] has no token"
            expected = f"from 1 to {limit} (--max_prompt_length of the server)"
            raise RequestError(400, explain(what, where="POST /generate", got=f"{len(tokens)} tokens", expected=expected))
        return tokens

    async def _draw(self, tokens: list[int], sampling: SamplingSettings, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_response_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # the stop tokens are those given and no others
            seed=seed,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = f"generate-{next(self._ids)}"
        try:
            outputs = [output async for output in self._llm.generate({"prompt_token_ids": tokens}, params, name)]
        except (EngineDeadError, EngineGenerateError) as error:
            raise RequestError(503, explain("the engine failed", where="POST /generate", got=error, do="read the server's log")) from error
        if not outputs or outputs[-1].outputs[0].finish_reason not in ("stop", "length"):
            raise _stopped()
        return outputs[-1].outputs[0]

    def _decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        return [self._tokenizer.decode(list(tokens), skip_special_tokens=True) for tokens in responses]

    def close(self) -> None:
        """End the engine's process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._llm.shutdown(timeout=_END_S)
        del self._llm  # so that its finalizer runs while the interpreter is whole
