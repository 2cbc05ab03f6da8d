"""Static rules: what closes the gate, what costs something, and what is found in a text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.tasks.slides.markup_rules import MOST_BYTES, WINDOW, count_found, read_page, well_formed
from tests.tasks.slides.pages import pages

OUTSIDE = "something from outside"


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ("", "no markup"),
        ("just words", "no markup"),
        ("<p>x</p><script>1</script>", "a script"),
        ("<svg><script>1</script></svg>", "a script"),
        ("<p onclick=x()>x</p>", "a script"),
        ("<a href='java\tscript:x()'>x</a>", "a script"),
        ("<iframe src=x></iframe>", "a frame"),
        ("<object data=x></object>", "an object"),
        ("<base href='http://x/'>", "a base address"),
        ("<link rel=stylesheet href=a.css>", "something from outside"),
        ("<img src='//x.org/a.png'>", "something from outside"),
        ("<img srcset='https://x.org/a.png 2x'>", "something from outside"),
        ("<img src='file:///etc/passwd'>", "something from outside"),
        ("<p style='background:url(http://x.org/a)'>x</p>", "something from outside"),
        ("<style>p{background:u\\72l('ht\\74p://x.org/a')}</style><p>x</p>", "something from outside"),
        ("<style>@import 'a.css';</style><p>x</p>", "an imported style sheet"),
        ("<style>@\\69mport 'a'</style><p>x</p>", "an imported style sheet"),
        ("<meta http-equiv=REFRESH content='0;url=x'><p>x</p>", "a meta instruction"),
        ("<style>@media (min-height:9px){p{color:red}}</style><p>x</p>", WINDOW),
        ("<style>@media (orientation:portrait){}</style><p>x</p>", WINDOW),
        ("<style media='(min-height:9px)'>p{color:red}</style><p>x</p>", WINDOW),
        ("<style>@media " + " " * 600 + "(min-height:9px){p{color:red}}</style><p>x</p>", WINDOW),
        ("<style>p{margin:if(media(min-height:9px):62px;else:12px)}</style><p>x</p>", WINDOW),
        ("<style>a{content:'/*'} @media (min-height:9px){p{color:red}} a{content:'*/'}</style><p>x</p>", WINDOW),
        ("<style>a{background:url(/*)} @media (min-height:9px){} a{background:url(*/)}</style><p>x</p>", WINDOW),
        ("<style>@media not (a:'{'), (min-height:9px){p{color:red}}</style><p>x</p>", WINDOW),
        ("<style>a{content:'/*'} p{background:url(http://x.org/a)} a{content:'*/'}</style><p>x</p>", OUTSIDE),
        ("<p style='background:url(http://x.org/a)' style='color:red'>x</p>", OUTSIDE),
        ("<img src='http://x.org/a' src=chart>", OUTSIDE),
        ("<meta http-equiv=refresh content='0;url=x' http-equiv=content-type><p>x</p>", "a meta instruction"),
        ("<div>" * 300, "elements more than 200 deep"),
        ("<form><input></form>", "a form"),
        ("<p>x</p>" + "<a" * 60_000, "markup that cannot be read"),  # would take minutes
    ],
)
def test_a_fault_closes_the_gate(html: str, fault: str) -> None:
    assert fault in read_page(html).faults


@pytest.mark.parametrize(
    "html",
    [
        "<p style='a:" + "." * 150_000 + "'>x",
        "<p style='a:" + "1" * 150_000 + "'>x",
        "<b>" * 20_000 + "</c>" * 20_000,
        "<style>" + "@media " * 25_000 + "</style>",
        "<style>" + "url(" * 40_000 + "</style>",
        "<style>" + "'\\" * 60_000 + "</style>",
        "<style>" + "/*" * 90_000 + "</style>",
        "x" * 10 * MOST_BYTES,
    ],
)
def test_no_page_takes_long_to_read(html: str) -> None:
    began = time.process_time()
    read_page(html)
    assert time.process_time() - began < 2.0


def test_lengths_of_the_window_are_counted_as_a_browser_reads_them() -> None:
    for length in ("5vh", "-5vh", "+.5dvh", "1e2vh", "calc(100% - 3.5vmin)"):
        assert read_page(f"<p style='top:{length}'>x</p>").viewport_units == 1, length
    for other in ("var(--h-100vh)", "5px", '"100vh"', "5vhx"):
        assert read_page(f"<style>p{{top:{other}}}</style>x").viewport_units == 0, other


def test_honest_pages_have_no_fault_and_no_flaw() -> None:
    for name, html in pages("honest").items():
        page = read_page(html)
        assert (page.faults, well_formed(page)) == ([], 1.0), name


def test_flaws_cost_something() -> None:
    assert well_formed(read_page("<div><p>x</div>")) == 1.0  # a paragraph need not be closed
    assert well_formed(read_page("<div><b>x</div>")) == 0.8
    assert well_formed(read_page("<div>x</div></section>")) == 0.8
    assert well_formed(read_page("<div style='height:100vh;width:50vw'>x</div>")) == pytest.approx(0.6)
    assert read_page("<style>p{height:9px}</style><p>two  words</p>").text == "two words"


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        (["Orders rose by 12 percent"], "o"),
        (["orders ROSE by 12 per\u00adcent! Next: review in May"], "or"),
        (["Review in May", "Orders rose by 12 percent"], "o"),  # the second point comes first
        (["Orders rose by", "12 percent", "Review in May"], "r"),  # in two pieces
        (["Orders by 12 percent rose. Orders rose by 13 percent"], ""),
        (["Orders rose by 112 percent", "Preview in May"], ""),
        (["Year 9"], "y"),
        ([], ""),
    ],
)
def test_phrases_are_found_word_for_word_and_in_order(pieces: list[str], found: str) -> None:
    there = count_found("Year 9", ["Orders rose by 12 percent", "Review in May"], pieces)
    assert "".join(phrase[0].lower() for phrase in there) == found


@given(st.text(alphabet="<>/!-abdi \"'=stylecr&;:{}()\\@\x00\n", max_size=120))
def test_any_text_can_be_read(text: str) -> None:
    page = read_page(text)
    assert 0.0 <= well_formed(page) <= 1.0
