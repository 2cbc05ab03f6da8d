"""SWE rows, formulas, templates and scores in whole corpora: accounts add up, and workers change nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from glm5.data.corpus.scores import corpus_documents, hash_of, write_scores
from glm5.data.documents import Document
from tests.data.swe.test_swe_rows import LONG, PATCH, commit, package
from tests.data.test_corpus_formats import tar
from tests.data.test_corpus_generated import page as template_page
from tests.data.test_git import git
from tests.external.corpora import documents, page, prose, run, shards
from tests.external.environments import interpreter

pytestmark = pytest.mark.slow
LICENSE = "Permission is hereby granted, free of charge, to any person obtaining a copy of this software.\n"


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of datatrove's environment. It has our packages."""
    return interpreter("datatrove", ours=True)


def repository(root: Path) -> None:
    root.mkdir()
    git(root, "init", "-q")
    files: dict[str, str | None] = {f"m{n}.py": f"def f{n}(x):\n    return x + {n}\n" for n in range(5)}
    commit(root, "Start", files | {"LICENSE": LICENSE})
    for n in range(12):  # rows of one repository have nearly all their text in common, and are no duplicates
        words = prose(n, 2).replace("\n", " ")
        commit(root, f"Change {n % 5}\n\n{words}", {f"m{n % 5}.py": f"def f(x):\n    return x - {n}\n"})
    commit(root, f"Seen before\n\n{prose(99, 2)}", {"m0.py": "def f(x):\n    return 0\n"})
    commit(root, "Change 3\n\nToo short", {"m0.py": "def f(x):\n    return 1\n"})


def test_changes_are_rows_of_their_own_kind(python: Path, tmp_path: Path) -> None:
    repository(tmp_path / "repo")
    main = "".join(f"int {'ab'[n % 2]}{n - n % 2 + 1};\n" for n in range(40))
    files = {"src/main.c": main, "src/two.c": "int record;\n", "src/three.c": "int x;\n"}
    package(tmp_path / "dsc", {"1.patch": PATCH.format(at=1, long=LONG)}, files)
    (tmp_path / "problems.jsonl").write_text(json.dumps({"text": prose(99, 2)}) + "\n")
    text = f"""name = "t"
tasks = 3
[[sources]]
name = "history"
path = "git:{tmp_path}/repo"
[sources.changes]
[[sources]]
name = "debian"
path = "{tmp_path}/dsc"
[sources.changes]
[filters]
licenses = ["permissive"]
problems = ["{tmp_path}/problems.jsonl"]
"""
    (tmp_path / "r.toml").write_text(text)
    found = run(python, tmp_path / "r.toml", tmp_path / "one", "--workers", "1")
    assert found["steps"]["read"]["reasons"] == {"description_short": 1}
    assert found["steps"]["filter"]["reasons"] == {"contaminated": 1}
    assert found["kept"] == 13 and found["kept_by"]["kind"] == {"swe": 13}
    assert found["swe"]["changed_files_whole"] == 14 and found["swe"]["related_files"] > 0
    kept = list(documents(tmp_path / "one", "swe"))
    assert {known["license"] for _, _, known in kept} == {"MIT"}
    assert sum("Diff:\ndiff --git" in text for _, text, _ in kept) == 13
    again = run(python, tmp_path / "r.toml", tmp_path / "two", "--workers", "2")
    assert again == found and shards(tmp_path / "one") == shards(tmp_path / "two")


def code(draw: random.Random, functions: int) -> str:
    return "".join(f"def f{draw.randrange(10**6)}(x):\n    return x + {draw.random()}\n\n" for _ in range(functions))


