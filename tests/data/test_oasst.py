"""OpenAssistant's form: trees from rows in any order, one prompt for each answered message, and faults by row and message_id."""

from __future__ import annotations

import math
import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.oasst import Exchange, is_oasst, read_exchanges
from megarl.data.parquet import read_records
from megarl.errors import ConfigError, DataError


def said(message_id: str, parent_id: str | None, role: str, **changes: Any) -> dict[str, Any]:
    return {"message_id": message_id, "parent_id": parent_id, "text": f"text of {message_id}", "role": role, "lang": "en"} | changes


CONVERSATION = [
    said("root", None, "prompter"),
    said("worse", "root", "assistant", rank=1),
    said("best", "root", "assistant", rank=0),
    said("more", "best", "prompter", lang="es"),
    said("end", "more", "assistant", rank=None),
    said("unanswered", "worse", "prompter"),
]


def exchanges(rows: list[dict[str, Any]], lang: str | None = None) -> list[Exchange]:
    return list(read_exchanges(rows, "a.parquet", lang))


def contents(exchange: Exchange) -> list[tuple[str, str]]:
    return [(m["role"], m["content"].removeprefix("text of ")) for m in exchange.messages]


def test_each_answered_message_is_a_prompt_with_its_best_reply():
    first, second = exchanges(CONVERSATION)
    assert contents(first) == [("user", "root")]
    assert (first.reply, first.row, first.message_id, first.tree_id, first.lang) == ("text of best", 0, "root", "root", "en")
    assert contents(second) == [("user", "root"), ("assistant", "best"), ("user", "more")]
    assert (second.reply, second.row, second.tree_id, second.lang) == ("text of end", 3, "root", "es")


@pytest.mark.parametrize(
    ("ranks", "best"),
    [
        ((2, 0, 1), "b"),
        ((None, None, None), "a"),
        ((None, 5, None), "b"),
        ((math.nan, 1.0, 0.0), "c"),
        ((1, 1, 2), "a"),
        ((3, None, -1), "c"),
    ],
)
def test_lowest_rank_then_first_in_the_file(ranks, best):
    rows = [said("p", None, "prompter")] + [said(i, "p", "assistant", rank=r) for i, r in zip("abc", ranks, strict=True)]
    assert [e.reply for e in exchanges(rows)] == [f"text of {best}"]


def test_a_deleted_message_takes_its_branch_along():
    def deleted(gone: str) -> list[str]:
        rows = [row | {"deleted": row["message_id"] == gone} for row in CONVERSATION]
        rows = [row | {"text": None, "role": None} if row["deleted"] else row for row in rows]
        return [f"{e.message_id}: {e.reply}" for e in exchanges(rows)]

    assert deleted("best") == ["root: text of worse"]
    assert deleted("end") == ["root: text of best"]
    assert deleted("root") == []
    assert deleted("") == ["root: text of best", "more: text of end"]


def test_languages_select_by_the_last_message():
    assert [e.message_id for e in exchanges(CONVERSATION, "es")] == ["more"]
    assert [e.message_id for e in exchanges(CONVERSATION, "en")] == ["root"]
    assert exchanges(CONVERSATION, "de") == []


def faulty(index: int, **changes: Any) -> list[dict[str, Any]]:
    return [row | changes if i == index else row for i, row in enumerate(CONVERSATION)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (faulty(2, role="system"), r"wrong role \(in a.parquet, row 2, message_id best\)[\s\S]*'system'[\s\S]*prompter \| assistant"),
        (faulty(3, text=None), r"wrong text \(in a.parquet, row 3, message_id more\)"),
        (faulty(3, parent_id="gone"), r"parent is not in the file \(in a.parquet, row 3, message_id more\)[\s\S]*gone"),
        (faulty(3, message_id="best"), r"comes twice \(in a.parquet, row 3, message_id best\)[\s\S]*row 2"),
        (faulty(3, message_id=None), r"wrong message_id \(in a.parquet, row 3"),
        (faulty(3, parent_id=7), r"wrong parent_id \(in a.parquet, row 3"),
        (
            faulty(1, role="prompter"),
            r"two messages of the prompter in a row \(in a.parquet, row 1, message_id worse\)[\s\S]*parent in row 0",
        ),
        (faulty(3, role="assistant"), r"two messages of the assistant in a row \(in a.parquet, row 3, message_id more\)"),
        (faulty(0, role="assistant"), r"assistant opens \(in a.parquet, row 0, message_id root\)"),
        (faulty(1, rank="first"), r"wrong rank \(in a.parquet, row 1"),
        (faulty(1, deleted=1), r"wrong deleted \(in a.parquet, row 1"),
        (faulty(2, parent_id="more"), r"each other's parents[\s\S]*best -> more -> best"),
        (faulty(2, parent_id="best"), r"each other's parents \(in a.parquet, row 2, message_id best\)[\s\S]*best -> best"),
    ],
)
def test_faults_name_file_row_and_message(rows, message):
    with pytest.raises(DataError, match=message):
        exchanges(rows)


