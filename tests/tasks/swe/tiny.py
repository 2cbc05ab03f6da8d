"""A small package with tests, as a repository of the factory; its tests run with the pytest of this environment."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

from glm5.tasks.swe.candidate import Repository
from glm5.tasks.swe.repositories import from_tree

CLIP = '''\
"""Numbers in ranges."""


def clip(x, low, high):
    """x, but not less than low and not more than high."""
    if x < low:
        return low
    if x > high:
        return high
    return x


def spread(numbers):
    """The largest difference of two numbers."""
    numbers = list(numbers)
    if not numbers:
        return 0
    first = max(numbers)
    second = min(numbers)
    return first - second


def words(text, sep=","):
    """The parts of a text without blanks around them."""
    return [part.strip() for part in text.split(sep) if part.strip()]
'''
TESTS = """\
import pytest

from tiny.ranges import clip, spread, words


@pytest.mark.parametrize("x, want", [(1, 2), (3, 3), (9, 5)])
def test_clip(x, want):
    assert clip(x, 2, 5) == want


def test_clip_edges():
    assert clip(2, 2, 5) == 2
    assert clip(5, 2, 5) == 5


class TestSpread:
    def test_empty(self):
        assert spread([]) == 0

    def test_some(self):
        assert spread([3, 9, 4]) == 6


def test_words():
    assert words(" a, b ,,c") == ["a", "b", "c"]
    assert words("a;b", ";") == ["a", "b"]
"""


@functools.cache
def site(*more: str) -> str:
    """A folder with this environment's pytest and `more`. Not below /tmp, which a verifier room has its own of."""
    folder = Path(tempfile.mkdtemp(prefix="glm5-site-", dir="/var/tmp"))
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("_pytest", "pytest", "pluggy", "iniconfig", "packaging", "pygments", "py", *more):
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None
        if found.submodule_search_locations:
            shutil.copytree(found.submodule_search_locations[0], folder / name)
        else:
            shutil.copy(found.origin, folder)
    return str(folder)


def tiny(root: Path, source: str = CLIP, tests: str = TESTS) -> Repository:
    """Write the package below `root`."""
    files = {"tiny/__init__.py": "", "tiny/ranges.py": source, "tests/test_ranges.py": tests, "setup.py": "x = 1\n"}
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return from_tree(root, "tiny", "1.0", "MIT", "test", (site(),))


def git(repo: Path, *arguments: str, stdin: bytes = b"") -> str:
    command = ["git", "-C", str(repo), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
    return subprocess.run(command, check=True, capture_output=True, input=stdin).stdout.decode().strip()


def commit(repo: Path, message: str, files: dict[str, str]) -> None:
    for path, text in files.items():
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        (repo / path).write_text(text)
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", message)
