"""A critic of another vocabulary: its values are those of what was known before each token, and never of what came after."""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from megarl.data.retokenise import Retokeniser, TextReader, align
from megarl.errors import DataError, ModelError
from megarl.types import Ragged
from tests.data.tokenizers import END, byte_level, bytes_of, comma_and_space, pieces_with_scores, sentence_pieces, words


@cache
def made(name: str) -> Any:
    return {
        "bytes": lambda: byte_level(256),
        "merged": lambda: byte_level(330, trim=True, bos_token=END, eos_token=END),
        "crossing": lambda: byte_level(330, trim=True, across=True, eos_token=END),
        "other": lambda: byte_level(290, special=(), eos_token="!"),
        "composing": lambda: byte_level(310, normalizer=normalizers.NFC(), eos_token=END),
        "pieces": sentence_pieces,
        "unigram": pieces_with_scores,
        "words": words,
    }[name]()


def aligned(actor: str, critic: str, prompt: Any, response: Any) -> tuple[list[int], list[int]]:
    """``prompt`` and ``response``: texts or ids."""
    tokenizer = made(actor)
    ids = [tokenizer.encode(x, add_special_tokens=False) if isinstance(x, str) else x for x in (prompt, response)]
    tokens, predictors = align(tokenizer.backend_tokenizer, TextReader.of(made(critic)), *ids)
    assert (tokens.dtype, predictors.dtype, len(predictors)) == (np.int32, np.int32, len(ids[1]))
    assert all(0 <= p < len(tokens) for p in predictors) and (np.diff(predictors) >= 0).all()
    return tokens.tolist(), predictors.tolist()


def read_before(critic: str, tokens: list[int], predictors: list[int]) -> list[str]:
    return [made(critic).decode(tokens[: p + 1]) for p in predictors]


texts = st.text(
    st.sampled_from("helo thn\u00e9\u0301\u0323\u1100\u1161\u11a8\u4f60\U0001f600.\n\U0001f468\u200d\U0001f469")
    | st.characters(codec="utf-8")
)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(["bytes", "merged", "other"]), st.sampled_from(["bytes", "merged", "other", "composing", "crossing"]), texts, st.data()
)
@example("bytes", "crossing", "said the newt to the", None)
@example("bytes", "composing", "e\u0301\u0323 x", None)
@example("bytes", "merged", "hello. \n\n there", None)
def test_what_the_critic_has_read_was_known_and_is_all_that_was(actor: str, critic: str, text: str, data: Any) -> None:
    """Against bytes put together here. Ids that were drawn may be no text, and cut characters anywhere."""
    ids = made(actor).encode("hello " + text, add_special_tokens=False)
    if data is not None:
        ids += data.draw(st.lists(st.integers(0, len(made(actor)) - 1), max_size=12))
        cut = data.draw(st.integers(1, len(ids)))
    else:
        cut = 1
    tokens, predictors = aligned(actor, critic, ids[:cut], ids[cut:])
    front = [made(critic).bos_token_id or made(critic).eos_token_id]
    front = front if bytes_of(made(critic), tokens) != _normal(critic, bytes_of(made(actor), ids).decode(errors="replace")) else []
    body = tokens[len(front) :]
    settled = ""
    for t, predictor in enumerate(predictors):
        now = bytes_of(made(actor), ids[: cut + t]).decode(errors="replace").rstrip("\ufffd")
        settled = max(settled, now, key=len)
        read = bytes_of(made(critic), body[: predictor + 1 - len(front)])
        assert _normal(critic, settled).startswith(read)
        if predictor + 1 < len(tokens) and critic != "composing":
            assert not settled.encode().startswith(bytes_of(made(critic), body[: predictor + 2 - len(front)]))


def _normal(critic: str, text: str) -> bytes:
    return (unicodedata.normalize("NFC", text) if critic == "composing" else text).encode()


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["bytes", "other", "pieces", "unigram"]), texts, st.integers(1, 10))
def test_the_same_tokenizer_gives_the_ordinary_predictors(name: str, text: str, cut: int) -> None:
    """Of a token that begins within a character less is known than of its bytes; all others are predicted by the one before them."""
    tokenizer = made(name)
    ids = tokenizer.encode("the newt " + text.replace("\ufffd", ""), add_special_tokens=False)
    again = tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)
    if again != ids:  # a text with unknown characters, or with spaces that this tokenizer doesn't keep
        return
    cut = min(cut, len(ids))
    tokens, predictors = aligned(name, name, ids[:cut], ids[cut:])
    assert tokens[-len(ids) :] == ids
    shift = len(tokens) - len(ids)
    for t, predictor in enumerate(predictors):
        whole = "\ufffd" not in tokenizer.decode(ids[: cut + t])
        assert predictor == cut + t - 1 + shift if whole else predictor < cut + t - 1 + shift


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(["pieces", "unigram"]), texts, st.data())
def test_a_growing_text_is_the_text(name: str, text: str, data: Any) -> None:
    """The critic reads what the tokens decode to together, and before each token what they decoded to until then.

    The longest of it: of bytes that are text so far, the decoder makes none when the next is a part of a character.
    """
    tokenizer = made(name)
    ids = tokenizer.encode("the newt " + text.replace("\ufffd", ""), add_special_tokens=False)
    cut = data.draw(st.integers(1, len(ids)))
    tokens, predictors = aligned(name, "bytes", ids[:cut], ids[cut:])
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert bytes_of(made("bytes"), tokens) == whole.encode()
    settled = ""
    for t, read in enumerate(read_before("bytes", tokens, predictors)):
        settled = max(settled, tokenizer.decode(ids[: cut + t], skip_special_tokens=False).rstrip("\ufffd"), key=len)
        assert read == settled


