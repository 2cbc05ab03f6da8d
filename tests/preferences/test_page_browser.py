"""The page of `glm5 prefer` in a real browser: all widths, keyboard only, restarts, and no request to anybody else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.browser]

WIDTHS = (320, 390, 768, 1024, 1280)
NOTHING = {"pairs": 4, "done": 0, "skipped": 0}


@pytest.fixture
def visit(browser: Any, served: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page; at the end it has asked nobody but its server, and the console is clean."""
    opened = []

    def go(width: int = 1280, height: int = 800, **more: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **more)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.heard = {"errors": [], "requests": []}
        page.on("console", lambda m: page.heard["errors"].append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.heard["errors"].append(str(error)))
        page.on("request", lambda request: page.heard["requests"].append(request.url))
        page.goto(served.url)
        opened.append((context, page))
        return page

    yield go
    for context, page in opened:
        context.close()
        asked = {"/".join(url.split("/")[:3]) for url in page.heard["requests"] if not url.startswith("data:")}
        assert asked == {served.url}
        lost = [text for text in page.heard["errors"] if "Failed to load resource" not in text]
        assert lost == []


def agree(page: Any, name: str = "Ada") -> None:
    page.wait_for_selector("#consent:not([hidden])")
    page.keyboard.press("ControlOrMeta+a")  # the field has the focus
    page.keyboard.type(name)
    page.keyboard.press("Enter")
    page.wait_for_selector("#work:not([hidden])")


def shoot(page: Any, name: str) -> None:
    """Keeps a picture if a folder is named."""
    if folder := os.environ.get("GLM5_SHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def voted(page: Any, count: int) -> None:
    page.wait_for_selector(f"#count:text('{count} of')")


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_shows_everything(visit: Callable[..., Any], served: Any, width: int) -> None:
    page = visit(width, 640 if width < 768 else 800)
    page.wait_for_selector("#consent:not([hidden])")
    shoot(page, f"consent-{width}")
    agree(page)
    for i in range(4):
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"the page scrolls sideways at {width}: {wide}"
        boxes = {name: page.locator(name).bounding_box() for name in ("#left", "#right", "#prompt", "#why", "#keys")}
        assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes.values())
        side_by_side = abs(boxes["#left"]["y"] - boxes["#right"]["y"]) < 2
        assert side_by_side == (width >= 768)
        for button in page.locator("nav button:visible").all():
            box = button.bounding_box()
            assert box["height"] >= 44 and box["width"] >= 44
            assert box["y"] + box["height"] <= page.viewport_size["height"], "a key is below the fold"
            assert button.evaluate("b => b.scrollWidth <= b.clientWidth"), "a label is cut"
        assert page.inner_text("#prompt").endswith("about <b>tea</b>.")
        shoot(page, f"work-{width}-{i}")
        page.keyboard.press("1")
        if i < 3:
            voted(page, i + 1)
    page.wait_for_selector("#end:not([hidden])")
    shoot(page, f"end-{width}")
    assert page.title().startswith("Which answer")
    assert served.store.progress("Ada") == {"pairs": 4, "done": 4, "skipped": 0}


def test_the_keyboard_does_everything(visit: Callable[..., Any], served: Any) -> None:
    page = visit()
    agree(page)
    order = served.store.order("Ada")
    page.keyboard.press("2")
    voted(page, 1)
    page.keyboard.press("w")
    page.keyboard.type("1 and 2 and t are letters here")
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    voted(page, 2)
    page.keyboard.press("s")
    voted(page, 3)
    card = served.store.card("Ada", order[1])
    assert (card.choice, card.why) == ("tie", "1 and 2 and t are letters here")
    page.keyboard.press("b")  # to the skipped one
    page.wait_for_selector("[data-side=skip][aria-pressed=true]")
    page.keyboard.press("b")
    page.wait_for_selector("[data-side=tie][aria-pressed=true]")
    assert page.input_value("#why") == "1 and 2 and t are letters here"
    page.keyboard.press("1")  # a vote is changed; the page goes on with what is open
    page.wait_for_selector("[data-side=tie][aria-pressed=false]")
    page.keyboard.press("3")
    page.wait_for_selector("#end:not([hidden])")
    assert "You skipped 1." in page.inner_text("#end-text")
    assert page.evaluate("document.activeElement.id") == "end-title"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # look at skipped pairs again
    page.wait_for_selector("#work:not([hidden])")
    page.keyboard.press("1")
    page.wait_for_selector("#end:not([hidden])")
    assert [served.store.card("Ada", pair).choice for pair in order] == ["right", "left", "left", "tie"]
    for _ in range(20):  # by Tab to the button that deletes everything, and through its question
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "forget":
            break
    page.keyboard.press("Enter")
    page.wait_for_selector("#sure[open]")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#consent:not([hidden])")
    assert served.store.progress("Ada") == NOTHING and not served.store.agreed("Ada")


def test_a_restart_loses_nothing_and_a_lost_server_is_told(visit: Callable[..., Any], served: Any) -> None:
    page = visit(390, 700)
    agree(page)
    page.keyboard.press("1")
    voted(page, 1)
    second = page.inner_text("#left")
    page.fill("#why", "not saved yet")
    served.stop()
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    page.wait_for_selector("#problem:not([hidden])")
    assert "does not answer" in page.inner_text("#problem")
    shoot(page, "lost-390")
    assert page.inner_text("#left") == second and page.input_value("#why") == "not saved yet"
    served.start()
    page.keyboard.press("2")
    voted(page, 2)
    assert page.is_hidden("#problem")
    page.reload()
    page.wait_for_selector("#work:not([hidden])")  # no second consent, and the same place
    assert page.inner_text("#count") == "2 of 4"
    order = served.store.order("Ada")
    assert [served.store.card("Ada", pair).choice for pair in order] == ["left", "right", None, None]
    assert served.store.card("Ada", order[1]).why == "not saved yet"


def test_a_double_press_is_one_vote(visit: Callable[..., Any], served: Any) -> None:
    page = visit()
    agree(page)
    page.evaluate("""() => { for (const key of ['1', '1', '1']) document.body.dispatchEvent(
        new KeyboardEvent('keydown', { key, bubbles: true })); }""")
    voted(page, 1)
    assert served.store.progress("Ada")["done"] == 1


def test_touch_and_dark_colours(visit: Callable[..., Any], served: Any) -> None:
    page = visit(360, 740, has_touch=True, is_mobile=True, color_scheme="dark")
    agree(page, "Ben")
    shoot(page, "dark-360")
    page.tap("[data-side=tie]")
    voted(page, 1)
    assert served.store.card("Ben", served.store.order("Ben")[0]).choice == "tie"
