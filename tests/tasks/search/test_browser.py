"""The tools: what they show, and what they answer to wrong calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from glm5.errors import ConfigError, DataError, GradingError
from glm5.records import ToolCall
from glm5.tasks.search.answers import read_reply, right
from glm5.tasks.search.browser import LONG_LINE, Browser, View
from glm5.tasks.search.index import Index, ngrams, quotes, snippet
from glm5.tasks.search.records import Page
from glm5.tasks.search.web import Web

pytest.importorskip("bm25s")


@pytest.fixture
def browser(built: Path) -> Browser:
    return Browser(Web(built), view=View(results=5, snippet=40))


def test_search_click_open_find(browser: Browser) -> None:
    text, good = browser.call(ToolCall("search", {"query": "alpha machine computing", "num": 2}))
    place = browser.returned.index("term/alpha-machine")
    assert good and f"[{place}] alpha machine <term/alpha-machine>" in text.splitlines() and len(browser.returned) == 2
    page, _ = browser.call(ToolCall("click", {"link_id": place}))
    assert page.startswith("alpha machine <term/alpha-machine>\nalpha machine is a computing term.")
    assert browser.call(ToolCall("open", {"url": "<term/gamma>"}))[0].startswith("gamma <term/gamma>")
    assert "Referred to by: beta code" in browser.call(ToolCall("find", {"pattern": "BETA"}))[0]
    assert browser.call(ToolCall("find", {"pattern": "delta"})) == ("not found", True)
    assert browser.opened == ["term/alpha-machine", "term/gamma"] and browser.searches == 1


def test_links_have_numbers(built: Path) -> None:
    browser = Browser(Web(built), view=View(numbered=True))
    browser.call(ToolCall("search", {"query": "alpha machine computing"}))
    place = browser.number("term/alpha-machine")
    text, _ = browser.call(ToolCall("click", {"link_id": place}))
    plain, _ = Browser(Web(built)).open("term/alpha-machine")
    addresses = re.findall(r" <([^<>]+)>", plain)[1:]
    assert len(addresses) > 1 and not any(f"<{address}>" in text for address in addresses)
    assert re.findall(r" \[(\d+)\]", text) == [str(number) for number in range(len(addresses))]
    browser.call(ToolCall("click", {"link_id": 1}))
    assert browser.opened == ["term/alpha-machine", addresses[1]] and browser.number("term/nowhere") is None
    assert "shows no link 999" in browser.call(ToolCall("click", {"link_id": 999}))[0]


@dataclass(frozen=True)
class OnePage:
    """A web of two pages, of which one has links, and marks that are none."""

    text: str
    addresses: frozenset[str] = frozenset({"city/bern", "city/rome"})

    def page(self, url: str) -> Page | None:
        if url == "home":
            return Page("home", "Home", self.text, "", ())
        return Page(url, url[5:].title(), "", "", ()) if url in self.addresses else None


def one_page(text: str, page: int = 1000) -> Browser:
    browser = Browser(OnePage(text), view=View(numbered=True, page=page))  # type: ignore[arg-type]
    browser.open("home")
    return browser


def test_only_links_to_pages_that_were_shown_have_numbers() -> None:
    marks = "#include <stdio.h>, J Doe <j@x.org>, see [1]"
    browser = one_page(f"{marks}\nCapital: Bern <city/bern>\n{'x ' * 90}\nTwin: Rome <city/rome>", page=160)
    shown, _ = browser.open("home")
    assert f"{marks}\nCapital: Bern [0]\n" in shown and "Rome" not in shown
    assert browser.meant("[0]") == "Bern" and browser.number("city/bern") == 0
    assert browser.meant("[1]") == "" and browser.number("city/rome") is None and browser.address(1) is None
    found, _ = browser.call(ToolCall("find", {"pattern": "twin"}))
    assert "Twin: Rome [1]" in found and browser.meant("[1]") == "Rome" and browser.number("city/rome") == 1


@pytest.mark.parametrize("answer", ["[0]", "[0].", "**[0]**", '"[0]"', "`[0]`", "[ 0 ]", "Bern [0]", "[0]**"])
def test_how_a_link_is_an_answer(answer: str) -> None:
    assert one_page("Capital: Bern <city/bern>").meant(answer) == "Bern"


@pytest.mark.parametrize("answer", ["[٠]", "Rome [0]", "0", "[0] [0]", "Bern"])
def test_what_is_no_link_stays_as_it_is(answer: str) -> None:
    assert one_page("Capital: Bern <city/bern>").meant(answer) == answer


def test_a_page_that_may_not_be_shown_has_no_title(built: Path) -> None:
    web = Web(built)
    page = web.page("term/alpha-machine")
    assert page is not None
    source = next(url for url in web.index.urls if f"<{page.url}>" in (web.page(url) or page).text and url != page.url)
    for forbidden, title in (((), page.title), ([page.text], "")):
        browser = Browser(web, forbidden, View(numbered=True))
        browser.open(source)
        assert browser.title(browser._links.index(page.url)) == title


def test_find_shows_the_line(built: Path) -> None:
    """Of a fact its line alone; of a long line what is near, on both sides."""
    browser = Browser(Web(built))
    browser._text = f"A: 1\nB: two\n{'x' * 300} B: three {'y' * 300}"
    found, _ = browser.call(ToolCall("find", {"pattern": "B:"}))
    assert found.splitlines() == ["B: two", f"{'x' * 79} B: three {'y' * 113}"]


def test_shuffled_facts(built: Path) -> None:
    """Each page has another order for each seed, and in a session always the same; the first line and the prose stay,
    long facts come last."""
    web = Web(built)
    plain, mixed = (Browser(web, view=View(page=100_000, shuffled=shuffled)) for shuffled in (False, True))
    other = replace(mixed, order="other")
    changed = others_changed = 0
    for url in web.index.urls:
        before, after = plain.open(url)[0], mixed.open(url)[0]
        assert after == mixed.open(url)[0]
        (facts, *prose), (others, *same) = (text.split("\n\n") for text in (before, after))
        lines = others.split("\n")
        assert prose == same and facts.split("\n")[:2] == lines[:2] and sorted(facts.split("\n")) == sorted(lines)
        long = [len(line) > LONG_LINE for line in lines[2:]]
        assert long == sorted(long)
        changed += before != after
        others_changed += after != other.open(url)[0]
    assert changed > 10 and others_changed > 10


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("click", {"link_id": 0}, "0 results"),
        ("click", {"link_id": -1}, "link_id: a number"),
        ("click", {}, "bad arguments"),
        ("open", {"url": "country/nowhere"}, "no page"),
        ("open", {"url": "../web.sqlite"}, "no page"),
        ("find", {"pattern": "x"}, "no page is open"),
        ("search", {"query": " "}, "query: a text"),
        ("search", {"query": "x" * 5000}, "too long"),
        ("search", {"query": "x", "num": True}, "num: a number"),
        ("search", {"query": "x", "more": 1}, "bad arguments"),
        ("shell", {"code": "x"}, "no such tool"),
        ("search", {"query": "\ud800"}, "query: a text"),
        ("python", {"code": "print(1)"}, "no such tool"),
    ],
)
def test_wrong_calls(browser: Browser, name: str, arguments: dict[str, object], told: str) -> None:
    text, good = browser.call(ToolCall(name, arguments))
    assert text.startswith("error: ") and told in text and not good


def test_pages_are_cut(built: Path) -> None:
    browser = Browser(Web(built), view=View(page=100))
    url = next(url for url in browser.web.index.urls if url.startswith("country/") and url.count("/") == 1)
    text, _ = browser.open(url)
    assert "characters more; use find]" in text and len(text) < 200


def test_forbidden_texts_do_not_exist(built: Path) -> None:
    web = Web(built)
    page = web.page("term/alpha-machine")
    assert page is not None
    browser = Browser(web, forbidden=[page.text])
    assert browser.open("term/alpha-machine") == ("error: there is no page term/alpha-machine", False)
    browser.search("alpha machine", 5)
    assert browser.returned and "term/alpha-machine" not in browser.returned
    assert Browser(web, forbidden=["alpha machine is"]).open("term/alpha-machine")[1]  # too short to tell


def test_runs_of_words() -> None:
    text = " ".join(f"w{i}" for i in range(20))
    forbidden = [ngrams(text)]
    assert quotes("x " + " ".join(f"W{i}," for i in range(4, 17)) + " y", forbidden)  # 13 of them
    assert not quotes(" ".join(f"w{i}" for i in range(4, 16)), forbidden)  # 12
    assert ngrams("one two three four five six seven") == frozenset()
    assert quotes("and one two three four five six seven eight", [ngrams("one two three four five six seven eight")])


def test_order_of_equal_scores_and_saving(tmp_path: Path) -> None:
    urls = [f"u{i}" for i in range(50)]
    index = Index.build(urls, [""] * 50, ["same words here"] * 49 + ["other"])
    assert [hit.url for hit in index.search("words", 7)] == urls[:7]
    assert index.search("absent", 5) == [] and index.search("", 5) == [] and index.search("words", 0) == []
    index.save(tmp_path / "index", "d")
    index.save(tmp_path / "index", "d")
    loaded = Index.load(tmp_path / "index", "d")
    assert loaded.search("other same", 60) == index.search("other same", 60)
    (tmp_path / "index" / "urls.json").write_text("[]")
    with pytest.raises(DataError, match="cannot be used"):
        Index.load(tmp_path / "index", "d")
    with pytest.raises(DataError, match="nothing to index"):
        Index.build(["a"], [""], ["..."])


def test_scores_are_bm25() -> None:
    """Lucene's BM25, computed from its formula: idf = ln(1 + (N - n + 0.5) / (n + 0.5)), k1 = 1.2, b = 0.75."""
    import math

    index = Index.build(["a", "b", "c"], [""] * 3, ["cat dog", "cat cat bird fish", "dog"])
    idf, length = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5)), 7 / 3
    wanted = {"a": idf / (1 + 1.2 * (0.25 + 0.75 * 2 / length)), "b": idf * 2 / (2 + 1.2 * (0.25 + 0.75 * 4 / length))}
    assert {hit.url: hit.score for hit in index.search("cat", 3)} == pytest.approx(wanted, abs=1e-3)


