"""Conversations in OpenAssistant's form (oasst1): one row a message, trees by parent, made into prompts with a best reply.

Each message of a prompter that an assistant answered is one prompt: the messages from the root to it. Its reply is the answer of lowest
rank; answers without a rank come after those with one, and of equals the first in the file counts. A deleted message takes all that was
said below it along. Rows may stand in any order, but a conversation lies in one file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

from megarl.errors import DataError, explain

COLUMNS = ("message_id", "parent_id", "text", "role")
OPTIONAL_COLUMNS = ("lang", "rank", "deleted")
DATA_SOURCE = "oasst1"

ROLES = {"prompter": "user", "assistant": "assistant"}  # theirs -> that of chat templates


@dataclass(frozen=True)
class Exchange:
    """One prompt and its best reply."""

    row: int  # of the prompt's last message, from 0
    messages: list[dict[str, str]]  # {role, content}, root first
    reply: str
    message_id: str  # of the prompt's last message
    tree_id: str  # message_id of the root
    lang: str | None  # of the prompt's last message


@dataclass(frozen=True, slots=True)
class _Message:
    row: int
    message_id: str
    parent_id: str | None
    text: str
    role: str
    lang: str | None
    rank: float  # inf: none
    deleted: bool

    def where(self, file: str) -> str:
        return f"{file}, row {self.row}, message_id {self.message_id}"


def is_oasst(columns: Collection[str]) -> bool:
    """True for the columns of a file in this form."""
    return set(COLUMNS) <= set(columns) and "reward_model" not in columns


def missing_columns(columns: Collection[str]) -> tuple[str, ...]:
    """What a file that is meant in this form, as its ids of messages show, lacks of it; empty for any other file."""
    if not {"message_id", "parent_id"} & set(columns) or "reward_model" in columns:
        return ()
    return tuple(name for name in COLUMNS if name not in columns)


def read_exchanges(rows: Iterable[Mapping[str, Any]], file: str, lang: str | None = None) -> Iterator[Exchange]:
    """The prompts of one file, in the order of their last messages' rows.

    Args:
        rows: all rows of the file; its columns are :data:`COLUMNS` and any of :data:`OPTIONAL_COLUMNS`.
        file: for messages of errors.
        lang: keep prompts whose last message is of this language alone.

    Raises DataError that names file, row and message_id: an unknown role, a parent that is not in the file, a circle of parents, an
    id that comes twice, two messages of one side in a row, a conversation that an assistant opens, or a message without text.
    """
    messages = _index(rows, file)
    replies = _replies(messages, file)
    kept = _kept(messages, replies, file)
    for message in messages.values():
        answers = [reply for reply in replies.get(message.message_id, ()) if reply.message_id in kept]
        if message.role != "prompter" or message.message_id not in kept or not answers or lang not in (None, message.lang):
            continue
        path = _path(message, messages)
        best = min(answers, key=lambda answer: answer.rank)  # of equals the first, which is the first in the file
        said = [{"role": ROLES[m.role], "content": m.text} for m in path]
        yield Exchange(message.row, said, best.text, message.message_id, path[0].message_id, message.lang)


def _index(rows: Iterable[Mapping[str, Any]], file: str) -> dict[str, _Message]:
    """message_id -> message, in the order of the file."""
    found: dict[str, _Message] = {}
    for row, values in enumerate(rows):
        message = _message(values, row, file)
        earlier = found.setdefault(message.message_id, message)
        if earlier is not message:
            do = "leave one of the two out"
            raise DataError(explain("a message_id that comes twice", where=message.where(file), got=f"also in row {earlier.row}", do=do))
    return found


def _message(values: Mapping[str, Any], row: int, file: str) -> _Message:
    where = f"{file}, row {row}, message_id {values['message_id']}"

    def wrong(column: str, expected: str) -> DataError:
        return DataError(explain(f"a message with a wrong {column}", where=where, got=repr(values.get(column))[:80], expected=expected))

    for column in ("message_id", "parent_id", "lang"):
        value = values.get(column)
        if not isinstance(value, str) and (value is not None or column == "message_id"):
            raise wrong(column, "a string" if column == "message_id" else "a string, or null")
    deleted = values.get("deleted")
    if not isinstance(deleted, bool) and deleted is not None:
        raise wrong("deleted", "true, false or null")
    if not deleted and not isinstance(values["text"], str):
        raise wrong("text", "a string")
    if not deleted and values["role"] not in ROLES:
        raise wrong("role", " | ".join(ROLES))
    rank = values.get("rank")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int | float)):
        raise wrong("rank", "a number, or null")
    return _Message(
        row,
        values["message_id"],
        values["parent_id"],
        values["text"] or "",
        values["role"] or "",
        values.get("lang"),
        inf if rank is None or isnan(rank) else rank,  # pandas writes a missing number as NaN
        bool(deleted),
    )


def _replies(messages: Mapping[str, _Message], file: str) -> dict[str, list[_Message]]:
    """message_id -> messages that answer it, in the order of the file; every message has a parent in it, or is a root."""
    found: dict[str, list[_Message]] = {}
    for message in messages.values():
        if message.parent_id is None:
            continue
        if message.parent_id not in messages:
            raise DataError(
                explain(
                    "a message whose parent is not in the file",
                    where=message.where(file),
                    got=f"parent_id {message.parent_id}",
                    expected="a message_id of this file, or null for the first message of a conversation",
                    do="keep whole conversations together when a file is split or filtered",
                )
            )
        found.setdefault(message.parent_id, []).append(message)
    return found


def _kept(messages: Mapping[str, _Message], replies: Mapping[str, list[_Message]], file: str) -> set[str]:
    """Ids of the messages that are not deleted, nor below one that is. Without recursion: conversations may be long."""
    kept: set[str] = set()
    seen: set[str] = set()
    waiting = [message for message in messages.values() if message.parent_id is None]
    while waiting:
        message = waiting.pop()
        seen.add(message.message_id)
        if not message.deleted and (message.parent_id is None or message.parent_id in kept):
            _check_turn(message, messages, file)
            kept.add(message.message_id)
        waiting += replies.get(message.message_id, ())
    if len(seen) < len(messages):
        raise _circle(next(message for key, message in messages.items() if key not in seen), messages, file)
    return kept


def _check_turn(message: _Message, messages: Mapping[str, _Message], file: str) -> None:
    """Raise DataError unless prompter and assistant take turns, the prompter first."""
    before = None if message.parent_id is None else messages[message.parent_id]
    if message.role == ("prompter" if before is None or before.role == "assistant" else "assistant"):
        return
    what = f"two messages of the {message.role} in a row" if before else "a conversation that the assistant opens"
    got = f"role {message.role}" + (f", as its parent in row {before.row}" if before else " and no parent")
    raise DataError(explain(what, where=message.where(file), got=got, expected="prompter first, then in turns"))


def _circle(message: _Message, messages: Mapping[str, _Message], file: str) -> DataError:
    """The error for a message from which no way leads to a root."""
    passed: dict[str, None] = {}
    while message.message_id not in passed:
        passed[message.message_id] = None
        message = messages[message.parent_id or ""]
    circle = list(passed)[list(passed).index(message.message_id) :]
    got = " -> ".join([*circle[:5], "..." if len(circle) > 5 else message.message_id])
    return DataError(explain("messages that are each other's parents", where=message.where(file), got=got, expected="trees"))


def _path(message: _Message, messages: Mapping[str, _Message]) -> list[_Message]:
    """From the root to ``message``."""
    path = [message]
    while path[-1].parent_id is not None:
        path.append(messages[path[-1].parent_id])
    return path[::-1]
