"""Vocabularies are compared by token ids and not by size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.data.vocabularies import compare_vocabularies, token_ids
from megarl.errors import ModelError


def write(directory: Path, vocab: Any, added: tuple[tuple[str, int], ...] = ()) -> Path:
    directory.mkdir()
    tokens = [{"content": content, "id": i, "special": True} for content, i in added]
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}, "added_tokens": tokens}))
    return directory


def test_equal_maps_of_different_forms_are_equal(tmp_path: Path) -> None:
    pieces = write(tmp_path / "a", {"x": 0, "y": 1}, (("<end>", 2),))
    unigram = write(tmp_path / "b", [["x", -1.0], ["y", -2.0]], (("<end>", 2),))
    assert token_ids(pieces) == {"x": 0, "y": 1, "<end>": 2}
    assert compare_vocabularies(pieces, unigram) is None


def test_same_size_with_swapped_ids_names_the_first_tokens(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"x": 0, "y": 1, "z": 2})
    b = write(tmp_path / "b", {"x": 0, "z": 1, "w": 2})
    assert compare_vocabularies(a, b) == "3 and 3 tokens; 'y': id 1 and no such token, 'z': id 2 and id 1, 'w': no such token and id 2"


def test_an_added_token_alone_is_a_difference_and_long_lists_are_cut(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {str(i): i for i in range(9)})
    b = write(tmp_path / "b", {}, (("<end>", 0),))
    said = compare_vocabularies(a, b)
    assert said.startswith("9 and 1 tokens; '0': id 0 and no such token, '<end>'") and said.endswith("and 7 more")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {}}, "added_tokens": [1]}'])
def test_damaged_files_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="tokenizer.json"):
        token_ids(tmp_path)
    with pytest.raises(ModelError, match="can't be read"):
        token_ids(tmp_path / "nowhere")
