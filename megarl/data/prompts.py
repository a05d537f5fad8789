"""Prompts, tokenised once before the run into one file that every worker maps and reads by row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from megarl.data.arrow_file import ArrowRows, write_rows
from megarl.data.parquet import ROWS_PER_READ, PromptRecord, read_records, to_json
from megarl.data.tokenise import ChatTokenizer, apply_template, check_limits, check_vocabulary, fit_prompt
from megarl.errors import DataError, explain
from megarl.types import Ragged

KIND = "megarl prepared prompts 1"
SCHEMA = pa.schema(
    [
        ("tokens", pa.list_(pa.int32())),
        ("text", pa.string()),  # before truncation
        ("data_source", pa.string()),
        ("ground_truth", pa.string()),  # JSON
        ("extra_info", pa.string()),  # JSON object
        ("extra_columns", pa.string()),  # JSON object
        ("source", pa.string()),  # "file, row n" in the user's data
    ]
)


@dataclass(frozen=True)
class PreparedSummary:
    """What became of the rows."""

    path: str
    rows: int  # rows in the file
    dropped: int  # overlong prompts left out (truncation: drop)
    truncated: int  # overlong prompts cut (truncation: left, right)
    max_tokens: int  # longest prompt in the file
    total_tokens: int


def prepare_prompts(
    files: Sequence[str],
    tokenizer: ChatTokenizer,
    out_path: str | Path,
    *,
    prompt_key: str,
    max_prompt_tokens: int,
    truncation: str,
    vocabulary: int | None = None,
) -> PreparedSummary:
    """Tokenise the prompts of ``files`` (parquet, verl's schema) into one Arrow file at ``out_path``.

    Args:
        files: parquet files, read in order.
        tokenizer: anything with transformers' ``apply_chat_template``.
        out_path: written aside and renamed when whole.
        prompt_key: column of messages.
        max_prompt_tokens: limit after the chat template.
        truncation: overlong prompt: error | left | right | drop.
        vocabulary: ids of the model (its vocab_size); None: not checked.

    Raises:
        ConfigError: a missing file, or a limit or truncation out of range.
        DataError: missing columns, a malformed row, an overlong prompt under ``error``, a failing template, or no row left.
        ModelError: a token id outside the vocabulary, or a template that is none.
    """
    check_limits(max_prompt_tokens, truncation)
    lengths: list[int] = []
    counts = {"dropped": 0, "truncated": 0}

    def kept_rows() -> Iterator[dict[str, Any]]:
        for record in read_records(files, prompt_key):
            tokens, text = apply_template(tokenizer, record)
            fitted = fit_prompt(tokens, max_prompt_tokens, truncation, record.where)
            if fitted is None:
                counts["dropped"] += 1
                continue
            if vocabulary is not None:
                check_vocabulary(fitted, vocabulary, record.where)
            counts["truncated"] += len(fitted) < len(tokens)
            lengths.append(len(fitted))
            yield {"tokens": fitted, "text": text, **_described(record)}
        if not lengths:
            raise DataError(
                explain(
                    "no prompt left",
                    where=", ".join(str(f) for f in files),
                    got=f"0 rows, {counts['dropped']} dropped for more than {max_prompt_tokens} tokens",
                    expected="at least one",
                    do="check the files, or raise data.max_prompt_tokens",
                )
            )

    rows = write_rows(out_path, KIND, SCHEMA, in_batches(kept_rows()))
    return PreparedSummary(str(out_path), rows, counts["dropped"], counts["truncated"], max(lengths), sum(lengths))


def in_batches(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, list[Any]]]:
    """Rows gathered into columns, a thousand rows each."""
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == ROWS_PER_READ:
            yield _columns(batch)
            batch = []
    if batch:
        yield _columns(batch)


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _described(record: PromptRecord) -> dict[str, str]:
    return {
        "data_source": record.data_source,
        "ground_truth": to_json(record.ground_truth, f"{record.where}, ground_truth"),
        "extra_info": to_json(record.extra_info, f"{record.where}, extra_info"),
        "extra_columns": to_json(record.extra_columns, f"{record.where}, columns {', '.join(record.extra_columns)}"),
        "source": record.where,
    }


class PreparedPrompts:
    """The file of :func:`prepare_prompts`, read by row.

    Raises:
        DataError: no such file, or a file of another kind; a row outside the file.
    """

    def __init__(self, path: str | Path):
        self._rows = ArrowRows(path, KIND)

    @classmethod
    def open(cls, path: str | Path) -> PreparedPrompts:
        """Map the file at ``path``."""
        return cls(path)

    def __len__(self) -> int:
        return len(self._rows)

    def tokens(self, rows: Sequence[int]) -> Ragged:
        """Prompt token ids, int32."""
        return self._rows.ragged("tokens", rows)

    def text(self, row: int) -> str:
        """The prompt as the chat template renders it, before truncation."""
        return self._rows.values("text", [row])[0]

    def reward_inputs(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """What a reward function is told of each prompt: ``data_source``, ``ground_truth``, ``extra_info``."""
        return [
            {"data_source": source, "ground_truth": json.loads(truth), "extra_info": json.loads(extra)}
            for source, truth, extra in zip(
                self._rows.values("data_source", rows),
                self._rows.values("ground_truth", rows),
                self._rows.values("extra_info", rows),
                strict=True,
            )
        ]

    def extra_columns(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The columns of the user's file that are not part of the schema."""
        return [json.loads(value) for value in self._rows.values("extra_columns", rows)]

    def source(self, row: int) -> str:
        """Where the row stands in the user's files."""
        return self._rows.values("source", [row])[0]
