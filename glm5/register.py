"""Things that a recipe chooses by name, and how other people's code adds more of them.

A script adds its own with `add` before it runs a recipe; an installed package through an entry point of the register's
group. Recipes, checkpoints and datasets only hold names: nothing in them can make this package import code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from glm5.errors import ConfigError, nearest

T = TypeVar("T")


class Register(Generic[T]):
    """Subclasses of `base` by name. `group` is that of the entry points, `kind` what errors call an entry.

    [project.entry-points."glm5.losses"]     # in the pyproject.toml of another package
    my_loss = "my_package.losses:MyLoss"
    """

    def __init__(self, group: str, kind: str, base: type[T], entries: Mapping[str, type[T]]) -> None:
        self._group, self._kind, self._base, self._entries = group, kind, base, dict(entries)

    def add(self, name: str, entry: type[T]) -> type[T]:
        """Add a class. Raises ConfigError if the name is taken by another or the class is not a subclass of `base`."""
        if self._entries.get(name, entry) is not entry:
            raise ConfigError(f'There already is a {self._kind} named "{name}"; choose another name.')
        if not (isinstance(entry, type) and issubclass(entry, self._base)):
            raise ConfigError(f'The {self._kind} "{name}" must be a subclass of {self._base.__qualname__}.')
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> type[T]:
        """The class of this name; an entry point is imported only now. Raises ConfigError if there is none."""
        if name not in self._entries:
            found = list(entry_points(group=self._group, name=name))
            if not found:
                names = sorted(self)
                raise ConfigError(f'Unknown {self._kind} "{name}"{nearest(name, names)}; known: {", ".join(names)}.')
            try:
                entry = found[0].load()
            except Exception as error:
                raise ConfigError(
                    f'The {self._kind} "{name}" of {found[0].value} cannot be imported: {error}.'
                ) from error
            self.add(name, entry)
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        """All names, those of entry points included."""
        return iter(dict.fromkeys([*self._entries, *entry_points(group=self._group).names]))
