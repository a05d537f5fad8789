"""Do two models read the same token ids? Compared by the maps of their ``tokenizer.json``, not by their sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.errors import ModelError, explain

_SHOWN = 3  # differing tokens that a message names


def compare_vocabularies(directory: str | Path, other: str | Path) -> str | None:
    """How the vocabularies of two Hugging Face directories differ, with the first differing tokens; None where they are the same.

    Raises ModelError for a directory without a readable ``tokenizer.json``.
    """
    ours, theirs = token_ids(directory), token_ids(other)
    if ours == theirs:
        return None
    differing = sorted((t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)), key=lambda t: _first_id(t, ours, theirs))
    named = ", ".join(f"{token!r}: {_id(ours, token)} and {_id(theirs, token)}" for token in differing[:_SHOWN])
    more = f", and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return f"{len(ours)} and {len(theirs)} tokens; {named}{more}"


def token_ids(directory: str | Path) -> dict[str, int]:
    """Token -> id of the ``tokenizer.json`` in a Hugging Face directory, added tokens included. Raises ModelError."""
    file = Path(directory) / "tokenizer.json"
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
        found = _vocabulary(parsed["model"]["vocab"])
        return found | {token["content"]: token["id"] for token in parsed.get("added_tokens") or ()}
    except OSError as error:
        raise ModelError(
            explain("a vocabulary can't be read", where=str(file), got=error, do="save the directory's tokenizer as a fast one")
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        expected = "model.vocab and added_tokens, as the tokenizers library writes them"
        raise ModelError(explain("a damaged tokenizer.json", where=str(file), got=repr(error), expected=expected)) from error


def _vocabulary(vocab: Any) -> dict[str, int]:
    """Word pieces are a map; a unigram model has a list of (piece, score), whose place is the id."""
    if isinstance(vocab, list):
        return {piece: i for i, (piece, _) in enumerate(vocab)}
    return dict(vocab)


def _first_id(token: str, ours: dict[str, int], theirs: dict[str, int]) -> tuple[int, str]:
    return min(v for v in (ours.get(token), theirs.get(token)) if v is not None), token


def _id(ids: dict[str, int], token: str) -> str:
    return f"id {ids[token]}" if token in ids else "no such token"