def test_all_of_a_repository_is_on_one_side(python: Path, tmp_path: Path) -> None:
    """As rows, as files of a commit and of an archive. A fork has a file that resembles one in training, so all of it
    moves there."""
    sides: dict[bool, list[str]] = {True: [], False: []}
    for name in (f"lib{n}" for n in range(1000)):
        sides[Document(f"repository {name}", "").held_out].append(name)
    held_out, fork, other = *sides[True][:2], sides[False][0]
    (tmp_path / "archives").mkdir()
    text = f'[[sources]]\nname = "archives"\npath = "{tmp_path}/archives"\n'
    for name in (held_out, fork, other):
        root = tmp_path / name
        root.mkdir()
        git(root, "init", "-q")
        files = {f"m{n}.py": code(random.Random(f"{name} {n}"), 40) for n in range(4)}
        if name != held_out:
            files["m0.py"] = code(random.Random("common"), 30) + code(random.Random(name), 10)
        commit(root, "Start", dict(files))
        for n in range(3):
            words = prose(ord(name[-1]) + 7 * n, 2).replace("\n", " ")
            commit(root, f"Change {n}\n\n{words}", {"m1.py": f"{files['m1.py']}# {name} {n}\n"})
        archive = tar({"x/extra.py": code(random.Random(f"{name} extra"), 40).encode()})
        (tmp_path / "archives" / f"{name}-1.0.tar.gz").write_bytes(archive)
        for kind, more in (("rows", "[sources.changes]\n"), ("files", "")):
            text += f'[[sources]]\nname = "{kind}-{name}"\npath = "git:{root}"\n{more}'
    (tmp_path / "r.toml").write_text(f'name = "t"\ntasks = 3\n{text}')
    found = run(python, tmp_path / "r.toml", tmp_path / "out", "--workers", "2")
    split: dict[str, dict[str, list[str]]] = {}
    for kind in ("swe", "code"):
        for side, _, known in documents(tmp_path / "out", kind):
            split.setdefault(known["repository"], {}).setdefault(side, []).append(kind)
    assert {name: list(side) for name, side in split.items()} == {
        held_out: ["held_out"], fork: ["train"], other: ["train"]
    }  # fmt: skip
    for side in split.values():
        assert sorted(next(iter(side.values()))) == ["code"] * 5 + ["swe"] * 3
    assert found["held_out"]["moved"] == 8 and found["held_out"]["documents"] == 8


def test_templates_formulas_and_scores(python: Path, tmp_path: Path) -> None:
    source, draw = tmp_path / "s" / "site", random.Random(0)
    source.mkdir(parents=True)
    for n in range(25):
        (source / f"town{n}.html").write_text(page(template_page(draw) * 6))
    for n in range(12):
        (source / f"essay{n}.html").write_text(page(prose(n) + "<math><mi>E</mi><mo>=</mo><mi>m</mi></math>"))
    (source / "chat.html").write_text(page(prose(50) + "As an AI language model, I like it."))
    recipe = f"""name = "t"
tasks = 3
[[sources]]
name = "s"
path = "{tmp_path}/s"
[filters]
rules = {{ web = ["generated"] }}
options = {{ generated = {{ least_compressed = 0.01 }} }}
[dedup]
templates = true
"""
    (tmp_path / "r.toml").write_text(recipe)
    found = run(python, tmp_path / "r.toml", tmp_path / "one", "--workers", "2")
    assert found["steps"]["filter"]["reasons"] == {"generated_ai_phrase": 1}
    assert found["steps"]["templates"]["dropped"] == 25 - found["steps"]["exact"]["dropped"]
    assert found["kept"] == 12 and found["formulas"] == 12
    assert all("$E = m$" in text for _, text, _ in documents(tmp_path / "one", "web"))
    scores = tmp_path / "scores"
    scores.mkdir()
    values: dict[str, Any] = {hash_of(text): 0.9 for _, text in corpus_documents(tmp_path / "one", ["web"], None)}
    assert len(values) == 12
    first, *_, last = sorted(values)
    values[first] = 0.1
    values.pop(last)
    write_scores(scores, values, {})
    buckets = '[quality]\nclassifier = "{}"\nbuckets = [{{ name = "high", at_least = 0.5 }}]\n'
    (tmp_path / "q.toml").write_text(recipe + buckets.format(scores))
    sorted_ = run(python, tmp_path / "q.toml", tmp_path / "two", "--workers", "2")
    reasons = sorted_["steps"]["filter"]["reasons"]
    assert reasons["quality"] == 1 and reasons["generated_ai_phrase"] == 1
    assert sorted_["shards"]["web-high"]["train_documents"] > 0
    assert reasons["unscored"] == 26 and sorted_["kept"] == 10
