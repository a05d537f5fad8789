"""Which tokens end a response: the model's end of sequence, and those that the recipe adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.schema import Config
from megarl.errors import ConfigError, ModelError, explain
from megarl.weights.families import read_hf_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def stop_tokens(tokenizer: PreTrainedTokenizerBase, config: Config) -> tuple[int, ...]:
    """End-of-sequence ids (the generation configuration's, which may be several, else the tokenizer's), then the recipe's own.

    Raises ModelError for no end of sequence, for anything that is no id of the model, and for a warm start that would teach an end which
    doesn't stop generation; ConfigError for a stop text that isn't one token.
    """
    file = Path(config.model) / "generation_config.json"
    ends = _end_of_sequence(file, tokenizer.eos_token_id)
    ids = tuple(dict.fromkeys([*ends, *config.rollout.stop_token_ids, *(_one_token(tokenizer, t) for t in config.rollout.stop_tokens)]))
    vocabulary = read_hf_config(config.model).get("vocab_size")
    outside = [i for i in ids if isinstance(vocabulary, int) and i >= vocabulary]
    if outside:
        raise ModelError(
            explain(
                "a token that should end responses is outside the model's vocabulary",
                where=config.model,
                got=_shown(tokenizer, outside),
                expected=f"0 to {vocabulary - 1} (vocab_size {vocabulary} of config.json)",
                do="correct eos_token_id in generation_config.json, or eos_token in tokenizer_config.json (missing, it is a default)",
            )
        )
    if config.warm_start.enabled and tokenizer.eos_token_id not in ids:
        raise ModelError(
            explain(
                "the warm start teaches the tokenizer's end of sequence, and generation doesn't stop there",
                where=str(file),
                got=f"eos_token_id {list(ids)}; the tokenizer's is {tokenizer.eos_token_id}",
                expected="the tokenizer's among them",
                do="add it to eos_token_id in generation_config.json",
            )
        )
    return ids


def _end_of_sequence(file: Path, of_tokenizer: int | None) -> list[int]:
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    except (ValueError, AttributeError) as error:
        do = "mend it, or delete it: the tokenizer's end of sequence is taken then"
        raise ModelError(explain("generation_config.json is no JSON object", where=str(file), got=error, do=do)) from error
    found = of_tokenizer if found is None else found
    ids = found if isinstance(found, list) else [found]
    if found is None or not ids or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(
            explain(
                "no end-of-sequence token",
                where=str(file.parent),
                got=repr(found),
                expected="one token id, or several",
                do="set eos_token_id in generation_config.json",
            )
        )
    return ids


def _one_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ConfigError(
            explain(
                "a stop text that is not one token",
                where="rollout.stop_tokens",
                got=f"{text!r} is cut into {_shown(tokenizer, ids) or 'nothing'}",
                expected="exactly one token",
                do="name one of its tokens, or a token's id in rollout.stop_token_ids",
            )
        )
    if ids[0] == tokenizer.unk_token_id and text != tokenizer.unk_token:
        do = "name a text that is in it"
        raise ConfigError(
            explain("a stop text that the tokenizer doesn't know", where="rollout.stop_tokens", got=repr(text), expected="a token", do=do)
        )
    return ids[0]


def _shown(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Each token as text, and its id."""
    return ", ".join(f"{tokenizer.decode([i])!r} ({i})" for i in ids)
