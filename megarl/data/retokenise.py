"""A critic of another vocabulary reads the text of a sample with its own tokenizer; here its values find their way back to the tokens.

The value of a response token belongs to the state before it. What was known there is the text of the tokens before it, so that it is read
off at the last critic token all of whose characters lie in that text. A critic token that begins there and ends behind it is passed over:
its id tells of what came next.

Which text a token adds is not what it decodes to by itself: a byte-level token may be a part of a character, and many decoders treat the
first token otherwise than the others. So tokens are decoded in small windows, and a character counts once no further byte can change it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.data.vocabularies import compare_vocabularies
from megarl.errors import DataError, ModelError, explain
from megarl.types import Ragged

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Columns: what such a critic reads in the place of prompts and responses, and how many tokens that are, [B].
CRITIC_TOKENS, CRITIC_PREDICTORS, CRITIC_LENGTHS = "critic_tokens", "critic_predictors", "critic_lengths"

_UNFINISHED = "\ufffd"  # what bytes decode to that are no whole character (yet)
_ACCENTED = "e\u0301"  # two characters, which composing makes one
_WINDOW = 8  # tokens that are decoded together before a new window begins


@dataclass(frozen=True)
class TextReader:
    """A critic's tokenizer: from a text to its ids, and to how far in the text each of them reaches."""

    tokenizer: Tokenizer
    begin: int | None  # its beginning of sequence
    end: int | None  # its end of sequence
    normalises: bool  # its ids are those of a changed text
    composes: bool  # in which a letter and its accents may be one character

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TextReader:
        """A copy that adds no special tokens, cuts nothing off and reports untrimmed offsets (post-processors trim spaces off them).

        Raises ModelError for a tokenizer that can't say where its tokens lie in a text.
        """
        copy = type(_backend(tokenizer)).from_str(_backend(tokenizer).to_str())
        copy.no_truncation()
        copy.no_padding()
        copy.post_processor = None
        normalizer = copy.normalizer
        composes = normalizer is not None and _ACCENTED not in normalizer.normalize_str(_ACCENTED)
        return cls(copy, tokenizer.bos_token_id, tokenizer.eos_token_id, normalizer is not None, composes)

    def read(self, text: str) -> tuple[list[int], np.ndarray]:
        """Ids, and for each of them [n] int64: so many characters of ``text`` decide it and those before it; never falling."""
        found = self.tokenizer.encode(text, add_special_tokens=False)
        ends = [stop for _, stop in found.offsets]
        if self.normalises:
            ends = _over_what_normalising_joins(text, found.offsets, _joins_the_one_before if self.composes else _never)
        return found.ids, np.maximum.accumulate(np.array(ends, dtype=np.int64))