def test_the_best_window() -> None:
    text = "one " * 50 + "needle in hay " + "two " * 50 + "needle hay stack"
    assert "needle in hay" in snippet(text, "hay needle", 40) and len(snippet(text, "hay needle", 40)) <= 40
    assert snippet("far " * 99 + "needle " + "away " * 99, "needle", 40) == "far far far needle away away away away a"
    assert "stack" in snippet(text, "hay needle stack", 40)
    assert snippet("short text", "x", 40) == "short text"
    assert len(snippet("x" * 500, "x", 40)) == 40


def test_a_broken_web_is_the_machines_fault(built: Path, tmp_path: Path) -> None:
    for name in ("web.sqlite", "index"):
        (shutil.copytree if (built / name).is_dir() else shutil.copy)(built / name, tmp_path / name)
    browser = Browser(Web(tmp_path))
    import sqlite3

    with sqlite3.connect(tmp_path / "web.sqlite") as db:
        db.execute("DROP TABLE texts")
    db.close()
    with pytest.raises(GradingError, match="cannot be read"):
        browser.call(ToolCall("search", {"query": "alpha"}))
    with pytest.raises(DataError, match="has no search web"):
        Web(tmp_path / "index")


def test_views_have_bounds() -> None:
    for wrong in ({"results": 0}, {"page": 10}, {"snippet": 9999}):
        with pytest.raises(ConfigError):
            View(**wrong)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Paro", "Paro"),
        ("Explanation: x\nExact Answer: Paro\nConfidence: 80%", "Paro"),
        ("**Exact Answer:** Paro [city/paro]", "Paro"),
        ("Exact Answer: Paro\nExact Answer: Oslo", ""),
        ("", ""),
    ],
)
def test_replies_are_read(text: str, answer: str) -> None:
    assert read_reply(text).answer == answer