def test_a_conversation_of_any_length():
    count = 1501  # recursion would end at a thousand
    rows = [said(str(i), str(i - 1) if i else None, ("prompter", "assistant")[i % 2]) for i in range(count)]
    *_, last = read_exchanges(reversed(rows), "a.parquet")
    first = next(read_exchanges(reversed(rows), "a.parquet"))
    assert (len(first.messages), len(last.messages)) == (count - 2, 1)
    loop = [said(str(i), str((i - 1) % count), "prompter") for i in range(count)]
    with pytest.raises(DataError, match="each other's parents"):
        exchanges(loop)


@st.composite
def forests(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows of random trees, each message with a rank of its own."""
    rows: list[dict[str, Any]] = []
    for i, rank in enumerate(draw(st.permutations(range(draw(st.integers(1, 25)))))):
        parent = draw(st.none() | st.sampled_from(rows)) if rows else None
        role = "prompter" if parent is None or parent["role"] == "assistant" else "assistant"
        lang, deleted = draw(st.sampled_from(["en", "es", None])), draw(st.integers(0, 9)) == 0
        parent_id = None if parent is None else parent["message_id"]
        rows.append(said(f"m{i}", parent_id, role, rank=rank, lang=lang, deleted=deleted))
    return rows


@settings(deadline=None)
@given(forests(), st.randoms(use_true_random=False), st.sampled_from([None, "en", "es"]))
def test_the_order_of_rows_changes_nothing(rows, rng: random.Random, lang):
    def found(of: list[dict[str, Any]]) -> list[tuple]:
        return sorted((e.message_id, e.tree_id, e.reply, e.lang or "", tuple(contents(e))) for e in exchanges(of, lang))

    shuffled = list(rows)
    rng.shuffle(shuffled)
    assert found(shuffled) == found(rows)


@settings(deadline=None)
@given(forests())
def test_prompts_are_those_of_a_plain_recursion(rows):
    expected: set[tuple] = set()

    def visit(node: dict[str, Any], path: list[dict[str, Any]]) -> None:
        if node["deleted"]:
            return
        path = [*path, node]
        below = [row for row in rows if row["parent_id"] == node["message_id"]]
        answers = [row for row in below if not row["deleted"]]
        if node["role"] == "prompter" and answers:
            best = min(answers, key=lambda row: row["rank"])
            expected.add((node["message_id"], path[0]["message_id"], best["text"], tuple(p["text"] for p in path)))
        for row in below:
            visit(row, path)

    for row in rows:
        if row["parent_id"] is None:
            visit(row, [])
    got = [(e.message_id, e.tree_id, e.reply, tuple(m["content"] for m in e.messages)) for e in exchanges(rows)]
    assert set(got) == expected
    assert len(got) == len(expected)


OASST_SCHEMA = pa.schema(  # as the published files have it
    [
        *((name, pa.string()) for name in ("message_id", "parent_id", "user_id", "created_date", "text", "role", "lang")),
        ("review_count", pa.int32()),
        ("review_result", pa.bool_()),
        ("deleted", pa.bool_()),
        ("rank", pa.int32()),
        ("synthetic", pa.bool_()),
        ("model_name", pa.string()),
        ("detoxify", pa.struct([("toxicity", pa.float64()), ("insult", pa.float64())])),
        ("message_tree_id", pa.string()),
        ("tree_state", pa.string()),
        ("emojis", pa.struct([("name", pa.list_(pa.string())), ("count", pa.list_(pa.int32()))])),
        ("labels", pa.struct([("name", pa.list_(pa.string())), ("value", pa.list_(pa.float64()))])),
    ]
)


def test_a_file_with_all_published_columns_is_recognised(tmp_path):
    path = str(tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist(CONVERSATION, schema=OASST_SCHEMA), path)
    assert is_oasst(OASST_SCHEMA.names)
    first, second = read_records([path], "prompt")
    assert (first.data_source, first.ground_truth, first.where) == ("oasst1", "text of best", f"{path}, row 0")
    assert second.extra_info == {"message_id": "more", "message_tree_id": "root", "lang": "es"}
    assert second.extra_columns == {"response": "text of end"}
    assert [r.row for r in read_records([path], "prompt", "es")] == [3]


def test_both_forms_may_be_mixed_but_lang_belongs_to_one(tmp_path):
    oasst, verl = str(tmp_path / "oasst.parquet"), str(tmp_path / "verl.parquet")
    pq.write_table(pa.Table.from_pylist(CONVERSATION), oasst)
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "q"}], "reward_model": {"style": "rule", "ground_truth": "a"}}
    pq.write_table(pa.Table.from_pylist([row]), verl)
    assert [r.data_source for r in read_records([verl, oasst], "prompt")] == ["x", "oasst1", "oasst1"]
    with pytest.raises(ConfigError, match=r"OpenAssistant's form \(in .*verl.parquet\)"):
        list(read_records([verl], "prompt", "en"))


def test_a_url_is_to_be_downloaded_first():
    url = "https://huggingface.co/datasets/OpenAssistant/oasst1/resolve/main/data/train.parquet"
    with pytest.raises(ConfigError, match=r"local files alone[\s\S]*curl -L -O https"):
        list(read_records([url], "prompt"))
