"""Bad input ends ``megarl train`` and ``megarl validate`` with a clear error before anything is started, and loses nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.cli.main import main
from megarl.data.prompts import PreparedPrompts
from tests.controller.bad_cases import CASES, NORM, Case
from tests.controller.bad_place import (
    STARTED,
    assert_nothing_lost,
    change_json,
    change_weights,
    make_sound,
    row,
    snapshot,
    train,
    write_rows,
)

FRESH = "run.dir=fresh"

pytestmark = pytest.mark.usefixtures("spoilable")


# Every third is a part of `make test-fast`.
TABLE = [
    pytest.param(case, id=case.name.replace(" ", "_"), marks=() if number % 3 == 0 else pytest.mark.slow)
    for number, case in enumerate(CASES)
]


@pytest.mark.parametrize("case", TABLE)
def test_bad_input_is_refused_and_loses_nothing(case: Case, spoilable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spoiled files meet a run that has begun; a spoiled recipe, a run directory that doesn't exist yet."""
    overrides = case.spoil.split() if isinstance(case.spoil, str) else []
    if not isinstance(case.spoil, str):
        case.spoil()
    elif not case.spoil.startswith("run.dir"):
        overrides.append(FRESH)
    before = snapshot(spoilable)
    assert main(["validate", "recipe.yaml", *overrides]) == (case.code if case.validate is None else case.validate)
    capsys.readouterr()
    assert train(*overrides) == case.code
    said = capsys.readouterr().err
    for words in case.says:
        assert words in said, said
    if "the reward file can't be imported" not in said:  # then it is the user's own trace that helps
        assert "Traceback" not in said, said
        assert "  do: " in said or "  expected: " in said, said
    assert_nothing_lost(before, spoilable)


AT_EACH_STAGE = ("no model directory", "NaN in weights", "reward signature", "no template", "no end of sequence", "overlong", "null prompt")


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_EACH_STAGE)
def test_a_new_run_is_not_left_half_made_and_the_mended_recipe_starts_there(name: str, spoilable: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    if not isinstance(case.spoil, str):
        case.spoil()
    overrides = case.spoil.split() if isinstance(case.spoil, str) else []
    before = snapshot(spoilable)
    assert train(FRESH, *overrides) == case.code
    assert_nothing_lost(before, spoilable)
    shutil.rmtree("model", ignore_errors=True)
    make_sound(spoilable)
    assert train(FRESH) == STARTED


OVERLONG = {"left": (8, 0, 2), "right": (8, 0, 2), "drop": (6, 2, 0)}  # rows, dropped, truncated, of those up to 15 tokens


@pytest.mark.parametrize("truncation", OVERLONG)
def test_overlong_prompts_under_each_policy(truncation: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows 2 and 6 have 16 tokens, one too many."""
    assert train(FRESH, "data.max_prompt_tokens=15", f"data.truncation={truncation}") == STARTED
    rows, dropped, truncated = OVERLONG[truncation]
    lost = ", without the opening of the assistant's turn" if truncation == "right" else ""
    note = f"{rows} prompts of up to 15 tokens; overlong: {dropped} dropped, {truncated} truncated{lost}\n"
    assert note in capsys.readouterr().out
    whole, cut = (PreparedPrompts.open(f"{run}/data/train.arrow") for run in ("run", "fresh"))
    kept = [i for i in range(8) if truncation != "drop" or i not in (2, 6)]
    assert len(cut) == len(kept)
    for now, i in enumerate(kept):
        tokens = whole.tokens([i])[0].tolist()
        expected = tokens[-15:] if truncation == "left" else tokens[:15]
        assert cut.tokens([now])[0].tolist() == expected
        assert cut.source(now) == f"rows.parquet, row {i}"


def _tied_and_saved(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def _buffers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)


def _untied(tensors: dict[str, torch.Tensor]) -> None:
    """The critic, too, comes from this directory, and leaves the output layer out."""
    change_json("model/config.json", tie_word_embeddings=False)
    tensors["lm_head.weight"] = torch.zeros(33, 128)


def _half(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})


@pytest.mark.parametrize("change", [_tied_and_saved, _buffers, _untied, _half])
def test_weights_that_are_odd_but_sound(change: Any) -> None:
    before = load_file("model/model.safetensors")
    change_weights(change)
    after = load_file("model/model.safetensors")
    assert after.keys() != before.keys() or after[NORM].dtype != before[NORM].dtype
    assert train(FRESH) == STARTED


def test_a_tokenizer_without_padding_is_enough() -> None:
    """Nothing is ever padded."""
    change_json("model/tokenizer_config.json", pad_token=None)
    change_json("model/generation_config.json", pad_token_id=None)
    change_json("model/config.json", pad_token_id=None)
    assert train(FRESH) == STARTED


def test_a_tokenizer_without_an_end_needs_one_from_the_generation_configuration() -> None:
    config = Path("model/tokenizer_config.json")
    config.write_text(config.read_text().replace('"<|im_end|>"', "null"))
    assert train(FRESH) == STARTED


def test_a_vocabulary_larger_than_the_model_matters_only_where_it_is_used() -> None:
    """33 ids under a model of 29: of the rows below none needs the ids 29 to 32, w to z."""
    change_json("model/config.json", vocab_size=29)
    change_weights(lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:29].clone()}))
    assert train(FRESH) == STARTED
    write_rows([row("cat"), row("wax")])
    assert train(FRESH) == 2


def test_a_run_older_than_a_key_goes_on_under_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """A recorded recipe without stop tokens, as an earlier version wrote it."""
    recorded = Path("run/config.yaml")
    lines = [line for line in recorded.read_text().splitlines() if not line.strip().startswith(("stop_token_ids", "stop_tokens"))]
    assert len(lines) == len(recorded.read_text().splitlines()) - 2
    recorded.write_text("\n".join(lines) + "\n")
    assert train("rollout.stop_token_ids=[5]") == 2
    assert "rollout.stop_token_ids: [] -> [5]" in capsys.readouterr().err
    assert train() == STARTED
