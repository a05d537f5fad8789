import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.data.prompts import PreparedPrompts, prepare_prompts
from megarl.data.supervised import SupervisedHandle, SupervisedPairs, prepare_supervised
from megarl.errors import ConfigError, DataError, ModelError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """A real fast tokenizer of words, with a chat template."""
    words = ["<unk>", "<eos>", "<user>", "<assistant>", "<system>", *(f"w{i}" for i in range(50))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>", chat_template=TEMPLATE)


def row(words=2, **changes):
    content = " ".join(f"w{i}" for i in range(words))
    return {
        "data_source": "test/words",
        "prompt": [{"role": "user", "content": content}],
        "ability": "words",
        "reward_model": {"style": "rule", "ground_truth": f"w{words}"},
        "extra_info": {"index": words, "split": "train"},
    } | changes


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def prepare(files, tokenizer, out, truncation="error", limit=10, key="prompt"):
    return prepare_prompts(files, tokenizer, out, prompt_key=key, max_prompt_tokens=limit, truncation=truncation)


def test_rows_of_several_files_are_read_back(tmp_path, tokenizer):
    files = [write(tmp_path / "a.parquet", [row(1), row(3)]), write(tmp_path / "b.parquet", [row(2)])]
    summary = prepare(files, tokenizer, tmp_path / "out.arrow")
    assert (summary.rows, summary.dropped, summary.truncated, summary.max_tokens, summary.total_tokens) == (3, 0, 0, 5, 12)
    prompts = PreparedPrompts.open(tmp_path / "out.arrow")
    assert len(prompts) == 3
    tokens = prompts.tokens([2, 0, 2])
    assert tokens.values.dtype == np.int32
    assert [tokens[i].tolist() for i in range(3)] == [[2, 5, 6, 3], [2, 5, 3], [2, 5, 6, 3]]
    assert prompts.text(1) == "<user> w0 w1 w2 <assistant>"
    assert prompts.reward_inputs([1]) == [{"data_source": "test/words", "ground_truth": "w3", "extra_info": {"index": 3, "split": "train"}}]
    assert prompts.extra_columns([0]) == [{"ability": "words"}]
    assert prompts.source(2) == f"{files[1]}, row 0"


def test_many_rows_cross_record_batches(tmp_path, tokenizer):
    count = 2500
    path = write(tmp_path / "a.parquet", [row(i % 7, extra_info={"index": i}) for i in range(count)])
    prepare([path], tokenizer, tmp_path / "out.arrow")
    prompts = PreparedPrompts.open(tmp_path / "out.arrow")
    rows = np.random.default_rng(0).permutation(count)
    assert [item["extra_info"]["index"] for item in prompts.reward_inputs(rows)] == rows.tolist()
    assert prompts.tokens(rows).lengths.tolist() == [r % 7 + 2 for r in rows.tolist()]
    assert len(prompts.tokens([])) == 0
    with pytest.raises(DataError, match="row outside the file"):
        prompts.tokens([count])


@pytest.mark.parametrize("missing", ["absent", "null"])
def test_extra_info_may_be_missing(tmp_path, tokenizer, missing):
    rows = [row(), row()]
    for r in rows:
        r.pop("extra_info")
    if missing == "null":
        rows = [rows[0] | {"extra_info": None}, row()]
    prepare([write(tmp_path / "a.parquet", rows)], tokenizer, tmp_path / "out.arrow")
    assert PreparedPrompts.open(tmp_path / "out.arrow").reward_inputs([0])[0]["extra_info"] == {}


@pytest.mark.parametrize("truth", ["text", 7, 2.5, ["a", "b"], {"answer": 1, "unit": "m"}])
def test_ground_truth_of_any_type_comes_back(tmp_path, tokenizer, truth):
    path = write(tmp_path / "a.parquet", [row(reward_model={"style": "rule", "ground_truth": truth})])
    prepare([path], tokenizer, tmp_path / "out.arrow")
    assert PreparedPrompts.open(tmp_path / "out.arrow").reward_inputs([0])[0]["ground_truth"] == truth


def test_ground_truth_may_be_null_only_for_a_reward_model(tmp_path, tokenizer):
    model = write(tmp_path / "m.parquet", [row(reward_model={"style": "model", "ground_truth": None})])
    prepare([model], tokenizer, tmp_path / "out.arrow")
    rule = write(tmp_path / "r.parquet", [row(), row(reward_model={"style": "rule", "ground_truth": None})])
    with pytest.raises(DataError, match=r"without a ground truth[\s\S]*r.parquet, row 1"):
        prepare([rule], tokenizer, tmp_path / "out2.arrow")


@pytest.mark.parametrize(("truncation", "kept"), [("left", [6, 7, 8, 3]), ("right", [2, 5, 6, 7]), ("drop", None)])
def test_overlong_prompts_are_cut_or_dropped(tmp_path, tokenizer, truncation, kept):
    path = write(tmp_path / "a.parquet", [row(1), row(4)])
    summary = prepare([path], tokenizer, tmp_path / "out.arrow", truncation, limit=4)
    prompts = PreparedPrompts.open(tmp_path / "out.arrow")
    if kept is None:
        assert (summary.rows, summary.dropped) == (1, 1)
    else:
        assert (summary.rows, summary.truncated, summary.max_tokens) == (2, 1, 4)
        assert prompts.tokens([1])[0].tolist() == kept


def test_overlong_prompt_is_an_error_by_default_and_leaves_no_file(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [row(1), row(4)])
    with pytest.raises(DataError, match=r"a.parquet, row 1[\s\S]*6 tokens[\s\S]*at most 4"):
        prepare([path], tokenizer, tmp_path / "out.arrow", limit=4)
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_a_failed_preparation_keeps_the_old_file(tmp_path, tokenizer):
    prepare([write(tmp_path / "a.parquet", [row(1)])], tokenizer, tmp_path / "out.arrow")
    with pytest.raises(DataError, match=r"no prompt left[\s\S]*1 dropped"):
        prepare([write(tmp_path / "b.parquet", [row(9)])], tokenizer, tmp_path / "out.arrow", "drop")
    assert len(PreparedPrompts.open(tmp_path / "out.arrow")) == 1


@pytest.mark.parametrize("prompt", ["a string", [], None, [{"role": "user", "content": None}], [{"role": "user"}], [1]])
def test_a_row_with_a_wrong_prompt_is_named(tmp_path, tokenizer, prompt):
    path = write(tmp_path / "a.parquet", [row(prompt=prompt)])
    with pytest.raises(DataError, match=r"no list of messages[\s\S]*a.parquet, row 0, column prompt"):
        prepare([path], tokenizer, tmp_path / "out.arrow")


def test_files_that_can_not_be_read_are_named(tmp_path, tokenizer):
    out = tmp_path / "out.arrow"
    with pytest.raises(ConfigError, match=r"not found[\s\S]*absent.parquet"):
        prepare([str(tmp_path / "absent.parquet")], tokenizer, out)
    with pytest.raises(ConfigError, match="no data files"):
        prepare([], tokenizer, out)
    (tmp_path / "text.parquet").write_text("not parquet at all")
    with pytest.raises(DataError, match=r"not a parquet file[\s\S]*text.parquet"):
        prepare([str(tmp_path / "text.parquet")], tokenizer, out)
    bare = write(tmp_path / "bare.parquet", [{"question": "q", "data_source": "x"}])
    columns = r"missing columns: prompt, reward_model[\s\S]*question, data_source[\s\S]*data_source, prompt, reward_model"
    with pytest.raises(DataError, match=columns):
        prepare([bare], tokenizer, out)
    binary = write(tmp_path / "binary.parquet", [row(image=b"\x00")])
    with pytest.raises(DataError, match=r"binary.parquet, row 0, columns ability, image[\s\S]*bytes"):
        prepare([binary], tokenizer, out)


def test_dates_are_kept_as_text(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [row(day=datetime.date(2026, 1, 2))])
    prepare([path], tokenizer, tmp_path / "out.arrow")
    assert PreparedPrompts.open(tmp_path / "out.arrow").extra_columns([0])[0]["day"] == "2026-01-02"


def test_a_failing_template_is_named(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [row(), row(prompt=[{"role": "tool", "content": "x"}])])
    with pytest.raises(DataError, match=r"template failed[\s\S]*row 1[\s\S]*no tools here"):
        prepare([path], tokenizer, tmp_path / "out.arrow")
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DataError, match="template failed"):
        prepare([path], plain, tmp_path / "out.arrow")


