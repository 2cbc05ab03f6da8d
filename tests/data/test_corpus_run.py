"""Recipes of corpora, what is checked before a run, and the report, without datatrove."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from glm5.config.corpus import ClassifierRecipe, CorpusRecipe
from glm5.config.load import dump_recipe, load_recipe
from glm5.data.corpus import run
from glm5.data.corpus.account import write_account
from glm5.data.corpus.run import Progress, need_extra, run_corpus
from glm5.data.corpus.samples import KEPT_BY, Samples
from glm5.errors import ConfigError, DataError, MissingExtraError
from glm5.report.corpus import bars, build_corpus_report

ROOT = Path(__file__).parents[2]
SOURCE = {"name": "s", "path": "/nowhere"}


def recipe(**values: Any) -> CorpusRecipe:
    return CorpusRecipe.model_validate({"name": "c", "sources": [SOURCE], **values})


def test_recipes_of_the_repository_load_and_survive_saving() -> None:
    found = load_recipe(ROOT / "recipes" / "demo-data.toml", CorpusRecipe)
    assert "permissive" in dump_recipe(found)
    for name in ("world-knowledge", "documentation"):
        assert load_recipe(ROOT / "recipes" / f"{name}.toml", ClassifierRecipe).positive
    assert load_recipe(ROOT / "recipes" / "swe-data.toml", CorpusRecipe).sources[1].changes is not None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sources": [SOURCE, SOURCE]}, "two sources are named s"),
        ({"name": "a/b"}, "may have only letters"),
        ({"filters": {"rules": {"web": ["gofer"]}}}, "no rule set"),
        ({"filters": {"rules": {"web": ["code"]}}}, "of the kind code"),
        (
            {
                "quality": {
                    "classifier": "c",
                    "buckets": [{"name": "a", "at_least": 0.2}, {"name": "b", "at_least": 0.5}],
                }
            },
            "fall",
        ),
    ],
)
def test_bad_recipes_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(**values)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datatrove" else known(name))
    with pytest.raises(MissingExtraError, match=r"datatrove is not installed; .*glm5\[data\]"):
        run_corpus(recipe(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else object())
    need_extra("local")
    with pytest.raises(MissingExtraError, match=r"glm5\[ray\]"):
        need_extra("ray")


def test_a_folder_with_other_content_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "need_extra", lambda executor: None)
    (tmp_path / "thesis.txt").write_text("do not touch")
    with pytest.raises(ConfigError, match="other content"):
        run_corpus(recipe(), tmp_path)
    with pytest.raises(DataError, match="neither a file nor a folder"):
        run_corpus(recipe(), tmp_path / "new")


def test_what_a_crash_leaves_of_a_recipe_is_no_other_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "need_extra", lambda executor: None)
    (tmp_path / ".recipe.toml.writing").write_text("name = ")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        run_corpus(recipe(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def test_more_tasks_than_open_files_are_refused_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "need_extra", lambda executor: None)
    limits = {"soft": 64, "hard": 1000}
    monkeypatch.setattr(run.resource, "getrlimit", lambda which: (limits["soft"], limits["hard"]))
    monkeypatch.setattr(run.resource, "setrlimit", lambda which, new: limits.update(soft=new[0]))
    with pytest.raises(ConfigError, match=r"400 tasks need 1,400 open files.* choose at most 266 tasks"):
        run_corpus(recipe(tasks=400), tmp_path / "out")
    assert not (tmp_path / "out").exists() and limits["soft"] == 64
    with pytest.raises(DataError, match="neither a file nor a folder"):
        run_corpus(recipe(tasks=266), tmp_path / "out")
    assert limits["soft"] == 998


def test_progress_says_what_is_left() -> None:
    assert str(Progress("read", 3, 16, 12.4)) == "read: 3 of 16 parts, 12 s left"
    assert str(Progress("read", 0, 16, None)) == "read: 0 of 16 parts"


def test_samples_are_the_first_of_each_reason(tmp_path: Path) -> None:
    samples = Samples(tmp_path, 2)
    for part in range(2):
        with samples.part("filter", part) as mine:
            for n in range(4):
                mine.add("short", f"{part}-{n}", "x" * 2000)
    found = samples.read("filter")["short"]
    assert [row["name"] for row in found] == ["0-0", "0-1"]
    assert found[0]["length"] == 2000 and len(found[0]["text"]) == 1500
    assert samples.read("other") == {}


def test_the_report_is_inert_and_complete(tmp_path: Path) -> None:
    with Samples(tmp_path / "work" / "samples", 2).part("filter", 0) as mine:
        mine.add("gopher_short", "<script>name", "<img src=x onerror=alert(1)>")
    with Samples(tmp_path / "work" / "samples", 2).part("added", 0) as mine:
        mine.add("high", "lifted", "a <b>good</b> page")
    step = {"documents": 10, "dropped": 4, "reasons": {"gopher_short": 4}}
    account = {
        "name": "c", "documents": 10, "files": 9, "bytes": 5000, "kept": 6, "joined": {"files": 3, "documents": 1},
        "sources": {"s": {"files": 9, "bytes": 5000, "skipped": {"link": 1}}}, "steps": {"filter": step},
        "added": {"high": 3}, "held_out": {"documents": 2, "moved": 1, "similarity": 0.5, "most_similar": 0.4321},
        "packages": {"datatrove": "0.10.1", "numpy": None},
        "kept_by": {name: {} for name in KEPT_BY} | {"source": {"s": 6}},
        "shards": {"web": {f"{a}_{b}": 5 for a in ("train", "held_out") for b in ("documents", "tokens", "bytes")}},
    }  # fmt: skip
    (tmp_path / "corpus.json").write_text(json.dumps(account))
    page = build_corpus_report(tmp_path).read_text(encoding="utf-8")
    assert "<script>" not in page and "<img" not in page and "&lt;img src=x" in page
    for part in (
        "gopher_short",
        "40.0 %",
        "3 files were joined",
        "datatrove 0.10.1",
        "link 1",
        "0.43",
        "a &lt;b&gt;good",
    ):
        assert part in page
    (tmp_path / "corpus.json").write_text("{}")
    with pytest.raises(DataError, match="damaged"):
        build_corpus_report(tmp_path)
    with pytest.raises(DataError, match="no finished corpus"):
        build_corpus_report(tmp_path / "work")


def test_rare_rows_of_a_table_are_summed() -> None:
    table = bars("Licenses", "license", {f"l{n:02d}": 100 - n for n in range(30)})
    assert len(table.rows) == 21 and table.rows[-1][0] == "10 others"
    assert sum(row[1] for row in table.rows) == sum(100 - n for n in range(30))


def test_the_account_is_refused_if_a_document_is_lost(tmp_path: Path) -> None:
    def total(**counts: int) -> dict[str, Any]:
        return {"name": "step", "stats": {name: {"total": n} for name, n in counts.items()}}

    # 20 documents: 4 are dropped, 10 are joined to 2, the filter drops 3 of the 8.
    read = {"total": 20, "dropped": 4, "files": 20, "bytes": 1, "joined": 10, "joined_documents": 2}
    steps = {"read": [read, {"total": 8, "dropped": 3}], "tokens": [{}, {"total": 5}]}
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "sources.json").write_text("{}")
    mine = recipe(tasks=1, dedup={"exact": False, "minhash": False, "held_out": None})

    def account() -> dict[str, Any]:
        for stage, found in steps.items():
            path = tmp_path / "work" / "log" / stage / "stats" / "00000.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([total(**counts) for counts in found]))
        return write_account(mine, tmp_path)

    assert account()["kept"] == 5
    for lost in (read, steps["read"][1], steps["tokens"][1]):
        lost["total"] -= 1
        with pytest.raises(DataError, match="does not add up"):
            account()
        lost["total"] += 1
    read["joined"] -= 1  # a joined file that is in no document
    with pytest.raises(DataError, match="9 documents were left before the step filter, which saw 8"):
        account()
