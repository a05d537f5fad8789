"""Small tokenizers of several kinds, built here and now: nothing is downloaded."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

END = "<|im_end|>"
TEXT = [
    "hello there, said the newt to the other newt. \n\n it rained",
    "caf\u00e9 na\u00efve \u00fcber e\u0301 \U0001f600\U0001f680 \u4f60\u597d",
] * 4


def byte_level(
    size: int, *, normalizer: Any = None, trim: bool = False, across: bool = False, special: tuple[str, ...] = (END,), **names: str
) -> Any:
    """GPT-2's kind: every byte is a token, and so are some words. ``trim``: its post-processor takes spaces off the offsets. ``across``:
    tokens end where they like, behind a space as well.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not across)
    made.decoder = decoders.ByteLevel()
    if trim:
        made.post_processor = processors.ByteLevel(trim_offsets=True)
    if normalizer is not None:
        made.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    made.train_from_iterator(TEXT, trainer)
    made.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def comma_and_space() -> Any:
    """Every byte, and one token of two that GPT-2's cut of a text would never make; spaces are taken off the offsets."""
    vocab = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), ",\u0120"])}
    made = Tokenizer(models.BPE(vocab, [(",", "\u0120")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def sentence_pieces() -> Any:
    """Llama 2's kind: spaces are part of words, the first of a text is dropped on decoding, and unknown characters are bytes."""
    alphabet = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abcdehilnortw.,"]
    merges = [("h", "e"), ("t", "he"), ("\u2581", "the"), ("\u2581", "n"), ("e", "w"), ("\u2581n", "ew")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def pieces_with_scores() -> Any:
    """A unigram model over the same text, with spaces as parts of words."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator(TEXT, trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<unk>")


def words() -> Any:
    """A word a token; a word that is not in the list is unknown, and spaces are nobody's."""
    made = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "newt": 2, "the": 3}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def byte_values() -> dict[str, int]:
    """Byte-level tokenizers write each byte as a visible character: those that are visible as themselves, the others from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(others)}


def bytes_of(tokenizer: Any, ids: list[int]) -> bytes:
    """What a byte-level tokenizer's tokens stand for."""
    values, special = byte_values(), set(tokenizer.get_added_vocab())
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return b"".join(t.encode() if t in special else bytes(values[c] for c in t) for t in tokens)
