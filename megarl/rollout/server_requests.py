"""What a request to the rollout server may say, checked field by field before anything is generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.config.load import nearest
from megarl.errors import MegarlError, explain
from megarl.types import SamplingSettings

MAX_BODY_BYTES = 8 << 20
MAX_PROMPTS = 1024  # of one request; what is beyond the concurrent sequences waits in vLLM
MAX_SEED = 2**63 - 1  # torch's generators take an int64
MAX_TEMPERATURE = 2.0  # vLLM refuses more

Prompt = str | list[dict[str, str]]

FIELDS = ("prompts", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids")


class RequestError(MegarlError):
    """A request that is refused; ``status`` is the HTTP status of the answer."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class GenerateRequest:
    """One checked request."""

    prompts: list[Prompt]  # a string is taken as it is, a list of messages goes through the chat template
    sampling: SamplingSettings
    seed: int | None  # None: the request names none


def parse_request(body: bytes, defaults: SamplingSettings, vocabulary: int) -> GenerateRequest:
    """The request in ``body``, JSON. What it leaves out comes from ``defaults``, whose length limit is also the highest allowed.

    Raises RequestError: 400 for anything malformed or out of range, 413 for too many prompts.
    """
    values = _object(body)
    for name in values:
        if name not in FIELDS:
            near = nearest(name, FIELDS)
            do = f"did you mean {near}?" if near else "leave it out"
            raise _bad(f"unknown field '{name}'"[:200], expected=", ".join(FIELDS), do=do)
    limit = defaults.max_response_tokens
    sampling = SamplingSettings(
        temperature=float(_number(values, "temperature", defaults.temperature, TEMPERATURE)),
        top_p=float(_number(values, "top_p", defaults.top_p, TOP_P)),
        top_k=_whole(values, "top_k", defaults.top_k, TOP_K),
        max_response_tokens=_whole(
            values, "max_new_tokens", limit, (lambda x: 1 <= x <= limit, f"from 1 to {limit} (--max_new_tokens of the server)")
        ),
        stop_token_ids=_stops(values, defaults.stop_token_ids, vocabulary),
    )
    seed = _whole(values, "seed", 0, SEED) if values.get("seed") is not None else None
    return GenerateRequest(_prompts(values), sampling, seed)


Range = tuple[Callable[[Any], bool], str]
TEMPERATURE: Range = (lambda x: 0 <= x <= MAX_TEMPERATURE, f"from 0 (greedy) to {MAX_TEMPERATURE:g}")
TOP_P: Range = (lambda x: 0 < x <= 1, "more than 0, at most 1")
TOP_K: Range = (lambda x: x == -1 or 1 <= x < 2**31, "-1 (all tokens), or 1 or more")
SEED: Range = (lambda x: 0 <= x <= MAX_SEED, f"from 0 to {MAX_SEED}")


def _bad(what: str, *, got: object = None, expected: object = None, do: str = "") -> RequestError:
    return RequestError(400, explain(what, where="POST /generate", got=got, expected=expected, do=do))


def _object(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _bad("the request is no JSON", got=str(error)[:200], expected='{"prompts": ["..."]}') from error
    if not isinstance(values, dict):
        raise _bad("the request is no JSON object", got=type(values).__name__, expected='{"prompts": ["..."]}')
    return values


def _number(values: dict[str, Any], name: str, default: float, allowed: Range) -> Any:
    value = values.get(name)
    if value is None:
        return default
    holds, expected = allowed
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):  # a NaN holds in no range
        raise _bad(f"{name} is out of range", got=_short(value), expected=expected)
    return value


def _whole(values: dict[str, Any], name: str, default: int, allowed: Range) -> int:
    value = _number(values, name, default, allowed)
    if not isinstance(value, int):
        raise _bad(f"{name} is no whole number", got=_short(value), expected=allowed[1])
    return value


def _stops(values: dict[str, Any], default: tuple[int, ...], vocabulary: int) -> tuple[int, ...]:
    stops = values.get("stop_token_ids")
    if stops is None:
        return default
    sound = isinstance(stops, list) and all(isinstance(s, int) and not isinstance(s, bool) and 0 <= s < vocabulary for s in stops)
    if not sound:
        raise _bad("stop_token_ids are no token ids", got=_short(stops), expected=f"a list of numbers from 0 to {vocabulary - 1}")
    return tuple(stops)


def _prompts(values: dict[str, Any]) -> list[Prompt]:
    prompts = values.get("prompts")
    if not isinstance(prompts, list) or not prompts:
        raise _bad("no prompts", got=_short(prompts), expected='a non-empty list, as in {"prompts": ["..."]}')
    if len(prompts) > MAX_PROMPTS:
        message = explain("too many prompts in one request", where="POST /generate", got=len(prompts), expected=f"at most {MAX_PROMPTS}")
        raise RequestError(413, message)
    return [_prompt(prompt, i) for i, prompt in enumerate(prompts)]


def _prompt(prompt: Any, index: int) -> Prompt:
    if isinstance(prompt, str):
        return _text(prompt, index)
    if not isinstance(prompt, list) or not prompt or not all(_is_message(message) for message in prompt):
        raise _bad(
            f"prompts[{index}] is neither text nor messages",
            got=_short(prompt),
            expected='a string, or a non-empty list of {"role": "user", "content": "..."}',
        )
    return [{"role": _text(message["role"], index), "content": _text(message["content"], index)} for message in prompt]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.keys() == {"role", "content"} and all(isinstance(v, str) for v in message.values())


def _text(text: str, index: int) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can escape and no tokenizer can read
        raise _bad(f"prompts[{index}] is no Unicode text", got=error.reason, expected="whole characters") from error
    return text


def _short(value: Any) -> str:
    return ascii(value)[:80] if not isinstance(value, int) or abs(value) <= MAX_SEED else "a number of too many digits"
