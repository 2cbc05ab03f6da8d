"""The renderer in a real browser: the two lists, corruptions, hostile pages, and what happens when it dies."""

from __future__ import annotations

import asyncio
import http.server
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import ConfigError, GradingError
from glm5.records import Message, Outcome
from glm5.tasks import make_family
from glm5.tasks.slides import browser, render
from glm5.tasks.slides.markup_rules import read_page
from glm5.tasks.slides.render import PageFault, Renderer
from glm5.tasks.slides.rewards import Score, failed, score_page
from tests.tasks.slides.corruptions import corrupt
from tests.tasks.slides.pages import ASSETS, BRIEF, pages

needs_browser = pytest.mark.browser
WORKERS = 3


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    pytest.importorskip("playwright.async_api", reason="the browser tests need `pip install playwright`")
    try:
        browser.find_chromium()
        browser.font_folder()
    except ConfigError as error:
        pytest.skip(str(error))
    with Renderer(tabs=WORKERS) as made:
        yield made


@pytest.fixture(scope="module")
def score(renderer: Renderer) -> Callable[[dict[str, str]], dict[str, Score]]:
    def one(html: str) -> Score:
        if read_page(html).faults:
            return score_page(html, None, BRIEF)
        try:
            return score_page(html, renderer.measure(html, ASSETS), BRIEF)
        except PageFault as fault:
            return failed(str(fault))

    def many(found: dict[str, str]) -> dict[str, Score]:
        with ThreadPoolExecutor(WORKERS) as pool:
            return dict(zip(found, pool.map(one, found.values()), strict=True))

    return many


@needs_browser
def test_every_exploit_scores_below_the_plain_page_and_no_honest_design_is_punished(score: Any) -> None:
    exploits, honest = score(pages("exploits")), score(pages("honest"))
    assert len(exploits) >= 150 and len(honest) >= 66
    plain = honest["plain"].total
    assert {name: s.total for name, s in exploits.items() if s.total >= 0.9 * plain} == {}
    assert {name: s.total for name, s in honest.items() if s.total <= 0.95 * plain or s.tricks} == {}
    assert [name for name, s in honest.items() if not s.compliant] == []


@needs_browser
def test_corruptions_score_below_their_originals(score: Any) -> None:
    honest = pages("honest")
    names = list(honest)
    spoilt = {str(i): corrupt(honest[names[i % len(names)]], i)[0] for i in range(100)}
    before, after = score(honest), score(spoilt)
    lower = sum(after[str(i)].total < before[names[i % len(names)]].total for i in range(100))
    assert lower >= 98


class _Heard(http.server.BaseHTTPRequestHandler):
    requests: list[str] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@needs_browser