@pytest.mark.parametrize("byte", ["\u00e9", "\U0001f600"])
def test_a_character_of_several_tokens_counts_when_it_is_whole(byte: str) -> None:
    for actor in ("bytes", "pieces"):
        count = len(byte.encode())
        tokens, predictors = aligned(actor, "bytes", "the", made(actor).encode("the" + byte + "n", add_special_tokens=False)[-count - 1 :])
        assert read_before("bytes", tokens, predictors) == ["the"] * count + ["the" + byte]


def test_actor_tokens_that_span_critic_tokens_and_the_other_way_round() -> None:
    coarse, fine = "merged", "bytes"
    prompt = made(coarse).encode("hello", add_special_tokens=False)
    response = made(coarse).encode(" there the", add_special_tokens=False)
    tokens, predictors = aligned(coarse, fine, prompt, response)
    known = ["hello" + made(coarse).decode(response[:t]) for t in range(len(response))]
    assert len(tokens) > len(response) + 1 and read_before(fine, tokens, predictors) == known
    tokens, predictors = aligned(fine, coarse, "hello", " there")
    inside = tokens.index(made(coarse).encode(" there", add_special_tokens=False)[0])
    assert predictors == [inside - 1] * len(" there"), "no token lies in a beginning of ' there'"


def test_special_tokens_are_text_and_the_end_is_predicted_by_what_came_before_it() -> None:
    tokens, predictors = aligned("bytes", "other", f"hi{END}", f"hello{END}")
    assert made("other").decode(tokens) == f"hi{END}hello{END}"
    assert read_before("other", tokens, predictors)[-1] == f"hi{END}hello"
    same_name, _ = aligned("bytes", "composing", "hi", f"hello{END}")
    assert same_name[-1] == made("composing").convert_tokens_to_ids(END)


def test_the_critics_beginning_of_sequence_comes_first_once() -> None:
    begin = made("merged").bos_token_id
    tokens, predictors = aligned("other", "merged", "hello", " newt")
    assert tokens[0] == begin and tokens.count(begin) == 1 and predictors[0] >= 1
    tokens, _ = aligned("bytes", "merged", f"{END}hello", " newt")
    assert tokens[0] == begin and tokens.count(begin) == 1, "the text begins with it already"
    tokens, _ = aligned("bytes", "other", "hello", " newt")
    assert made("other").decode(tokens) == "hello newt", "and where there is none, with the first token of the text"


def test_a_prompt_that_the_critic_reads_with_the_response_is_preceded_by_its_end_of_sequence() -> None:
    """Else the first response token's value would be that of a token that contains it."""
    tokens, predictors = aligned("bytes", "words", "hello ", "newt")[0:2]
    assert tokens == [1, 2] and predictors == [0] * 4
    with pytest.raises(DataError, match="critic.retokenize"):
        aligned("bytes", "words", "ne", "wt")
    tokens, predictors = aligned("bytes", "unigram", "t", "he newt")
    assert tokens[0] == made("unigram").eos_token_id and predictors[0] == 0


def test_one_vocabulary_changes_nothing_whatever_was_drawn() -> None:
    """Ids that the tokenizer itself would never give for their text."""
    prompts, responses = Ragged.from_list([[72, 73], [0]], np.int32), Ragged.from_list([[200, 74, 75], []], np.int32)
    kept = Retokeniser.of(made("merged"), made("merged"), same=True)
    tokens, predictors = kept.samples(prompts, responses)
    assert tokens[0].tolist() == [72, 73, 200, 74, 75] and tokens[1].tolist() == [0]
    assert predictors[0].tolist() == [1, 2, 3] and predictors.lengths.tolist() == [3, 0]
    assert (tokens.values.dtype, predictors.values.dtype) == (np.int32, np.int32)


def test_an_empty_response_has_a_last_value_and_nothing_else() -> None:
    tokens, predictors = aligned("bytes", "merged", "hello", [])
    assert len(tokens) == 2 and predictors == []


def test_a_tokenizer_that_cuts_off_or_adds_is_read_plainly() -> None:
    """Truncation, padding and templates that a tokenizer.json may carry."""
    tokenizer = byte_level(280, eos_token=END)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    ids, ends = TextReader.of(tokenizer).read("no newt, no tower")
    assert 5 < len(ids) == len(ends) < 64 and ends[-1] == len("no newt, no tower")


def test_a_space_at_a_tokens_end_belongs_to_it() -> None:
    """Though the tokenizer's post-processor would say otherwise: its token of ', ' ends behind the space."""
    tokenizer = comma_and_space()
    assert tokenizer("no, newt", return_offsets_mapping=True)["offset_mapping"][2] == (2, 3)
    assert TextReader.of(tokenizer).read("no, newt")[1][2] == 4


def test_a_slow_tokenizer_is_refused() -> None:
    from transformers import ByT5Tokenizer

    with pytest.raises(ModelError, match="a fast tokenizer"):
        TextReader.of(ByT5Tokenizer())