def align(
    actor: Tokenizer, critic: TextReader, prompt: Sequence[int] | np.ndarray, response: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The critic's tokens of a sample, and which of them speaks of the state before each response token.

    The text is that of all the sample's tokens, special ones included: to the critic they are text, as long as it has no special token of
    the same name. The critic's beginning of sequence is put before it where its tokenizer has one and the text doesn't begin with it.
    Without one, its end of sequence is put there if no critic token lies wholly in the prompt: nothing else could speak of the first
    response token without knowing it.

    Args:
        actor: the tokenizer of the sample's tokens.
        critic: the critic's.
        prompt, response: token ids [P] and [R] of the actor.

    Returns:
        critic ids [n] int32, n of 1 or more; predictors [R] int32, positions among them, never falling. The text of the critic's tokens up
        to ``predictors[t]`` is a beginning of the text of ``prompt`` and ``response[:t]``.

    Raises:
        DataError: nothing can stand at the beginning.
    """
    text, known = _known_text(actor, [int(i) for i in prompt], [int(i) for i in response])
    ids, ends = critic.read(text)
    inside = np.searchsorted(ends, known, side="right")  # critic tokens that lie wholly in the text before each response token
    first = critic.end if critic.begin is None else critic.begin
    at_its_beginning = critic.begin is None or ids[:1] == [critic.begin]
    if not at_its_beginning or not ids or (len(inside) and inside[0] == 0):
        if first is None:
            raise DataError(
                explain(
                    "no token of the critic lies in the text of a prompt",
                    where="critic.retokenize",
                    got=repr(text[:40]),
                    expected="a beginning or an end of sequence of the critic's tokenizer, to put before it",
                    do="set bos_token in tokenizer_config.json of critic.model",
                )
            )
        ids, inside = [first, *ids], inside + 1
    return np.array(ids, dtype=np.int32), (inside - 1).astype(np.int32)


@dataclass(frozen=True)
class Retokeniser:
    """From samples of the actor's tokens to those of the critic's."""

    actor: Tokenizer
    critic: TextReader
    same: bool  # one vocabulary: the critic reads the actor's tokens as they are, whether or not its tokenizer would cut the text so

    @classmethod
    def load(cls, actor: str | Path, critic: str | Path) -> Retokeniser:
        """From two Hugging Face directories. Raises ModelError for one without a fast tokenizer."""
        from transformers import AutoTokenizer

        tokenizers = [AutoTokenizer.from_pretrained(directory, local_files_only=True) for directory in (actor, critic)]
        return cls.of(*tokenizers, same=compare_vocabularies(actor, critic) is None)

    @classmethod
    def of(cls, actor: PreTrainedTokenizerBase, critic: PreTrainedTokenizerBase, *, same: bool) -> Retokeniser:
        """From two tokenizers of transformers. Raises ModelError for one that isn't a fast one."""
        return cls(_backend(actor), TextReader.of(critic), same)

    def sample(self, prompt: np.ndarray, response: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As :func:`align`; of one vocabulary the tokens themselves, each response token after the one before it."""
        if self.same:
            ids = np.concatenate([prompt, response]).astype(np.int32)
            return ids, np.arange(len(prompt) - 1, len(ids) - 1, dtype=np.int32)
        return align(self.actor, self.critic, prompt, response)

    def samples(self, prompts: Ragged, responses: Ragged) -> tuple[Ragged, Ragged]:
        """Critic tokens and predictors of each sample."""
        found = [self.sample(prompts[i], responses[i]) for i in range(len(prompts))]
        return Ragged.from_list([ids for ids, _ in found], np.int32), Ragged.from_list([at for _, at in found], np.int32)


def _known_text(tokenizer: Tokenizer, prompt: list[int], response: list[int]) -> tuple[str, np.ndarray]:
    """The text of all tokens, and [R] int64: how many of its characters are settled before each response token."""
    window = _Window(tokenizer)
    pieces, known, length = [window.add(prompt)], [], 0
    for token in response:
        length += len(pieces[-1])
        known.append(length)
        pieces.append(window.add([token]))
    return "".join([*pieces, window.rest()]), np.array(known, dtype=np.int64)


class _Window:
    """Decodes a sequence as it grows: the last tokens, and how much of their text was given out."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0

    def add(self, ids: list[int]) -> str:
        """The characters that ``ids`` settle. Bytes at the end that are no character may become one, and wait."""
        self._ids += ids
        text = self._decode(self._ids)
        settled = text.rstrip(_UNFINISHED)
        new = settled[self._given :]
        self._given = max(self._given, len(settled))
        if len(self._ids) > _WINDOW and settled == text:
            self._begin_anew()
        return new

    def rest(self) -> str:
        """What waits when nothing follows."""
        return self._decode(self._ids)[self._given :]

    def _begin_anew(self) -> None:
        """With the last token, which says to decoders that the next one isn't the first; not with a part of a character."""
        alone = self._decode(self._ids[-1:])
        if _UNFINISHED not in alone:
            self._ids, self._given = self._ids[-1:], len(alone)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _over_what_normalising_joins(text: str, offsets: Sequence[tuple[int, int]], joins: Callable[[str], bool]) -> list[int]:
    """Ends of tokens in a text that was normalised, over what may be in them though their offsets don't say so.

    NFC makes one character of a letter and the accents behind it, and tells of the letter's place alone; other normalisers join
    characters likewise, which then no token claims. ``joins``: whether a character may become one with the one before it.
    """
    starts = [start for start, _ in offsets[1:]] + [len(text)]
    ends = [end for _, end in offsets]
    for i, following in enumerate(starts):
        while ends[i] < len(text) and ((ends[i] < following and not text[ends[i]].isspace()) or joins(text[ends[i]])):
            ends[i] += 1
    return ends


def _joins_the_one_before(character: str) -> bool:
    """Accents and other marks, and the later letters of a Korean syllable (jamo)."""
    return unicodedata.category(character).startswith("M") or "\u1160" <= character <= "\u11ff"


def _never(character: str) -> bool:
    return False


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    if not tokenizer.is_fast:
        raise ModelError(
            explain(
                "the tokenizer doesn't say which characters its tokens stand for",
                where=f"critic.retokenize: {tokenizer.name_or_path}",
                got=type(tokenizer).__name__,
                expected="a fast tokenizer (tokenizer.json)",
                do="save the directory's tokenizer as a fast one",
            )
        )
    return tokenizer.backend_tokenizer
