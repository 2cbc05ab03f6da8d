"""The documents keep their word: every path they name exists, and so does every make target."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TOP = ("glm5", "tests", "recipes", "docs", "benchmarks", "examples", ".ci")
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("**/*.md"))
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`([^`\n]+)`", re.DOTALL)
_PATH = re.compile(
    rf"(?<![\w./-])(?:{'|'.join(map(re.escape, TOP))})/[\w./*-]*|\b[\w-]+\.(?:md|toml|lock)\b|\bMakefile\b"
)
_MAKE = re.compile(r"(?:^|[`\s;&])make ((?:[a-z][a-z-]* ?)+)", re.MULTILINE)
# Made by runs or meant as a pattern, not part of the repository.
_PRODUCED = {"recipe.toml", "instruction.md", "task.toml", "tests/test.sh"}


def named_paths(text: str) -> set[str]:
    """Relative link targets, and what looks like one of our paths inside code spans."""
    links = {target.partition("#")[0] for target in _LINK.findall(text) if "://" not in target}
    spans = [match[1] for match in _CODE.finditer(text) if match[1]]
    code = {found.rstrip(".") for span in spans for found in _PATH.findall(span)}
    return {path for path in links | code if path} - _PRODUCED


def missing_paths(text: str, folder: Path) -> list[str]:
    def exists(path: str) -> bool:
        bases = (ROOT, folder)
        return any(any(base.glob(path)) if "*" in path else (base / path).exists() for base in bases)

    return sorted(path for path in named_paths(text) if not exists(path))


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


def missing_targets(text: str) -> list[str]:
    code = "\n".join(match[0] for match in _CODE.finditer(text))
    named = {word for words in _MAKE.findall(code) for word in words.split()}
    return sorted(named - make_targets())


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_path_named_exists(document: Path) -> None:
    if not document.exists():
        pytest.skip("not written yet")
    assert missing_paths(document.read_text(encoding="utf-8"), document.parent) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_make_target_named_exists(document: Path) -> None:
    if not document.exists():
        pytest.skip("not written yet")
    assert missing_targets(document.read_text(encoding="utf-8")) == []


def test_the_checks_find() -> None:
    text = "[a](docs/none.md#top) [b](https://x.org/y) [c](#here) `glm5/none.py::f` `glm5/errors.py` none.md `none.md`"
    assert missing_paths(text, ROOT) == ["docs/none.md", "glm5/none.py", "none.md"]
    assert missing_paths("`glm5/obs/*.py` `glm5/none/*.py` `runs/laptop/final` `/abs/glm5/x.py`", ROOT) == [
        "glm5/none/*.py"
    ]
    text = "we make sure; `make setup test` `make nonsense`\n```\nmake lint\ncd x && make absent\n```\n"
    assert missing_targets(text) == ["absent", "nonsense"]


def test_the_makefile_declares_what_it_has() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    declared = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert set(declared[0].split()) == make_targets()
    promised = {"setup", "test", "test-all", "demo", "smoke", "serve", "lint", "bench", "clean"}
    assert promised <= make_targets()
    assert make_targets() <= set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE)), "`make help` lists all targets"


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("paper")


def test_the_page_of_claims_is_that_of_the_results(paper: Any) -> None:
    made = ".venv/bin/python docs/paper.py makes it anew"
    assert (ROOT / "docs" / "paper.md").read_text(encoding="utf-8") == paper.page(), made
    results = {path.parent.name for path in (ROOT / "docs" / "results").glob("*/card.md")}
    assert {claim["card"] for claim in paper.claims() if "card" in claim} == results


def test_a_claim_has_one_answer(paper: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "HERE", tmp_path)
    for answers in ("", 'built = "x"\nmissing = "y"', 'built = "x"\nother = "y"', 'built = "x"\nsince = "y"'):
        (tmp_path / "claims.toml").write_text(f'[[claims]]\nsection = "s"\nclaim = "c"\n{answers}\n')
        with pytest.raises(ValueError, match="one of card"):
            paper.claims()


def test_the_tables_of_swe_tasks_are_those_of_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    swe = importlib.import_module("swe")
    made = ".venv/bin/python docs/swe.py makes them anew"
    assert (ROOT / "docs" / "results" / "swe" / "README.md").read_text(encoding="utf-8") == swe.page(), made
