"""Registers of what a recipe chooses by name; other code can add entries.

A script adds its own with `add` before it runs a recipe. An installed package uses an entry point of the register's
group:

    [project.entry-points."glm5.losses"]     # in that package's pyproject.toml
    my_loss = "my_package.losses:MyLoss"

Recipes, checkpoints and datasets contain only names: they cannot make this package import code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from glm5.errors import ConfigError, nearest

T = TypeVar("T")


class Register(MutableMapping[str, type[T]]):
    """Subclasses of `base` by name. `group` is the group of entry points, `kind` the word for an entry in errors."""

    def __init__(self, group: str, kind: str, base: type, entries: Mapping[str, type[T]]) -> None:
        self._group, self._kind, self._base = group, kind, base
        self._entries: dict[str, type[T]] = {}
        self._unique: set[str] = set()  # names that are known to be no other package's
        for name, entry in entries.items():
            self.add(name, entry)

    def add(self, name: str, entry: type[T]) -> None:
        """Add a class. Raises ConfigError for a name that another class has."""
        if self._entries.get(name, entry) is not entry:
            raise ConfigError(f'there is already a {self._kind} named "{name}"; choose another name.')
        self[name] = entry

    def make(self, name: str, call: Callable[[type[T]], T], options: Mapping[str, Any]) -> T:
        """`call(class of this name)`. Raises ConfigError for `options` that the class refuses."""
        entry = self[name]
        try:
            return call(entry)
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            given, known = ", ".join(options) or "none", _options(entry)
            for option in options:
                if known and option not in known:
                    text = f'{self._kind} "{name}" has no option "{option}"{nearest(option, known)}'
                    raise ConfigError(f"{text}; it has {', '.join(known)}.") from error
            raise ConfigError(f'{self._kind} "{name}": {error}; options given: {given}.') from error

    def __setitem__(self, name: str, entry: type[T]) -> None:
        if not (isinstance(entry, type) and issubclass(entry, self._base)):
            raise ConfigError(f'the {self._kind} "{name}" must be a subclass of glm5\'s {self._base.__qualname__}.')
        if missing := sorted(getattr(entry, "__abstractmethods__", ())):
            raise ConfigError(f'the {self._kind} "{name}" ({_path(entry)}) must define {", ".join(missing)}.')
        self._entries[name] = entry
        self._unique.discard(name)

    def __getitem__(self, name: str) -> type[T]:
        """The class of this name; imports an entry point only now. Raises ConfigError unless exactly one has it."""
        if name not in self._unique:
            self._find(name)
            self._unique.add(name)
        return self._entries[name]

    def _find(self, name: str) -> None:
        own = [_path(self._entries[name])] if name in self._entries else []
        found = {point.value: point for point in entry_points(group=self._group, name=name)}
        paths = list(dict.fromkeys([*own, *found]))
        if not paths:
            known = sorted(self)
            raise ConfigError(f'unknown {self._kind} "{name}"{nearest(name, known)}; choose one of {", ".join(known)}.')
        if len(paths) > 1:
            text = f'there is more than one {self._kind} named "{name}" ({", ".join(paths)})'
            raise ConfigError(f"{text}; rename or uninstall the others.")
        if own:
            return
        try:
            entry = found[paths[0]].load()
        except Exception as error:
            raise ConfigError(f'the {self._kind} "{name}" ({paths[0]}) cannot be imported: {error}.') from error
        self[name] = entry

    def get(self, name: str, default: Any = None) -> Any:
        """The class of this name, or `default`."""
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


def _options(entry: type) -> list[str]:
    """The keyword arguments of a class, or none if it takes any."""
    parameters = inspect.signature(entry).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return []
    return [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]


def _path(entry: type) -> str:
    """A class as an entry point names it."""
    return f"{entry.__module__}:{entry.__qualname__}"
