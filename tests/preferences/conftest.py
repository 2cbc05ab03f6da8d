"""A store of pairs, and its page in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5.preferences.app import create_app
from glm5.preferences.rows import Pair
from glm5.preferences.store import PreferenceStore
from tests.pages import Served, browser

__all__ = ["browser"]

LONG = "averyverylongword" * 12


def some_pairs(count: int) -> list[Pair]:
    """Pairs with long lines, long words and markup, which the page must show as text."""
    found = []
    for i in range(count):
        good = f"Good answer {i}. " + "It says what tea is. " * (3 + 9 * (i % 2))
        bad = f"Bad answer {i} <script>document.title = 'hacked'</script> {LONG}\n\nsecond paragraph"
        both = (good, bad) if i % 2 else (bad, good)
        found.append(Pair(f"Request {i}: say something about <b>tea</b>.", *both, "quality/story"))
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PreferenceStore]:
    with PreferenceStore(tmp_path / "votes.sqlite") as store:
        store.add_pairs(some_pairs(4))
        yield store


class Restarted:
    """The page of a store file. `stop` and `start` are a restart of the command on the same port."""

    def __init__(self, path: Path) -> None:
        self.path, self.port = path, 0
        self.start()

    @property
    def url(self) -> str:
        return self._served.url

    def start(self) -> None:
        self.store = PreferenceStore(self.path)
        self._served = Served(create_app(self.store, "Proposed"), self.port)
        self.port = self._served.port

    def stop(self) -> None:
        self._served.stop()
        self.store.__exit__()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Restarted]:
    path = tmp_path / "votes.sqlite"
    with PreferenceStore(path) as store:
        store.add_pairs(some_pairs(4))
    served = Restarted(path)
    yield served
    served.stop()
