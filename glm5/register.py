"""Registers of what a recipe chooses by name; other code can add entries.

A script adds its own with `add` before it runs a recipe. An installed package uses an entry point of the register's
group:

    [project.entry-points."glm5.losses"]     # in that package's pyproject.toml
    my_loss = "my_package.losses:MyLoss"

Recipes, checkpoints and datasets contain only names: they cannot make this package import code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from glm5.errors import ConfigError, nearest

T = TypeVar("T")


class Register(MutableMapping[str, type[T]]):
    """Subclasses of `base` by name. `group` is the group of entry points, `kind` the word for an entry in errors."""

    def __init__(self, group: str, kind: str, base: type, entries: Mapping[str, type[T]]) -> None:
        self._group, self._kind, self._base = group, kind, base
        self._entries: dict[str, type[T]] = {}
        for name, entry in entries.items():
            self.add(name, entry)

    def add(self, name: str, entry: type[T]) -> None:
        """Add a class. Raises ConfigError if another class has the name."""
        if self._entries.get(name, entry) is not entry:
            raise ConfigError(f'there is already a {self._kind} named "{name}"; choose another name.')
        self[name] = entry

    def __setitem__(self, name: str, entry: type[T]) -> None:
        if not (isinstance(entry, type) and issubclass(entry, self._base)):
            raise ConfigError(f'the {self._kind} "{name}" must be a subclass of glm5\'s {self._base.__qualname__}.')
        self._entries[name] = entry

    def __getitem__(self, name: str) -> type[T]:
        """The class of this name; imports an entry point only now. Raises ConfigError if there is none."""
        if name not in self._entries:
            found = list(entry_points(group=self._group, name=name))
            if not found:
                known = sorted(self)
                raise ConfigError(
                    f'unknown {self._kind} "{name}"{nearest(name, known)}; choose one of {", ".join(known)}.'
                )
            try:
                entry = found[0].load()
            except Exception as error:
                text = f'the {self._kind} "{name}" ({found[0].value}) cannot be imported: {error}.'
                raise ConfigError(text) from error
            self[name] = entry
        return self._entries[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The class of this name, or `default` if there is none."""
        return self[name] if name in self else default  # noqa: SIM401 - this is `get`

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in set(self)

    def __iter__(self) -> Iterator[str]:
        """All names, including entry points."""
        return iter(dict.fromkeys([*self._entries, *entry_points(group=self._group).names]))

    def __len__(self) -> int:
        return sum(1 for _ in self)
