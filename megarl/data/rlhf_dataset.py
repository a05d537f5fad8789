"""A data set of prompts and, where the files have them, responses, by index: for loops that users write themselves."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.parquet import ROWS_PER_READ, PromptRecord, read_records, to_json
from megarl.data.supervised import PairTokenizer
from megarl.data.tokenise import apply_template, check_limits, fit_prompt
from megarl.errors import ConfigError, DataError, ModelError, explain

_SCHEMA = pa.schema(
    [
        ("messages", pa.string()),  # JSON
        ("response", pa.string()),  # null: the file has none
        ("data_source", pa.string()),
        ("ground_truth", pa.string()),  # JSON
        ("extra_info", pa.string()),  # JSON
        ("file", pa.dictionary(pa.int32(), pa.string())),
        ("row", pa.int64()),
    ]
)


@dataclass(frozen=True)
class _Tokens:
    """What tokenising one row gave."""

    prompt: np.ndarray  # int32
    text: str  # of the prompt, before truncation
    response: np.ndarray  # int32
    cut: tuple[bool, bool]  # prompt, response


class RLHFDataset:
    """Prompts of parquet files in verl's form or in OpenAssistant's (oasst1), recognised by their columns.

        dataset = RLHFDataset("train.parquet", tokenizer=tokenizer)
        loader = DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=RLHFDataset.collate)

    A sample is a dict:

        input_ids           list[int], at most ``max_prompt_length``: the chat template's, the opening of the assistant's turn included.
                            Not padded: megarl's batches are ragged, and a mask would hold nothing but ones
        response_input_ids  list[int], at most ``max_response_length``: the response and, where that fits whole, the end-of-sequence
                            token; [] where the file has no response
        prompt              str, as the chat template renders it, before truncation
        response            str, or None where the file has none
        data_source, ground_truth, extra_info    what reward functions are told
        source              "FILE, row N"

    All rows are read and checked at once; a row is tokenised when it is first asked for, and its tokens are kept (with ``truncation``
    "error" or "drop" all rows are tokenised at once, since their lengths decide).
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PairTokenizer,
        *,
        max_prompt_length: int = 512,
        max_response_length: int = 256,
        prompt_key: str = "prompt",
        truncation: str = "left",
        lang: str | None = None,
    ):
        """Read and check ``data_files``.

        Args:
            data_files: one parquet file or several, local. A conversation in OpenAssistant's form lies in one file.
            tokenizer: a transformers tokenizer with a chat template.
            max_prompt_length, max_response_length: tokens. Longer responses lose their end.
            prompt_key: column of messages, in verl's form. Responses are the texts of a column ``response`` there, if it has one.
            truncation: what becomes of overlong prompts: left (loses its beginning) | right (loses its end) | drop | error.
            lang: of OpenAssistant's form, only prompts whose last message is of this language, as in "en".

        Raises:
            ConfigError: a missing file, a URL, a setting out of range.
            DataError: missing columns, a malformed row or conversation, no row, an overlong prompt under ``error``, a failing template.
            ModelError: responses, and a tokenizer without an end-of-sequence token; a template that is none.
        """
        files = [str(file) for file in ([data_files] if isinstance(data_files, str | Path) else data_files)]
        check_limits(max_prompt_length, truncation)
        if max_response_length < 1:
            where = "RLHFDataset: max_response_length"
            raise ConfigError(explain("no room for a response", where=where, got=max_response_length, expected="1 or more"))
        if not hasattr(tokenizer, "apply_chat_template"):
            got, do = f"{type(tokenizer).__name__}: {str(tokenizer)[:80]}", "give AutoTokenizer.from_pretrained(DIR) of transformers"
            raise ConfigError(explain("no tokenizer", where="RLHFDataset: tokenizer", got=got, do=do))
        self.tokenizer = tokenizer
        self.max_prompt_length, self.max_response_length, self.truncation = max_prompt_length, max_response_length, truncation
        self._kept: dict[int, _Tokens] = {}
        self._rows = _read(files, prompt_key, lang)
        if self._rows.num_rows == 0:
            raise _no_prompt(files, lang)
        self._check_tokenizer()
        if truncation in ("error", "drop"):
            self._apply_policy(files)

    def __len__(self) -> int:
        return self._rows.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample; negative indices count from the end. Raises IndexError, and DataError where the chat template fails."""
        row = operator.index(index)
        if not -len(self) <= row < len(self):
            raise IndexError(f"sample {row} of {len(self)}")
        return self._sample(row % len(self))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._sample(row) for row in range(len(self)))

    @property
    def truncated(self) -> int:
        """Prompts that were cut, of the rows tokenised so far, in this process."""
        return sum(tokens.cut[0] for tokens in self._kept.values())

    @property
    def truncated_responses(self) -> int:
        """Responses that were cut, of the rows tokenised so far, in this process."""
        return sum(tokens.cut[1] for tokens in self._kept.values())

    @staticmethod
    def collate(samples: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
        """Samples as one dict of lists, for ``DataLoader(collate_fn=...)``: nothing is padded."""
        return {name: [sample[name] for sample in samples] for name in samples[0]}

    def _sample(self, row: int) -> dict[str, Any]:
        tokens = self._tokens(row)
        values = self._values(row)
        return {
            "input_ids": tokens.prompt.tolist(),
            "response_input_ids": tokens.response.tolist(),
            "prompt": tokens.text,
            "response": values["response"],
            "data_source": values["data_source"],
            "ground_truth": json.loads(values["ground_truth"]),
            "extra_info": json.loads(values["extra_info"]),
            "source": f"{values['file']}, row {values['row']}",
        }

    def _values(self, row: int) -> dict[str, Any]:
        return {name: self._rows.column(name)[row].as_py() for name in _SCHEMA.names}

    def _tokens(self, row: int) -> _Tokens:
        if row not in self._kept:
            values = self._values(row)
            record = PromptRecord(values["file"], values["row"], json.loads(values["messages"]), "", None, {}, {})
            whole, text = apply_template(self.tokenizer, record)
            policy = "right" if self.truncation == "drop" else self.truncation  # those to be dropped are cut, and then go
            prompt = fit_prompt(whole, self.max_prompt_length, policy, record.where)
            response, response_cut = self._response(values["response"])
            self._kept[row] = _Tokens(_int32(prompt or ()), text, _int32(response), (len(prompt or ()) < len(whole), response_cut))
        return self._kept[row]

    def _response(self, text: str | None) -> tuple[list[int], bool]:
        """Token ids, and whether the end is missing."""
        if text is None:
            return [], False
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        # One token too many can be the end of sequence alone: then nothing of the text is lost.
        return tokens[: self.max_response_length], len(tokens) > self.max_response_length + 1

    def _check_tokenizer(self) -> None:
        """Find out at once what would fail for every sample."""
        if self.tokenizer.eos_token_id is None and self._rows.column("response").null_count < len(self):
            raise ModelError(explain("the tokenizer has no end-of-sequence token", where="RLHFDataset", do="set tokenizer.eos_token"))
        if self.truncation not in ("error", "drop"):
            self._tokens(0)

    def _apply_policy(self, files: Sequence[str]) -> None:
        """Tokenise all rows; under ``drop`` the overlong ones go."""
        short = [row for row in range(len(self)) if not self._tokens(row).cut[0]]
        if not short:
            expected = f"a prompt of at most {self.max_prompt_length} tokens"
            raise DataError(explain("no prompt left", where=", ".join(files), got=f"{len(self)} rows, all dropped", expected=expected))
        self._kept = {new: self._kept[old] for new, old in enumerate(short)}
        self._rows = self._rows.take(short)


def _int32(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


def _read(files: Sequence[str], prompt_key: str, lang: str | None) -> pa.Table:
    """The checked rows, compact: a hundred thousand dicts would take a GiB."""
    batches: list[pa.RecordBatch] = []
    columns: dict[str, list[Any]] = {name: [] for name in _SCHEMA.names}
    for record in read_records(files, prompt_key, lang):
        for name, value in _described(record).items():
            columns[name].append(value)
        if len(columns["row"]) == ROWS_PER_READ:
            batches.append(pa.RecordBatch.from_pydict(columns, schema=_SCHEMA))
            columns = {name: [] for name in _SCHEMA.names}
    batches.append(pa.RecordBatch.from_pydict(columns, schema=_SCHEMA))
    return pa.Table.from_batches(batches, schema=_SCHEMA).unify_dictionaries().combine_chunks()


def _described(record: PromptRecord) -> dict[str, Any]:
    response = record.extra_columns.get("response")
    if response is not None and not isinstance(response, str):
        where = f"{record.where}, column response"
        raise DataError(explain("a response that is no text", where=where, got=repr(response)[:80], expected="a string, or null"))
    return {
        "messages": json.dumps(record.messages),
        "response": response,
        "data_source": record.data_source,
        "ground_truth": to_json(record.ground_truth, f"{record.where}, ground_truth"),
        "extra_info": to_json(record.extra_info, f"{record.where}, extra_info"),
        "file": record.file,
        "row": record.row,
    }


def _no_prompt(files: Sequence[str], lang: str | None) -> DataError:
    """The error for files without a prompt; where a language was asked for it names those that are there."""
    if lang is None:
        expected = "at least one; of OpenAssistant's form, a prompter's message that an assistant answered"
        return DataError(explain("no prompt in the data", where=", ".join(files), got="0 prompts", expected=expected))
    found: set[str] = set()
    for file in files:
        if "lang" in pq.read_schema(file).names:
            found |= set(pq.read_table(file, columns=["lang"]).column("lang").unique().to_pylist())
    named = sorted(str(value) for value in found if value is not None)
    expected = ", ".join(named) or ("rows that have one: lang is null in all of them" if found else "a file with a column lang")
    do = "ask for a language that is there" if named else "leave lang out: nothing is selected then"
    return DataError(explain("no prompt in this language", where=", ".join(files), got=f"lang {lang!r}", expected=expected, do=do))
