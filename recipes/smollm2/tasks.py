"""The prompts of the recipe: an everyday question and two or three requests on the form of the answer that a program can check.

Questions and requests are written here, so that no data set must be fetched. The held-out questions stand in no training prompt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import combinations
from typing import Any

TRAIN_ROWS, VAL_ROWS = 2048, 256
DATA_SOURCE = "smollm2/form"

QUESTIONS = """
How do I make a good cup of tea?
Why is the sky blue?
How can I fall asleep faster?
What is a good breakfast before a long day?
How do I keep houseplants alive?
Why do we need to drink water?
How can I save money every month?
What should I pack for a weekend trip?
How do bees make honey?
Why do leaves fall in autumn?
How do I boil an egg?
What makes a good friend?
How can I learn a new language?
Why do cats purr?
How do I write a thank-you note?
What is the best way to clean windows?
How does a bicycle stay upright?
Why is sleep important?
How can I make my morning calmer?
What can I cook with rice and beans?
How do I remember people's names?
Why does bread rise?
How can I waste less food?
What is a good gift for a teacher?
How do I fold a shirt?
Why do birds migrate?
How can I read more books?
What should I do when I feel nervous?
How do I start a small garden?
Why is the sea salty?
How do I remove a coffee stain?
What makes a story exciting?
How can I stay warm in winter?
Why do we yawn?
How do I choose a ripe melon?
What is a fair way to share chores?
How do I train a puppy to sit?
Why do we have seasons?
How can I use my phone less?
What is a good hobby for rainy days?
How do I plan a birthday party?
Why does ice float on water?
How can I improve my handwriting?
What should I say in a job interview?
How do I cook pasta well?
Why do some people like spicy food?
How can I be a better listener?
What makes a city pleasant to live in?
How do I take a good photo of a sunset?
Why do we dream?
How can I prepare for an exam?
What is a simple recipe for soup?
How do I fix a flat bicycle tire?
Why is exercise good for the mind?
How can I make new friends in a new town?
What should I know before adopting a dog?
How do magnets work?
Why do onions make us cry?
How can I keep my desk tidy?
What is a good way to say sorry?
How do I grow tomatoes on a balcony?
Why is music so moving?
How can I walk more each day?
What should a first-aid kit contain?
How do rainbows form?
Why do stars twinkle?
How can I speak in front of people without fear?
What is a healthy snack for children?
How do I wash a wool sweater?
Why are trees useful in a city?
How can I get over a bad day?
What makes a good leader?
""".strip().splitlines()

HELD_OUT_QUESTIONS = """
How do I bake simple cookies?
Why do dogs wag their tails?
How can I drink more water?
What should I take to the beach?
How do volcanoes erupt?
Why is reading good for children?
How can I keep a promise to myself?
What is a nice way to greet a neighbor?
How do I clean a wooden table?
Why does the moon change its shape?
How can I save energy at home?
What is a good lunch for a picnic?
How do I calm a crying baby?
Why do we laugh?
How can I learn to swim?
What makes a holiday restful?
""".strip().splitlines()

OPENINGS = ("Well", "First", "Simply", "Usually", "Often", "Sometimes", "Today", "Sure")
WORDS = ("time", "people", "small", "simple", "every", "because", "good", "often", "day", "help", "easy", "water")

Constraint = dict[str, Any]  # kind, and n or word

# kind -> (what it asks, drawn by the generator; how the prompt says it). Only what the model does now and then without training: it
# made no "- " list in 96 answers and one answer in lowercase in 64, and what never happens can't be reinforced.
KINDS: dict[str, tuple[Callable[[random.Random], Constraint], str]] = {
    "at_most_words": (lambda rng: {"n": rng.choice((10, 15, 20, 25, 30))}, "Answer in at most {n} words."),
    "starts_with": (lambda rng: {"word": rng.choice(OPENINGS)}, 'Start with the word "{word}".'),
    "includes": (lambda rng: {"word": rng.choice(WORDS)}, 'Use the word "{word}".'),
    "sentences": (lambda rng: {"n": rng.choice((1, 2, 3))}, "Write exactly {n} sentence{s}."),
    "numbered": (lambda rng: {"n": rng.choice((2, 3))}, "Give a numbered list of exactly {n} short lines."),
    "no_commas": (lambda rng: {}, "Use no commas."),
}
CONTRADICTIONS = ({"sentences", "numbered"}, {"starts_with", "numbered"})
COMBINATIONS = [kinds for size in (2, 3) for kinds in combinations(KINDS, size) if not any(pair <= set(kinds) for pair in CONTRADICTIONS)]


def make_prompt(question: str, constraints: list[Constraint]) -> str:
    """The user's message: the question, then each request as a sentence."""
    said = [KINDS[c["kind"]][1].format(**c, s="" if c.get("n") == 1 else "s") for c in constraints]
    return " ".join([question, *said])


def make_row(question: str, constraints: list[Constraint], split: str, index: int) -> dict[str, Any]:
    """One row in verl's schema; the ground truth is the list of constraints as JSON."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": make_prompt(question, constraints)}],
        "ability": "instruction following",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(constraints)},
        "extra_info": {"split": split, "index": index},
    }


def make_rows(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training, held-out) rows; no two prompts are equal, and the seed decides which they are."""
    rng = random.Random(seed)
    return (
        _distinct_rows(rng, QUESTIONS, "train", TRAIN_ROWS),
        _distinct_rows(rng, HELD_OUT_QUESTIONS, "test", VAL_ROWS),
    )


def _distinct_rows(rng: random.Random, questions: list[str], split: str, count: int) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        constraints = [{"kind": kind, **KINDS[kind][0](rng)} for kind in rng.choice(COMBINATIONS)]
        row = make_row(rng.choice(questions), constraints, split, len(rows))
        rows.setdefault(row["prompt"][0]["content"], row)
    return list(rows.values())
