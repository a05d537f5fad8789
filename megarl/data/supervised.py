"""Supervised pairs for the warm start: the prompt, and the ground truth as the response, in one file read by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from megarl.data.arrow_file import ArrowRows, write_rows
from megarl.data.parquet import PromptRecord, read_records
from megarl.data.prompts import in_batches
from megarl.data.tokenise import ChatTokenizer, apply_template, check_limits, check_vocabulary, fit_prompt
from megarl.errors import DataError, ModelError, explain
from megarl.types import Ragged

KIND = "megarl supervised pairs 1"
SCHEMA = pa.schema([("prompts", pa.list_(pa.int32())), ("responses", pa.list_(pa.int32()))])


class PairTokenizer(ChatTokenizer, Protocol):
    """What is used of a transformers tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def prepare_supervised(
    files: Sequence[str],
    tokenizer: PairTokenizer,
    out_path: str | Path,
    *,
    prompt_key: str,
    max_prompt_tokens: int,
    max_response_tokens: int,
    vocabulary: int | None = None,
) -> int:
    """Write the pairs of ``files`` (parquet, verl's schema) to one Arrow file; returns their number.

    The response is the text of ``reward_model.ground_truth``, encoded without special tokens, and the end-of-sequence token.
    Overlong pairs are errors: a cut answer would teach the model to stop in the middle. ``vocabulary``: ids of the model, if known.

    Raises:
        ConfigError: a missing file or a limit below 1.
        DataError: a malformed row, a ground truth that is no text, an overlong prompt or response, or no row.
        ModelError: the tokenizer has no end-of-sequence token, or gives an id outside the vocabulary.
    """
    check_limits(max_prompt_tokens, "error")
    if tokenizer.eos_token_id is None:
        raise ModelError(explain("the tokenizer has no end-of-sequence token", where="warm start", do="set eos_token in its config"))

    def pairs() -> Iterator[dict[str, Any]]:
        empty = True
        for record in read_records(files, prompt_key):
            tokens, _ = apply_template(tokenizer, record)
            prompt = fit_prompt(tokens, max_prompt_tokens, "error", record.where)
            response = _response(tokenizer, record, max_response_tokens)
            if vocabulary is not None:
                check_vocabulary([*tokens, *response], vocabulary, record.where)
            yield {"prompts": prompt, "responses": response}
            empty = False
        if empty:
            raise DataError(explain("no supervised pair", where=", ".join(str(f) for f in files), got="0 rows", expected="at least one"))

    return write_rows(out_path, KIND, SCHEMA, in_batches(pairs()))


def _response(tokenizer: PairTokenizer, record: PromptRecord, max_tokens: int) -> list[int]:
    if not isinstance(record.ground_truth, str):
        raise DataError(
            explain(
                "the answer is no text",
                where=record.where,
                got=repr(record.ground_truth)[:80],
                expected="a string in reward_model.ground_truth",
            )
        )
    tokens = [*tokenizer.encode(record.ground_truth, add_special_tokens=False), tokenizer.eos_token_id]
    if len(tokens) > max_tokens:
        raise DataError(
            explain(
                "answer too long",
                where=record.where,
                got=f"{len(tokens)} tokens, end of sequence included",
                expected=f"at most {max_tokens} (rollout.max_response_tokens)",
                do="raise rollout.max_response_tokens, or leave the row out",
            )
        )
    return tokens


class SupervisedPairs:
    """The file of :func:`prepare_supervised`, read by row.

    Raises:
        DataError: no such file, or a file of another kind; a row outside the file.
    """

    def __init__(self, path: str | Path):
        self._rows = ArrowRows(path, KIND)

    @classmethod
    def open(cls, path: str | Path) -> SupervisedPairs:
        """Map the file at ``path``."""
        return cls(path)

    def __len__(self) -> int:
        return len(self._rows)

    def prompts(self, rows: Sequence[int]) -> Ragged:
        """Prompt token ids, int32."""
        return self._rows.ragged("prompts", rows)

    def responses(self, rows: Sequence[int]) -> Ragged:
        """Response token ids, int32, the end-of-sequence token included."""
        return self._rows.ragged("responses", rows)

    def lengths(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of prompts and of responses, each [len(rows)] int64."""
        return self.prompts(rows).lengths, self.responses(rows).lengths


@dataclass(frozen=True)
class SupervisedHandle:
    """Some pairs as a shard: the columns ``prompts`` and ``responses``. Only the path and the rows travel."""

    path: str
    rows: tuple[int, ...]

    def fetch(self) -> dict[str, Ragged]:
        """Read the rows from the file, which is mapped once per process."""
        pairs = _opened(self.path)
        return {"prompts": pairs.prompts(self.rows), "responses": pairs.responses(self.rows)}


@cache
def _opened(path: str) -> SupervisedPairs:
    return SupervisedPairs.open(path)
