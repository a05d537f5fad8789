"""The tutorial's data set: by index or in order, within its lengths, and every fault at once where that is cheap."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

import megarl.data
from megarl.data import DataProto, RLHFDataset
from megarl.errors import ConfigError, DataError, ModelError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
EOS = 1


def make_tokenizer(**options) -> PreTrainedTokenizerFast:
    """A real fast tokenizer of words: <user> is 2, <assistant> 3, w0 to w49 are 5 to 54."""
    words = ["<unk>", "<eos>", "<user>", "<assistant>", "<system>", *(f"w{i}" for i in range(50))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(**{"tokenizer_object": inner, "eos_token": "<eos>", "chat_template": TEMPLATE} | options)


TOKENIZER = make_tokenizer()


def words(count: int) -> str:
    return " ".join(f"w{i}" for i in range(count))


def row(count: int, **changes) -> dict:
    return {
        "data_source": "test",
        "prompt": [{"role": "user", "content": words(count)}],
        "reward_model": {"style": "rule", "ground_truth": f"w{count}"},
        "extra_info": {"index": count},
    } | changes


def write(path, rows) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


OASST = [
    {"message_id": "q", "parent_id": None, "text": "w0 w1", "role": "prompter", "lang": "en", "rank": None},
    {"message_id": "b", "parent_id": "q", "text": "w9", "role": "assistant", "lang": "en", "rank": 1},
    {"message_id": "a", "parent_id": "q", "text": "w2 w3", "role": "assistant", "lang": "en", "rank": 0},
    {"message_id": "q2", "parent_id": "a", "text": "w4", "role": "prompter", "lang": "es", "rank": None},
    {"message_id": "a2", "parent_id": "q2", "text": "w5", "role": "assistant", "lang": "es", "rank": None},
]


def test_a_sample_of_verls_form(tmp_path):
    path = write(tmp_path / "a.parquet", [row(1), row(2, extra_info={"index": 7})])
    dataset = RLHFDataset([path], tokenizer=TOKENIZER)
    assert len(dataset) == 2
    assert dataset[1] == {
        "input_ids": [2, 5, 6, 3],
        "response_input_ids": [],
        "prompt": "<user> w0 w1 <assistant>",
        "response": None,
        "data_source": "test",
        "ground_truth": "w2",
        "extra_info": {"index": 7},
        "source": f"{path}, row 1",
    }


def test_a_sample_of_openassistants_form(tmp_path):
    path = write(tmp_path / "a.parquet", OASST)
    dataset = RLHFDataset(path, tokenizer=TOKENIZER)
    sample = dataset[-1]
    assert sample["input_ids"] == [2, 5, 6, 3, 7, 8, 2, 9, 3]
    assert sample["response_input_ids"] == [10, EOS]
    assert (sample["response"], sample["ground_truth"], sample["data_source"]) == ("w5", "w5", "oasst1")
    assert sample["extra_info"] == {"message_id": "q2", "message_tree_id": "q", "lang": "es"}
    assert sample["source"] == f"{path}, row 3"
    assert [s["response"] for s in RLHFDataset(path, tokenizer=TOKENIZER, lang="en")] == ["w2 w3"]
    with pytest.raises(DataError, match=r"no prompt in this language[\s\S]*'de'[\s\S]*en, es"):
        RLHFDataset(path, tokenizer=TOKENIZER, lang="de")


def test_a_language_where_none_is_said(tmp_path):
    path = str(tmp_path / "a.parquet")
    rows = [row | {"lang": None} for row in OASST]
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(DataError, match=r"'en'[\s\S]*lang is null in all of them[\s\S]*leave lang out"):
        RLHFDataset(path, tokenizer=TOKENIZER, lang="en")
    rows[0]["lang"] = "en"  # without a null among the languages that are named
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(DataError, match=r"expected: en\n"):
        RLHFDataset(path, tokenizer=TOKENIZER, lang="de")


def test_a_response_column_of_verls_form(tmp_path):
    path = write(tmp_path / "a.parquet", [row(1, response="w7 w8"), row(1, response=None)])
    assert [s["response_input_ids"] for s in RLHFDataset(path, tokenizer=TOKENIZER)] == [[12, 13, EOS], []]
    numbers = write(tmp_path / "b.parquet", [row(1, response=7)])
    with pytest.raises(DataError, match=r"no text \(in .*b.parquet, row 0, column response"):
        RLHFDataset(numbers, tokenizer=TOKENIZER)


@pytest.mark.parametrize(("limit", "kept", "cut"), [(4, [5, 6, 7, EOS], 0), (3, [5, 6, 7], 0), (2, [5, 6], 1)])
def test_a_response_ends_with_the_end_of_sequence_where_that_fits(tmp_path, limit, kept, cut):
    dataset = RLHFDataset(write(tmp_path / "a.parquet", [row(1, response=words(3))]), tokenizer=TOKENIZER, max_response_length=limit)
    assert dataset[0]["response_input_ids"] == kept
    assert dataset.truncated_responses == cut


@pytest.mark.parametrize(("truncation", "kept"), [("left", [6, 7, 8, 3]), ("right", [2, 5, 6, 7])])
def test_overlong_prompts_are_cut_and_counted_once(tmp_path, truncation, kept):
    path = write(tmp_path / "a.parquet", [row(1), row(4)])
    dataset = RLHFDataset(path, tokenizer=TOKENIZER, max_prompt_length=4, truncation=truncation)
    assert dataset.truncated == 0
    assert dataset[1]["input_ids"] == dataset[1]["input_ids"] == kept
    assert dataset[1]["prompt"] == "<user> w0 w1 w2 w3 <assistant>"
    assert dataset.truncated == 1


def test_overlong_prompts_are_dropped_or_refused_at_once(tmp_path):
    path = write(tmp_path / "a.parquet", [row(4), row(1), row(5), row(2)])
    dataset = RLHFDataset(path, tokenizer=TOKENIZER, max_prompt_length=4, truncation="drop")
    assert [s["ground_truth"] for s in dataset] == ["w1", "w2"]
    assert [s["source"] for s in dataset] == [f"{path}, row 1", f"{path}, row 3"]
    assert [len(s["input_ids"]) for s in dataset] == [3, 4]
    with pytest.raises(DataError, match=r"a.parquet, row 0[\s\S]*6 tokens"):
        RLHFDataset(path, tokenizer=TOKENIZER, max_prompt_length=4, truncation="error")
    with pytest.raises(DataError, match=r"no prompt left[\s\S]*all dropped"):
        RLHFDataset(path, tokenizer=TOKENIZER, max_prompt_length=1, truncation="drop")


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=8),
    max_prompt=st.integers(1, 14),
    max_response=st.integers(1, 14),
    truncation=st.sampled_from(["left", "right"]),
)
def test_lengths_are_never_exceeded(tmp_path_factory, lengths, max_prompt, max_response, truncation):
    rows = [row(prompt, response=words(response)) for prompt, response in lengths]
    path = write(tmp_path_factory.mktemp("lengths") / "a.parquet", rows)
    limits = {"max_prompt_length": max_prompt, "max_response_length": max_response, "truncation": truncation}
    for (prompt, response), sample in zip(lengths, RLHFDataset(path, tokenizer=TOKENIZER, **limits), strict=True):
        assert len(sample["input_ids"]) == min(prompt + 2, max_prompt)
        assert len(sample["response_input_ids"]) == min(response + 1, max_response)
        assert (EOS in sample["response_input_ids"]) == (response < max_response)


def test_it_is_a_sequence(tmp_path):
    files = [write(tmp_path / "a.parquet", [row(1), row(2)]), write(tmp_path / "b.parquet", [row(3)])]
    dataset = RLHFDataset(files, tokenizer=TOKENIZER)
    assert [s["ground_truth"] for s in dataset] == ["w1", "w2", "w3"]
    assert dataset[-1] == dataset[2] == dataset[np.int64(2)]
    assert dataset[2]["source"] == f"{files[1]}, row 0"
    for outside in (3, -4):
        with pytest.raises(IndexError, match="of 3"):
            dataset[outside]
    with pytest.raises(TypeError):
        dataset["a"]
    assert pickle.loads(pickle.dumps(dataset))[1] == dataset[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_it_feeds_a_dataloader(tmp_path, workers):
    dataset = RLHFDataset(write(tmp_path / "a.parquet", [row(i) for i in range(7)]), tokenizer=TOKENIZER)
    loader = DataLoader(dataset, batch_size=3, shuffle=True, num_workers=workers, collate_fn=RLHFDataset.collate)
    batches = list(loader)
    assert [len(batch["input_ids"]) for batch in batches] == [3, 3, 1]
    assert sorted(len(ids) for batch in batches for ids in batch["input_ids"]) == list(range(2, 9))


def test_many_rows_keep_their_places(tmp_path):
    path = write(tmp_path / "a.parquet", [row(i % 7, extra_info={"index": i}) for i in range(2500)])
    dataset = RLHFDataset([path, path], tokenizer=TOKENIZER)
    for i in (0, 1023, 1024, 2499, 2500, 4999):
        assert dataset[i]["extra_info"] == {"index": i % 2500}
        assert len(dataset[i]["input_ids"]) == i % 2500 % 7 + 2


def test_faults_are_found_when_it_is_made(tmp_path):
    sound = write(tmp_path / "a.parquet", [row(1)])
    broken = write(tmp_path / "b.parquet", [row(1), row(1, prompt=None)])
    with pytest.raises(DataError, match="b.parquet, row 1"):
        RLHFDataset([sound, broken], tokenizer=TOKENIZER)
    with pytest.raises(ConfigError, match="not found"):
        RLHFDataset(tmp_path / "absent.parquet", tokenizer=TOKENIZER)
    with pytest.raises(ConfigError, match="curl"):
        RLHFDataset("https://example.com/train.parquet", tokenizer=TOKENIZER)
    with pytest.raises(DataError, match="template failed"):
        RLHFDataset(sound, tokenizer=make_tokenizer(chat_template=None))
    with pytest.raises(ConfigError, match=r"no tokenizer[\s\S]*str: meta-llama"):
        RLHFDataset(sound, tokenizer="meta-llama/Llama-2-7b-hf")
    for wrong in ({"truncation": "middle"}, {"max_prompt_length": 0}, {"max_response_length": 0}):
        with pytest.raises(ConfigError):
            RLHFDataset(sound, tokenizer=TOKENIZER, **wrong)
    unanswered = write(tmp_path / "c.parquet", OASST[:1])
    with pytest.raises(DataError, match=r"no prompt in the data[\s\S]*answered"):
        RLHFDataset(unanswered, tokenizer=TOKENIZER)


def test_responses_need_an_end_of_sequence_and_prompts_do_not(tmp_path):
    endless = make_tokenizer(eos_token=None)
    assert RLHFDataset(write(tmp_path / "a.parquet", [row(1)]), tokenizer=endless)[0]["input_ids"] == [2, 5, 3]
    with pytest.raises(ModelError, match="end-of-sequence"):
        RLHFDataset(write(tmp_path / "b.parquet", OASST), tokenizer=endless)


def test_a_template_that_refuses_one_row_names_it_when_it_is_read(tmp_path):
    path = write(tmp_path / "a.parquet", [row(1), row(1, prompt=[{"role": "tool", "content": "x"}])])
    dataset = RLHFDataset(path, tokenizer=TOKENIZER)
    with pytest.raises(DataError, match=r"template failed \(in .*a.parquet, row 1\)"):
        dataset[1]


def test_the_room_exports_what_it_names():
    assert megarl.data.__all__ == ["DataProto", "RLHFDataset"]
    assert DataProto.__module__ == "megarl.data.proto"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        megarl.data.Nothing  # noqa: B018
