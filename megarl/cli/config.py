"""What ``megarl config list`` and ``megarl config help`` print."""

from __future__ import annotations

from megarl.config.checks import CHOICES, RANGES, REGISTERED
from megarl.config.keys import Key, all_keys, type_name
from megarl.config.load import nearest
from megarl.errors import ConfigError, explain


def list_keys(prefix: str = "") -> list[str]:
    """One line a key below ``prefix``: name, default or "required", meaning."""
    keys = [key for key in all_keys().values() if not key.is_group and key.name.startswith(prefix)]
    width = max(len(key.name) for key in keys)
    values = max(len(_default(key)) for key in keys)
    return [f"{key.name:<{width}}  {_default(key):<{values}}  {key.doc}" for key in keys]


def explain_key(name: str) -> list[str]:
    """All that is known of a key, or the list of a group's keys. Raises ConfigError for an unknown one, naming the nearest."""
    if name not in all_keys():
        near = nearest(name, list(all_keys()))
        raise ConfigError(explain(f"unknown key {name}", do=f"did you mean {near}?" if near else "see `megarl config list`"))
    key = all_keys()[name]
    if key.is_group:
        return [f"{name}: {key.doc}", "", *list_keys(name + ".")]
    lines = [f"{name}: {key.doc}", f"  type:    {type_name(key.type)}", f"  default: {_default(key)}"]
    choices = CHOICES.get(name) or REGISTERED.get(name)
    if choices:
        more = ", or what a plugin registers" if name in REGISTERED else ""
        lines.append(f"  choices: {' | '.join(choices)}{more}")
    if name in RANGES:
        lines.append(f"  range:   {RANGES[name][1]}")
    return lines


def _default(key: Key) -> str:
    if key.required:
        return "required"
    if isinstance(key.default, tuple):
        return f"[{', '.join(str(item) for item in key.default)}]"
    if key.default is None or isinstance(key.default, bool):
        return {None: "null", True: "true", False: "false"}[key.default]
    return str(key.default)
