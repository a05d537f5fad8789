"""Named choices of a recipe that a user's package can add to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from megarl.errors import ConfigError, explain

T = TypeVar("T", bound=Callable)


class Registry(Generic[T]):
    """Functions by name. A module named in the recipe's ``plugins`` adds its own with the decorator :meth:`register`."""

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make the function known as ``name``.

        Raises:
            ConfigError: another function has that name already.
        """

        def add(function: T) -> T:
            known = self._entries.get(name)
            # A plugin imported a second time (reload, two import paths) defines the same function anew: that is no clash.
            if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
                raise ConfigError(
                    explain(
                        f"{self.kind} '{name}' is registered twice",
                        got=f"{function.__module__}.{function.__qualname__}",
                        expected=f"a name other than that of {known.__module__}.{known.__qualname__}",
                        do="register it under another name",
                    )
                )
            self._entries[name] = function
            return function

        return add

    def __getitem__(self, name: str) -> T:
        """The function of that name.

        Raises:
            ConfigError: no such name; the message lists the names known.
        """
        if name not in self._entries:
            raise ConfigError(
                explain(
                    f"unknown {self.kind}",
                    got=repr(name),
                    expected=" | ".join(self.names()),
                    do="correct the name, or list the module that registers it under plugins",
                )
            )
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)