def test_settings_out_of_range_are_refused(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [row()])
    with pytest.raises(ConfigError, match="error | left | right | drop"):
        prepare([path], tokenizer, tmp_path / "out.arrow", "middle")
    with pytest.raises(ConfigError, match="max_prompt_tokens"):
        prepare([path], tokenizer, tmp_path / "out.arrow", limit=0)


def test_open_refuses_other_files(tmp_path, tokenizer):
    with pytest.raises(DataError, match="no such file"):
        PreparedPrompts.open(tmp_path / "absent.arrow")
    (tmp_path / "text.arrow").write_text("text")
    with pytest.raises(DataError, match="not an Arrow IPC file"):
        PreparedPrompts.open(tmp_path / "text.arrow")
    path = write(tmp_path / "a.parquet", [row()])
    prepare_supervised([path], tokenizer, tmp_path / "pairs.arrow", prompt_key="prompt", max_prompt_tokens=10, max_response_tokens=4)
    with pytest.raises(DataError, match=r"another kind[\s\S]*supervised pairs"):
        PreparedPrompts.open(tmp_path / "pairs.arrow")


def test_supervised_pairs_end_with_the_end_of_sequence(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [row(1), row(2, reward_model={"style": "rule", "ground_truth": "w3 w4"})])
    out = tmp_path / "pairs.arrow"
    assert prepare_supervised([path], tokenizer, out, prompt_key="prompt", max_prompt_tokens=10, max_response_tokens=3) == 2
    pairs = SupervisedPairs.open(out)
    assert [pairs.responses([1, 0])[i].tolist() for i in range(2)] == [[8, 9, 1], [6, 1]]
    assert pairs.prompts([0])[0].tolist() == [2, 5, 3]
    assert [lengths.tolist() for lengths in pairs.lengths([0, 1])] == [[3, 4], [2, 3]]
    shard = SupervisedHandle(str(out), (1,)).fetch()
    assert shard["prompts"][0].tolist() == [2, 5, 6, 3]
    assert shard["responses"][0].tolist() == [8, 9, 1]


def test_supervised_pairs_refuse_what_would_teach_wrong(tmp_path, tokenizer):
    options = {"prompt_key": "prompt", "max_prompt_tokens": 10, "max_response_tokens": 2}
    long = write(tmp_path / "a.parquet", [row(reward_model={"style": "rule", "ground_truth": "w1 w2"})])
    with pytest.raises(DataError, match=r"answer too long[\s\S]*3 tokens[\s\S]*at most 2"):
        prepare_supervised([long], tokenizer, tmp_path / "out.arrow", **options)
    number = write(tmp_path / "b.parquet", [row(reward_model={"style": "rule", "ground_truth": 5})])
    with pytest.raises(DataError, match="answer is no text"):
        prepare_supervised([number], tokenizer, tmp_path / "out.arrow", **options)
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=TEMPLATE)
    with pytest.raises(ModelError, match="end-of-sequence"):
        prepare_supervised([number], endless, tmp_path / "out.arrow", **options)
