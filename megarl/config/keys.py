"""The keys of the schema as data: dotted name, type, default and the comment behind the field.

The schema's source is the only place where a key is described; everything that prints or checks keys reads it from here.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from megarl.config import schema
from megarl.config.schema import REQUIRED, Config

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


@dataclass(frozen=True)
class Key:
    """One key of a recipe. ``default`` is ``REQUIRED`` where a value must be given; a group of keys has no default of its own."""

    name: str  # dotted, as an override writes it
    type: Any  # the annotation, resolved
    default: Any
    doc: str

    @property
    def is_group(self) -> bool:
        return is_dataclass(self.type)

    @property
    def required(self) -> bool:
        return self.default == REQUIRED


@lru_cache(maxsize=1)
def all_keys() -> dict[str, Key]:
    """Every key and group of the schema by dotted name, in the schema's order."""
    return {key.name: key for key in _walk(Config, "", Config())}


def field_docs() -> dict[str, str]:
    """``Class.field`` -> the comment at the end of the field's line; fields without one are left out."""
    source = inspect.getsource(schema)
    lines = source.splitlines()
    docs = {}
    for node in ast.parse(source).body:
        for item in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                _, found, comment = lines[item.end_lineno - 1][item.end_col_offset :].partition("#")
                if found and comment.strip():
                    docs[f"{node.name}.{item.target.id}"] = comment.strip()
    return docs


def type_name(hint: Any) -> str:
    """A type as a reader of YAML would say it."""
    if is_dataclass(hint):
        return "group of keys"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else type_name(arg) for arg in get_args(hint))
    if get_origin(hint) is tuple:
        args = get_args(hint)
        return f"list of {type_name(args[0])}" if args[-1] is ... else f"list of {len(args)} {type_name(args[0])}"
    return str(hint.__name__)


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe, for editors. Required keys are not demanded, since ``extends:`` may bring them."""
    root = _json_of(Config, "")
    extends = {"type": "string", "description": "recipe that this one builds on, relative to this file"}
    root["properties"] = {"extends": extends} | root["properties"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "megarl recipe"} | root


def _walk(cls: type, prefix: str, defaults: Any) -> Iterator[Key]:
    hints, docs = get_type_hints(cls), field_docs()
    for item in fields(cls):
        name, hint = prefix + item.name, hints[item.name]
        default = getattr(defaults, item.name)
        doc = docs.get(f"{cls.__name__}.{item.name}") or _class_doc(hint, item)
        yield Key(name, hint, default, doc)
        if is_dataclass(hint):
            yield from _walk(hint, name + ".", default)


def _class_doc(hint: Any, item: Field) -> str:
    """A group of the top level needs no comment: its keys say what it holds."""
    return f"keys of {item.name}" if is_dataclass(hint) and item.default is MISSING else ""


def _json_of(hint: Any, prefix: str) -> dict[str, Any]:
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        properties = {f.name: _json_of(hints[f.name], f"{prefix}{f.name}.") for f in fields(hint)}
        node: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    elif get_origin(hint) in (Union, types.UnionType):
        node = {"type": [_JSON_TYPES.get(arg, "null") for arg in get_args(hint)]}
    elif get_origin(hint) is tuple:
        node = {"type": "array", "items": {"type": _JSON_TYPES[get_args(hint)[0]]}}
    else:
        node = {"type": _JSON_TYPES[hint]}
    key = all_keys().get(prefix[:-1])
    return node | ({"description": key.doc} if key else {})
