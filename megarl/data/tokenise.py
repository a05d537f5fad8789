"""Messages to token ids, with the chat template of the tokenizer, within a length."""

from __future__ import annotations

from typing import Any, Protocol

import jinja2

from megarl.data.parquet import PromptRecord
from megarl.errors import ConfigError, DataError, ModelError, explain

TRUNCATIONS = ("error", "left", "right", "drop")


class ChatTokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


def check_limits(max_prompt_tokens: int, truncation: str) -> None:
    """Raise ConfigError for an unknown truncation or a limit below 1."""
    if truncation not in TRUNCATIONS:
        raise ConfigError(explain("unknown truncation", where="data.truncation", got=repr(truncation), expected=" | ".join(TRUNCATIONS)))
    if max_prompt_tokens < 1:
        raise ConfigError(explain("no room for a prompt", where="data.max_prompt_tokens", got=max_prompt_tokens, expected="1 or more"))


def apply_template(tokenizer: ChatTokenizer, record: PromptRecord) -> tuple[list[int], str]:
    """Token ids and text of the prompt, the opening of the assistant's turn included.

    Raises:
        DataError: the template refuses the messages, the tokenizer has none, or the prompt has no token.
        ModelError: the template is none.
    """
    try:
        # return_dict=False: transformers 5 gives a BatchEncoding by default.
        tokens = tokenizer.apply_chat_template(record.messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        text = tokenizer.apply_chat_template(record.messages, add_generation_prompt=True, tokenize=False)
    except jinja2.TemplateSyntaxError as error:  # an unknown filter too
        raise ModelError(
            explain(
                "the chat template of the tokenizer is no template",
                where="chat_template.jinja, or chat_template in tokenizer_config.json",
                got=f"line {error.lineno}: {error.message}",
                do="mend it, or copy it from the model's source again",
            )
        ) from error
    except (jinja2.TemplateError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise DataError(
            explain(
                "the chat template failed",
                where=record.where,
                got=f"{type(error).__name__}: {error}",
                do="use a tokenizer with a chat template that knows these roles",
            )
        ) from error
    if not tokens:
        do = "look at the chat template and the row"
        raise DataError(explain("a prompt without tokens", where=record.where, got=repr(text), expected="1 token or more", do=do))
    return list(tokens), text


def check_vocabulary(tokens: list[int], vocabulary: int, where: str) -> None:
    """Raise ModelError for a token id that a model of ``vocabulary`` ids has no embedding of."""
    outside = [token for token in tokens if not 0 <= token < vocabulary]
    if outside:
        raise ModelError(
            explain(
                "the tokenizer gives an id that the model doesn't know",
                where=where,
                got=f"id {outside[0]}",
                expected=f"0 to {vocabulary - 1} (vocab_size {vocabulary} of config.json)",
                do="take tokenizer and weights from one model, or enlarge its embedding (resize_token_embeddings of transformers)",
            )
        )


def fit_prompt(tokens: list[int], max_tokens: int, truncation: str, where: str) -> list[int] | None:
    """``tokens`` cut to ``max_tokens``; None when the prompt is to be dropped.

    ``left`` cuts at the left and keeps the end, ``right`` keeps the beginning.

    Raises:
        DataError: too long under ``error``.
    """
    if len(tokens) <= max_tokens:
        return tokens
    if truncation == "drop":
        return None
    if truncation == "left":
        return tokens[-max_tokens:]
    if truncation == "right":
        return tokens[:max_tokens]
    raise DataError(
        explain(
            "prompt too long",
            where=where,
            got=f"{len(tokens)} tokens after the chat template",
            expected=f"at most {max_tokens} (data.max_prompt_tokens)",
            do="raise data.max_prompt_tokens, or set data.truncation to drop, left or right",
        )
    )
