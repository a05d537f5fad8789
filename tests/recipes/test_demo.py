"""The demo's data, model and reward: the same bytes from the same seed, and inside the limits that its recipe states."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from megarl.config.load import load_config

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"demo_{name}", ROOT / "recipes" / "demo" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prepare, reward = load("prepare"), load("reward")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    assert prepare.prepare(out, seed=0)
    return out


def rows(demo: Path, name: str) -> list[dict]:
    return pq.read_table(demo / f"{name}.parquet").to_pylist()


def word(row: dict) -> str:
    return row["prompt"][0]["content"].removeprefix("reverse: ")


def test_a_second_call_changes_nothing_and_a_damaged_file_is_made_again(demo: Path) -> None:
    before = prepare.fingerprint(demo)
    assert not prepare.prepare(demo, seed=0)
    (demo / "val.parquet").write_bytes(b"cut")
    assert prepare.prepare(demo, seed=0)
    assert prepare.fingerprint(demo) == before


def test_another_seed_gives_other_words() -> None:
    assert prepare.make_words(1) == prepare.make_words(1) != prepare.make_words(2)


def test_no_held_out_word_is_trained_on(demo: Path) -> None:
    val, train, sft = ({word(row) for row in rows(demo, name)} for name in ("val", "train", "sft"))
    assert len(val) == prepare.VAL_ROWS >= 512 and len(train) == prepare.TRAIN_ROWS
    assert val.isdisjoint(train | sft)


def test_rows_are_of_verls_schema(demo: Path) -> None:
    row = rows(demo, "val")[3]
    assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert row["reward_model"] == {"style": "rule", "ground_truth": word(row)[::-1]}
    assert row["extra_info"] == {"split": "test", "index": 3}


def test_prompts_and_answers_fit_the_recipes_limits(demo: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    config = load_config(ROOT / "recipes" / "demo-cpu.yaml")
    assert len(tokenizer) % 2 == 1 and len(tokenizer("reverse: agec").input_ids) == 13
    prompts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in rows(demo, "val")]
    answers = [tokenizer(row["reward_model"]["ground_truth"]).input_ids + [tokenizer.eos_token_id] for row in rows(demo, "val")]
    assert max(map(len, prompts)) == config.data.max_prompt_tokens == 16
    assert max(map(len, answers)) == 5 <= config.rollout.max_response_tokens
    assert not any(tokenizer.unk_token_id in ids for ids in prompts + answers)
    truth = rows(demo, "val")[0]["reward_model"]["ground_truth"]
    assert tokenizer.decode(answers[0], skip_special_tokens=True) == truth
    assert tokenizer.decode(prompts[0]) == f"<|user|>reverse: {truth[::-1]}<|im_end|><|assistant|>"


def test_the_model_is_what_both_sides_can_cut(demo: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo / "model")
    assert model.config.model_type == "qwen2" and model.config.vocab_size == 33
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.generation_config.eos_token_id == 1 and model.num_parameters() < 1_000_000


@pytest.mark.parametrize(
    ("said", "score", "letters"),
    [
        ("cat", 1.0, 1.0),
        ("cut", 0.0, 2 / 3),
        ("cats", 0.0, 3 / 4),
        ("cat ", 0.0, 3 / 4),
        ("ca", 0.0, 2 / 3),
        ("tac", 0.0, 1 / 3),
        ("", 0.0, 0.0),
    ],
)
def test_reward(said: str, score: float, letters: float) -> None:
    result = reward.compute_score(data_source="demo/reverse", solution_str=said, ground_truth="cat", extra_info={})
    assert result == {"score": score, "letters_right": pytest.approx(letters)}
