"""Which test files a change can reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from glm5.tasks.swe.candidate import Candidate
from glm5.tasks.swe.impact import changed_functions, reached
from tests.tasks.swe.tiny import CLIP, tiny

CALLS = {"": ["tiny/ranges.py:words"], "tests/test_a.py": ["tiny/ranges.py:clip"], "tests/test_b.py": []}


def candidate(root: Path, text: str | None) -> Candidate:
    repository = replace(tiny(root), test_files=("tests/test_a.py", "tests/test_b.py"))
    return Candidate(repository, "mutate", {"tiny/ranges.py": text})


def test_a_change_inside_a_function_reaches_its_callers(tmp_path: Path) -> None:
    clip = candidate(tmp_path, CLIP.replace("return high", "return low"))
    assert changed_functions(clip) == {"tiny/ranges.py:clip"}
    assert reached(clip, CALLS) == ("tests/test_a.py",)
    assert reached(candidate(tmp_path, CLIP.replace("max(", "min(")), CALLS) == ()


def test_files_that_import_a_change_are_run_if_the_calls_do_not_tell(tmp_path: Path) -> None:
    both = ("tests/test_a.py", "tests/test_b.py")
    text = CLIP.replace("return high", "return low")
    called_by_an_import = candidate(tmp_path, CLIP.replace("part.strip() for", "part for"))
    tests = {
        "tests/test_a.py": "from tiny import ranges",
        "tests/test_b.py": "import tiny.other",
        "tests/conftest.py": "",
        "tiny/other.py": "import math",
    }
    others = [candidate(tmp_path, new) for new in (CLIP.replace("x, low", "x, low=0"), CLIP + "\n\nclip = 1\n", None)]
    imports = {
        "tests/test_b.py": {"": 1, "import tiny.far": 1, "import tiny.ranges": 2, "from importlib import reload": 2},
        "tests/conftest.py": {"from tiny.ranges import clip": 2},
        "tiny/other.py": {"from . import ranges": 2, "from .ranges import clip": 2, "import tiny.ranges as r": 2},
        "tiny/__init__.py": {"from .ranges import *": 2},
    }
    for file, texts in imports.items():
        for line, count in texts.items():
            root = tmp_path / f"{file.replace('/', '-')}-{abs(hash(line))}"
            for change in (called_by_an_import, *others):
                found = replace(change, repository=replace(change.repository, root=root))
                for name, whole in {**tests, "tiny/__init__.py": "", "tiny/ranges.py": CLIP, file: line}.items():
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    (root / name).write_text(whole)
                assert reached(found, CALLS) == both[:count], (file, line)
    assert reached(candidate(tmp_path, text), None) == both


def test_java_tests_that_name_a_changed_class(tmp_path: Path) -> None:
    """Or a class that names it. Names of packages, methods and comments do not matter, those of classes do."""
    texts = {
        "src/Inner.java": "class Inner {}",
        "src/Outer.java": "class Outer { Inner inner; }",
        "src/Far.java": "class Far {}",
        "tests/InnerTest.java": "class InnerTest { Inner x; }",
        "tests/OuterTest.java": "class OuterTest extends Base {}",
        "tests/Base.java": "class Base { Outer y; }",
        "tests/FarTest.java": "class FarTest { Far far; int inner; }",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    tests = tuple(sorted(name for name in texts if name.endswith("Test.java")))
    java = replace(tiny(tmp_path / "tiny"), root=tmp_path, language="java", test_files=tests)

    def found(path: str) -> list[str]:
        return [Path(file).stem for file in reached(Candidate(java, "mutate", {path: "class X {}"}), None)]

    assert found("src/Inner.java") == ["InnerTest", "OuterTest"]
    assert found("src/Outer.java") == ["OuterTest"]
    assert found("src/Far.java") == ["FarTest"]
