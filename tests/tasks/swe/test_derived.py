"""The two tasks that come with a repair task: write the test, pick the patch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5.tasks.swe.derived import TEST_FILE, pick_patch, write_test
from glm5.tasks.swe.driver import APP, DRIVERS, open_room
from glm5.tasks.swe.folder import read_tests
from glm5.tasks.swe.grading import grade
from glm5.tasks.swe.validate import Baseline, Rules, baseline, validate
from tests.rooms import needs_rooms
from tests.tasks.swe.test_build import bug
from tests.tasks.swe.tiny import CLIP, tiny

pytestmark = [needs_rooms, pytest.mark.slow]
DRIVER = DRIVERS["python"]
RIGHT = "from tiny.ranges import clip\n\n\ndef test_it():\n    assert clip(9, 2, 5) == 5\n"
BY_TEXT = "import tiny.ranges as r\n\n\ndef test_it():\n    assert open(r.__file__).read() != {bug!r}\n"
BY_TREE = """
import ast, tiny.ranges


def known(text):
    return {n.name: ast.dump(n) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}


def test_it():
    with open(tiny.ranges.__file__) as file:
        assert known(file.read()) != known({bug!r})
"""
BY_STATES = """
import os, tiny.ranges


def test_it():
    with open(tiny.ranges.__file__) as file:
        text = file.read()
    for folder, _, names in os.walk("/tests"):
        for path in (os.path.join(folder, name) for name in names if "/bug" in folder):
            assert open(path).read() != text
"""
BUG = CLIP.replace("return high", "return low", 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("derived")
    repository = tiny(out / "package")
    clean: Baseline = baseline(repository, DRIVER, Rules(clean_runs=1))
    candidate = bug(repository, "return high", "return low")
    validate(candidate, clean, DRIVER, Rules(twins=1), out / "repair")
    write_test(candidate, out / "repair", out / "write")
    pick_patch(candidate, clean, DRIVER, out / "repair", out / "pick")
    return out


def reward(folder: Path, files: dict[str, str]) -> float:
    site = tiny(folder.parent / "package").site
    with open_room(folder / "environment/repo", site) as room:
        room.upload({f"{APP}/{path}": text.encode() for path, text in files.items()})
        return float(grade(room, read_tests(folder), site)["reward"])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (RIGHT, 1.0),
        (RIGHT.replace("== 5", "== 2"), 0.0),  # passes with the bug
        (RIGHT.replace("== 5", "== 4"), 0.0),  # fails always
        (RIGHT.replace("== 5", "== 5 and False"), 0.0),
        ("raise ImportError\n", 0.0),
        ("import os\nos._exit(1)\n", 0.0),
        ("x = 1\n", 0.0),
        (BY_TEXT.format(bug=BUG), 0.0),
        (BY_TREE.replace("{bug!r}", repr(BUG)), 0.0),
        (BY_STATES, 0.0),
        ("import pytest\n\n\ndef test_it():\n    pytest.skip()\n", 0.0),
    ],
)
def test_a_test_is_graded_on_both_states(made: Path, text: str, wanted: float) -> None:
    assert reward(made / "write", {TEST_FILE: text}) == wanted


def test_the_source_that_an_agent_changed_does_not_matter(made: Path) -> None:
    assert reward(made / "write", {TEST_FILE: RIGHT, "tiny/ranges.py": "def clip(*a):\n    return 5\n"}) == 1.0


def test_the_right_letter(made: Path) -> None:
    answer = json.loads((made / "pick/tests/tests.json").read_bytes())["answer"]
    patches = sorted((made / "pick/environment/patches").iterdir())
    assert [path.name for path in patches] == ["a.patch", "b.patch", "c.patch", "d.patch"]
    assert len({path.read_text() for path in patches}) == 4
    assert reward(made / "pick", {"answer.txt": answer + "\n"}) == 1.0
    assert reward(made / "pick", {"answer.txt": "abcd".replace(answer, "")[0]}) == 0.0
    assert reward(made / "pick", {"answer.txt": "a b c d"}) == 0.0
    assert "a.patch" in (made / "pick/instruction.md").read_text()
    assert not (made / "pick/solution/fix.patch").exists()