def test_parts_of_a_reply() -> None:
    reply = read_reply("Explanation: see [city/paro] and <country/bhutan>.\nExact Answer: Paro\nConfidence: 85%")
    assert (reply.confidence, reply.cited) == (0.85, ("city/paro", "country/bhutan"))
    assert read_reply("Confidence: 999%").confidence == 1.0


@pytest.mark.parametrize(
    ("answer", "names", "good"),
    [
        ("paro.", ["Paro"], True),
        ("Santa Fe", ["Santa Fé"], True),
        ("Paro or Oslo", ["Paro"], False),
        ("", ["Paro"], False),
        ("C", ["C++"], False),
        ("C++", ["C++"], True),
        ("C#", ["C++"], False),
        ("+", ["+"], True),
        ("the Hague", ["Hague"], False),
        ("Kingdom of Bhutan", ["Bhutan", "Kingdom of Bhutan"], True),
        ("!", ["?"], False),
        ("...", ["Paro"], False),
    ],
)
def test_only_the_name_is_right(answer: str, names: list[str], good: bool) -> None:
    assert right(answer, names) is good


def test_the_index_does_not_start_jax(tmp_path: Path) -> None:
    """bm25s imports JAX if it is there, which takes most of a GPU's memory."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("raise SystemExit('JAX was started')")
    code = "import sys; from glm5.tasks.search import index; index.bm25_library(); assert 'jax' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
