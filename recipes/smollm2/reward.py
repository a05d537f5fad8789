"""Reward of recipes/smollm2-135m-cpu.yaml, in verl's signature: the share of the prompt's requests that the answer fulfils.

Each request is checked exactly, by the rules below and without a model. An answer without a word fulfils none, though it is short
and has no comma: otherwise the shortest way to a reward would be to say nothing. Whether the answer is true or helpful isn't judged; the KL
penalty is what keeps the model near its own way of answering.
"""

import json
import re

WORD = re.compile(r"\w+(?:['’]\w+)*")  # "don't" is one word, "well-known" two: a chain of hyphens must not make a long answer short
# With what closes around it; the point of "3.5" ends nothing. Looked for once in a row of points, so that many of them take no longer.
SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]]*+(?=\s|$)")
COMMAS = ",，、،"


def words(text):
    """What has a letter: neither a number nor a line of "_" is a word."""
    return [found for found in WORD.findall(text) if any(character.isalpha() for character in found)]


def at_most_words(text, n):
    return len(words(text)) <= n


def starts_with(text, word):
    """The first word, whatever its capitals, with nothing before it."""
    return text.lstrip()[: len(words(text)[0])].casefold() == word.casefold()


def includes(text, word):
    return word.casefold() in (found.casefold() for found in words(text))


def sentences(text, n):
    """So many sentences, each with a word in it and the last of them at the end of the answer."""
    text = text.strip()
    ends = [end.end() for end in SENTENCE_END.finditer(text)]
    parts = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return len(ends) == n and ends[-1] == len(text) and all(words(part) for part in parts)


def numbered(text, n):
    """So many lines, the first of which starts with "1. ", the next with "2. " and so on; empty lines don't count."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return len(lines) == n and all(line.startswith(f"{i}. ") and words(line[len(f"{i}. ") :]) for i, line in enumerate(lines, start=1))


def no_commas(text):
    return not any(comma in text for comma in COMMAS)


CHECKS = {check.__name__: check for check in (at_most_words, starts_with, includes, sentences, numbered, no_commas)}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score one answer.

    ``solution_str`` is the decoded response without special tokens, ``ground_truth`` a JSON list of {kind, and n or word}. Returns
    ``score`` in [0, 1], ``all_met`` (1.0 or 0.0), and ``words``, the length of the answer. Raises KeyError for an unknown kind.
    """
    met = []
    for constraint in json.loads(ground_truth):
        arguments = {name: value for name, value in constraint.items() if name != "kind"}
        check = CHECKS[constraint["kind"]]
        met.append(bool(words(solution_str)) and bool(check(solution_str, **arguments)))
    return {"score": sum(met) / len(met), "all_met": float(all(met)), "words": float(len(words(solution_str)))}
