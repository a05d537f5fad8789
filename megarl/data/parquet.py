"""Rows of parquet files in verl's schema or in OpenAssistant's (:mod:`megarl.data.oasst`), checked one by one.

A row has ``data_source`` (str), the prompt (list of {role, content}), ``reward_model`` {style, ground_truth} and, when it likes,
``extra_info`` and further columns, which are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.oasst import COLUMNS, DATA_SOURCE, OPTIONAL_COLUMNS, is_oasst, missing_columns, read_exchanges
from megarl.errors import ConfigError, DataError, explain

ROWS_PER_READ = 1024
_KEYS = "data.train_files, data.val_files, warm_start.train_files"


@dataclass(frozen=True)
class PromptRecord:
    """One checked row."""

    file: str
    row: int  # in the file, from 0
    messages: list[dict[str, str]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]  # {} where the file has none
    extra_columns: dict[str, Any]  # columns that megarl does not know

    @property
    def where(self) -> str:
        return f"{self.file}, row {self.row}"


def read_records(files: Sequence[str], prompt_key: str, lang: str | None = None) -> Iterator[PromptRecord]:
    """The prompts of all ``files`` in order: of verl's form one a row, a thousand rows at a time in memory; of OpenAssistant's those
    with a reply, which is the ground truth and stands in the column ``response``, one file in memory. ``lang`` selects among the latter.

    Raises:
        ConfigError: no files, or a missing one.
        DataError: no parquet, a damaged one, no rows, missing columns, or a row that is not of the schema; names file and row.
    """
    if isinstance(files, str) or not files:
        raise ConfigError(explain("no data files", got=repr(files), expected="a list of parquet files"))
    for file in files:
        parquet = _open(str(file), ("data_source", prompt_key, "reward_model"))
        if is_oasst(parquet.schema_arrow.names):
            yield from _oasst_records(parquet, str(file), lang)
            continue
        if lang is not None:
            raise ConfigError(
                explain("lang selects from files in OpenAssistant's form", where=str(file), got=f"lang {lang!r}, verl's form")
            )
        row = 0
        for batch in _batches(parquet, str(file)):
            for values in batch.to_pylist():
                yield _record(str(file), row, values, prompt_key)
                row += 1


def _oasst_records(parquet: pq.ParquetFile, file: str, lang: str | None) -> Iterator[PromptRecord]:
    columns = [name for name in (*COLUMNS, *OPTIONAL_COLUMNS) if name in parquet.schema_arrow.names]
    rows = (values for batch in _batches(parquet, file) for values in batch.select(columns).to_pylist())
    for found in read_exchanges(rows, file, lang):
        told = {"message_id": found.message_id, "message_tree_id": found.tree_id, "lang": found.lang}
        yield PromptRecord(file, found.row, found.messages, DATA_SOURCE, found.reply, told, {"response": found.reply})


def to_json(value: Any, where: str) -> str:
    """``value`` as JSON; dates become ISO strings.

    Raises:
        DataError: a value that JSON can't hold (bytes, decimals); names ``where``.
    """

    def convert(odd: Any) -> str:
        if isinstance(odd, date | datetime):
            return odd.isoformat()
        raise DataError(
            explain(
                "a value that can't be kept as JSON",
                where=where,
                got=f"{type(odd).__name__}",
                expected="numbers, strings, lists, structs, dates",
                do="convert the column, or leave it out of the file",
            )
        )

    return json.dumps(value, default=convert, ensure_ascii=False)


def _open(file: str, needed: tuple[str, ...]) -> pq.ParquetFile:
    if "://" in file:
        do = f"download it first, as in: curl -L -O {file}"
        raise ConfigError(explain("megarl reads local files alone", where=_KEYS, got=file, expected="a path", do=do))
    try:
        if Path(file).is_dir():
            do = "name the parquet files in it, each by itself"
            raise ConfigError(explain("a directory where a data file is expected", where=_KEYS, got=file, expected="a parquet file", do=do))
        if not Path(file).is_file():
            do = "paths are relative to the current directory; correct the recipe, or make the file"
            raise ConfigError(explain("data file not found", where=_KEYS, got=file, expected="an existing parquet file", do=do))
        parquet = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise DataError(explain("not a parquet file", where=file, got=error, do="write it with pandas or pyarrow")) from error
    except OSError as error:
        raise _unreadable(file, error) from error
    found = parquet.schema_arrow.names
    missing = [] if is_oasst(found) else [name for name in needed if name not in found]
    lacking = missing_columns(found)
    if missing and lacking:
        raise DataError(
            explain(
                f"missing columns of OpenAssistant's form: {', '.join(lacking)}",
                where=file,
                got=", ".join(found),
                expected=f"{', '.join(COLUMNS)} (or verl's: {', '.join(needed)})",
                do="rename the columns, or write the file anew with all of them",
            )
        )
    if missing:
        raise DataError(
            explain(
                f"missing columns: {', '.join(missing)}",
                where=file,
                got=", ".join(found),
                expected=", ".join(needed),
                do="rename the columns, or set data.prompt_key to the one that holds the messages",
            )
        )
    if parquet.metadata.num_rows == 0:
        do = "look at what wrote it, or take it out of the recipe"
        raise DataError(explain("a data file without rows", where=file, got="0 rows", expected="at least one row", do=do))
    return parquet


def _batches(parquet: pq.ParquetFile, file: str) -> Iterator[pa.RecordBatch]:
    """All rows. Raises DataError where the file is damaged behind a sound footer."""
    batches = parquet.iter_batches(batch_size=ROWS_PER_READ)
    while True:
        try:
            batch = next(batches, None)
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(file, error) from error
        if batch is None:
            return
        yield batch


def _unreadable(file: str, error: Exception) -> DataError:
    do = "mend its permissions" if isinstance(error, PermissionError) else "copy or write the file again"
    return DataError(explain("a data file can't be read", where=file, got=str(error).strip(), expected="a whole parquet file", do=do))


def _record(file: str, row: int, values: dict[str, Any], prompt_key: str) -> PromptRecord:
    where = f"{file}, row {row}"
    messages = _messages(values.pop(prompt_key), f"{where}, column {prompt_key}")
    source = values.pop("data_source")
    if not isinstance(source, str):
        do = "name where the row comes from; reward functions are told"
        raise DataError(explain("data_source is no string", where=where, got=repr(source)[:80], expected="a string", do=do))
    ground_truth = _ground_truth(values.pop("reward_model"), where)
    extra_info = values.pop("extra_info", None)
    if extra_info is not None and not isinstance(extra_info, dict):
        do = "write it as a struct column (json.loads a text), or leave it out"
        raise DataError(explain("extra_info is no struct", where=where, got=repr(extra_info)[:80], expected="a struct, or null", do=do))
    return PromptRecord(file, row, messages, source, ground_truth, extra_info or {}, values)


def _messages(prompt: Any, where: str) -> list[dict[str, str]]:
    sound = (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt)
    )
    if not sound:
        raise DataError(
            explain(
                "prompt is no list of messages",
                where=where,
                got=f"{type(prompt).__name__}: {repr(prompt)[:80]}",
                expected="a non-empty list of {role: str, content: str}",
                do="wrap a plain string as [{'role': 'user', 'content': text}]",
            )
        )
    return [{"role": m["role"], "content": m["content"]} for m in prompt]


def _ground_truth(reward_model: Any, where: str) -> Any:
    """Style "model" needs no ground truth: a reward model judges."""
    if isinstance(reward_model, dict):
        truth = reward_model.get("ground_truth")
        if truth is not None or reward_model.get("style") == "model":
            return truth
    raise DataError(
        explain(
            "row without a ground truth",
            where=f"{where}, column reward_model",
            got=repr(reward_model)[:80],
            expected="a struct {style, ground_truth}; ground_truth may be null only for style 'model'",
            do="fill it, or leave the row out",
        )
    )
