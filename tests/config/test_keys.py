"""The schema describes itself fully, and nothing in it is idle."""

import ast
from pathlib import Path

import megarl
from megarl.config.checks import CHOICES, RANGES, REGISTERED
from megarl.config.keys import all_keys, field_docs, json_schema

PACKAGE = Path(megarl.__file__).parent

# Keys that no code reads yet. The list may only shrink: a key that is read, or gone from the schema, must leave it.
UNREAD: frozenset[str] = frozenset()


def attributes_read() -> set[str]:
    """Names read as ``something.name`` anywhere outside the configuration itself: a check of a key is no use of it."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "config":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    return found


def test_every_key_is_read() -> None:
    read = attributes_read()
    unread = {name for name in all_keys() if name.rpartition(".")[2] not in read}
    assert unread == UNREAD


def test_every_field_has_a_comment() -> None:
    docs = field_docs()
    undocumented = [name for name, key in all_keys().items() if not key.doc]
    assert undocumented == []
    assert docs["RunConfig.seed"].startswith("decides data order") and len(docs) > 80


def test_choices_are_named_in_the_comments() -> None:
    for key, choices in CHOICES.items():
        assert [c for c in choices if c not in all_keys()[key].doc] == [], key


def test_every_number_and_every_choice_is_checked() -> None:
    numbers = {name for name, key in all_keys().items() if key.type in (int, float)}
    elsewhere = {"warm_start.stop_reward_min", "warm_start.stop_reward_max"}  # compared with each other
    assert numbers - set(RANGES) == elsewhere
    assert set(RANGES) | set(CHOICES) | set(REGISTERED) <= set(all_keys())


def test_json_schema_lists_every_key() -> None:
    schema = json_schema()

    def names(node: dict, prefix: str) -> set[str]:
        found = set()
        for name, child in node.get("properties", {}).items():
            found |= {prefix + name} | names(child, f"{prefix}{name}.")
        return found

    assert names(schema, "") == set(all_keys()) | {"extends"}
    assert schema["properties"]["actor"]["properties"]["optim"]["properties"]["betas"]["items"] == {"type": "number"}
    assert schema["properties"]["reference"]["type"] == ["string", "null"]