def test_no_page_reaches_a_network_or_a_file(renderer: Renderer, tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Heard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    picture = tmp_path / "secret.svg"
    picture.write_text('<svg xmlns="http://www.w3.org/2000/svg" width="99" height="99"/>', encoding="utf-8")
    there = f"http://127.0.0.1:{server.server_address[1]}"
    hostile = [
        f"<img src='{there}/img'>", f"<img src='file://{picture}'>", f"<iframe src='{there}/frame'></iframe>",
        f"<iframe src='file://{picture}'></iframe>", f"<style>@import '{there}/css';</style>x",
        f"<p style='background:url({there}/bg)'>x</p>", f"<link rel=stylesheet href='{there}/link'>x",
        f"<link rel=prefetch href='{there}/pre'><link rel=preconnect href='{there}'>x",
        f"<meta http-equiv=refresh content='0;url={there}/refresh'>x", f"<object data='{there}/object'></object>",
        f"<style>@font-face{{font-family:f;src:url({there}/font)}} p{{font-family:f}}</style><p>x</p>",
        f"<script>fetch('{there}/fetch');new WebSocket('ws://127.0.0.1:{server.server_address[1]}/ws')</script>x",
        f"<img src=x onerror=\"location='{there}/onerror'\">", f"<svg><image href='{there}/svg'/></svg>",
        f"<video src='{there}/video' autoplay></video><audio src='{there}/audio' autoplay></audio>",
        f"<base href='{there}/'><img src='based'>", f"<form action='{there}/form'><input autofocus></form>",
        "<a href='x' target=_blank autofocus>x</a>" * 50, f"<embed src='{there}/embed'>",
    ]  # fmt: skip
    for html in hostile:
        try:
            slide = renderer.measure(html)
        except PageFault:
            continue
        assert not any(box.tag == "img" and box.loaded for box in slide.boxes), html
    server.shutdown()
    server.server_close()
    assert _Heard.requests == []
    assert renderer.measure("<p>still <b>here</b></p>").texts[0].text == "still"


@needs_browser
def test_scripts_do_not_run(renderer: Renderer) -> None:
    slide = renderer.measure("<p id=a>before</p><script>document.getElementById('a').textContent='after'</script>")
    assert [box.text for box in slide.texts] == ["before"]


@needs_browser
def test_heavy_pages_end_in_time_and_leave_the_renderer_working(renderer: Renderer) -> None:
    wide = "<div style='display:grid;grid-template-columns:repeat(500,1fr)'>" + "<i>x</i>" * 20_000
    deep = "<div>" * 5000 + "x"
    endless = "<style>@keyframes a{to{transform:rotate(1turn)}} p{animation:a .01s infinite}</style>" + "<p>x</p>" * 300
    moving = "<animate attributeName=x to=90 dur=.1s repeatCount=indefinite />"
    animated = f"<svg width=99 height=99><rect width=9 height=9>{moving}</rect></svg>"
    for html in (wide, deep, endless, animated, "<p>" + "word " * 30_000):
        try:
            slide = renderer.measure(html)
        except PageFault:
            continue
        assert len(slide.boxes) <= 1500
    assert renderer.measure(wide).more
    for endless in ("scale:calc(infinity)", "transform:scale(calc(infinity))"):
        assert "transform-scale" in renderer.measure(f"<p style='{endless}'>x</p>").boxes[2].tricks
    assert renderer.measure("<p>" + "a\U0001f600" * 300).texts  # cut between the halves of a character
    with pytest.raises(PageFault, match="bytes"):
        renderer.measure("x" * (render.MOST_BYTES + 1))
    assert renderer.measure("<p>after all that</p>").texts


@needs_browser
def test_measurements_are_the_same_every_time_and_are_cached(renderer: Renderer, tmp_path: Path) -> None:
    page = pages("honest")["cards"]
    with Renderer(tabs=1, cache=tmp_path) as other:
        first = other.measure(page, ASSETS)
        assert other.measure(page, ASSETS) is first and other.measured == 1
    assert first == renderer.measure(page, ASSETS)
    with Renderer(tabs=1, cache=tmp_path) as third:
        assert third.measure(page, ASSETS) == first and third.browsers == 0


@needs_browser
def test_a_browser_that_is_killed_is_replaced(renderer: Renderer) -> None:
    renderer.measure("<p>one</p>")
    assert renderer._chromium is not None
    for pid in renderer._chromium._processes():
        os.kill(pid, 9)
    with ThreadPoolExecutor(WORKERS) as pool:
        slides = list(pool.map(lambda i: renderer.measure(f"<p>page {i}</p>"), range(6)))
    assert [slide.texts[0].text for slide in slides] == [f"page {i}" for i in range(6)]


@needs_browser
def test_a_page_that_kills_browsers_is_its_own_fault(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = browser.Tab.measure

    async def measure(self: browser.Tab, html: str, pictures: bool, names: Any) -> Any:
        if "deadly" in html:
            for pid in self.chromium._processes():
                os.kill(pid, 9)
        return await plain(self, html, pictures, names)

    monkeypatch.setattr(browser.Tab, "measure", measure)
    with pytest.raises(PageFault, match="ended two browsers"):
        renderer.measure("<p>deadly</p>")
    assert renderer.measure("<p>and on it goes</p>").texts


@needs_browser
def test_under_load_a_hostile_page_is_still_its_own_fault(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, alone, now, most = browser.Tab.measure, Renderer._alone, 0, 0

    async def measure(self: browser.Tab, html: str, pictures: bool, names: Any) -> Any:
        if "slow" in html:
            await asyncio.sleep(60)
        return await plain(self, html, pictures, names)

    async def counted(self: Renderer, *given: Any) -> Any:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        try:
            return await alone(self, *given)
        finally:
            now -= 1

    def outcome(renderer: Renderer, i: int) -> str:
        try:
            renderer.measure(f"<p>{'slow' if i else 'honest'} {i}</p>")
        except PageFault:
            return "fault"
        return "measured"

    monkeypatch.setattr(browser.Tab, "measure", measure)
    monkeypatch.setattr(Renderer, "_alone", counted)
    with Renderer(tabs=3, page_seconds=1.5) as hurried, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: outcome(hurried, i), range(4)))
    assert found == ["measured", "fault", "fault", "fault"] and most == 1


@needs_browser
def test_a_page_without_end_is_its_own_fault_and_a_dead_browser_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with Renderer(tabs=1, page_seconds=1e-9) as hurried, pytest.raises(GradingError, match="plain page"):
        hurried.measure("<p>x</p>")


@needs_browser
def test_the_family_scores_the_oracles_pages(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    from glm5.tasks.slides import family

    monkeypatch.setattr(family, "shared_renderer", lambda: renderer)
    made = make_family("slides")
    for i in range(6):
        problem = made.problem("heldout", i)
        result = problem.env().step(Message("assistant", problem.demonstration(i)[-1].content))
        assert result.outcome is Outcome.SOLVED and result.detail["rewards"]["compliant"] == 1.0
        assert result.reward > 0.9


def test_without_a_browser_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CHROMIUM", raising=False)
    with pytest.raises(ConfigError, match=r"install one.*--static"):
        browser.find_chromium()
    monkeypatch.setenv("CHROMIUM", "/nowhere/chromium")
    with pytest.raises(ConfigError, match="/nowhere/chromium"):
        browser.find_chromium()


def test_a_process_at_a_time_is_measured_by_its_tree() -> None:
    assert shutil.which("sh") is None or browser._resident(os.getpid()) > 1 << 20
    assert browser._resident(1 << 30) == 0
