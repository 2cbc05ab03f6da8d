"""What a user does on the chat page, in a real browser against a scripted server."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fastapi import Response
from fastapi.responses import JSONResponse

pytestmark = [pytest.mark.slow, pytest.mark.browser]

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def test_an_answer_streams_and_its_thinking_folds(page: Any, fake: Any) -> None:
    told = fake.usage(40, reasoning_tokens=7, draft_tokens=60, accepted_draft_tokens=45)
    thoughts = [{"reasoning_content": "first "}, fake.GATE, {"reasoning_content": "thought"}, fake.GATE]
    fake.answers = [[*thoughts, {"content": "Hel"}, fake.GATE, {"content": "lo **there**"}, told]]
    page.goto(fake.url)
    assert page.inner_text("h1") == "glm-5-<fake>" and page.is_visible("#empty")
    page.ask("Say hello")
    page.wait_for_selector(".thinking[open] .thought:text-is('first')")
    assert page.inner_text("summary") == "Thinking" and page.get_attribute("#send", "aria-label") == "Stop"
    assert page.get_attribute(".assistant", "aria-busy") == "true" and page.is_hidden("#empty")
    fake.gate.set()
    page.wait_for_selector(".thinking[open] .thought:text-is('first thought')")
    assert page.texts(".md") == [""]
    fake.gate.set()
    page.wait_for_selector(".thinking:not([open])")
    assert page.texts(".md") == ["Hel"] and page.inner_text("summary").startswith("Thought for ")
    fake.gate.set()
    page.idle()
    assert page.texts(".md") == ["Hello there"] and page.texts(".md strong") == ["there"]
    assert re.fullmatch(r"Thought for \d+\.\d s · 7 tokens", page.inner_text("summary"))
    stats = page.inner_text(".stats")
    assert stats.startswith("40 tokens · ") and "tokens/s · first after " in stats
    assert stats.endswith(" · prompt 1,234 (1,000 cached) · drafts 75% accepted")
    assert page.get_attribute(".assistant", "aria-busy") == "false"
    assert page.inner_text("#announce") == "Hello **there**"
    page.click("summary")
    assert page.inner_text(".thought") == "first thought"
    assert fake.bodies == [
        {"messages": [{"role": "user", "content": "Say hello"}], "stream": True,
         "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": True}}
    ]  # fmt: skip


def test_several_calls_and_their_results(page: Any, fake: Any) -> None:
    long = {
        "city": "Oslo",
        "when": [2026, 3.5e-2],
        "none": {},
        "note": 'with "wind": {rain, please}',
        "nest": [{"a": None}, []],
    }
    first = [{"reasoning_content": "hm"}, {"content": "Looking."}, fake.call(0, "weather", '{"city": '),
             {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]}, fake.GATE,
             fake.call(1, "weather", json.dumps(long))]  # fmt: skip
    fake.answers = [first, [{"content": "Warm."}]]
    page.goto(fake.url)
    page.setting("tools", json.dumps([WEATHER]))
    page.setting("keep", True)
    assert page.inner_text("#tools-chip") == "1 tool"
    page.ask("Weather?")
    page.wait_for_selector(".call >> text=is being written")
    assert page.locator("[data-action=results]").count() == 0
    fake.gate.set()
    page.idle()
    assert page.texts(".call strong") == ["weather", "weather"]
    assert page.texts(".arguments") == ['{"city": "Rome"}', json.dumps(long, indent=2)]
    assert page.evaluate("pretty('[1.0, 123456789012345678901]')") == "[1.0, 123456789012345678901]"
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Result of weather"
    page.keyboard.type('{"celsius": 21}')
    page.keyboard.press("Enter")  # the second result is still missing: it gets the focus
    assert len(fake.bodies) == 1
    page.reload()  # and what was typed survives
    assert page.locator(".call textarea").first.input_value() == '{"celsius": 21}'
    page.locator(".call textarea").nth(1).fill("no data\nfor Oslo")
    page.click("text=Send results")
    page.idle()
    assert page.texts(".md") == ["Looking.", "Warm."] and page.texts(".result") == [
        '{"celsius": 21}',
        "no data\nfor Oslo",
    ]
    sent = fake.bodies[1]
    calls = [
        (one["id"], one["function"]["name"], json.loads(one["function"]["arguments"]))
        for one in sent["messages"][1]["tool_calls"]
    ]
    assert calls == [("call_0", "weather", {"city": "Rome"}), ("call_1", "weather", long)]
    assert sent["messages"][1]["content"] == "Looking." and sent["messages"][1]["reasoning_content"] == "hm"
    assert sent["messages"][2:] == [
        {"role": "tool", "tool_call_id": "call_0", "content": '{"celsius": 21}'},
        {"role": "tool", "tool_call_id": "call_1", "content": "no data\nfor Oslo"},
    ]
    assert sent["tools"] == [WEATHER]
    assert sent["chat_template_kwargs"] == {"enable_thinking": True, "clear_thinking": False}


def test_a_question_instead_of_a_result_and_a_call_that_was_cut_off(page: Any, fake: Any) -> None:
    fake.answers = [
        [fake.call(0, "weather", "{}")],
        [{"content": "Fine."}, fake.call(0, "weather", '{"ci'), fake.CUT],
        [{"content": "End"}],
    ]
    page.goto(fake.url)
    page.ask("one")
    page.idle()
    page.ask("two")
    page.wait_for_selector(".failure:visible")
    assert (
        page.texts(".call header .soft") == ["not run", "cut off"]
        and page.locator(".call textarea:visible").count() == 0
    )
    assert page.inner_text(".last .failure p") == "The connection ended before the answer was complete."
    page.ask("three")
    page.idle()
    assert fake.bodies[1]["messages"][2] == {
        "role": "tool",
        "tool_call_id": "call_0",
        "content": "The user did not run this call.",
    }
    assert [one["role"] for one in fake.bodies[2]["messages"]] == [
        "user",
        "assistant",
        "tool",
        "user",
        "assistant",
        "user",
    ]
    assert fake.bodies[2]["messages"][4] == {"role": "assistant", "content": "Fine."}


def test_stop_retry_edit_and_copy(page: Any, fake: Any) -> None:
    fake.answers = [
        [{"content": "begun"}, 60.0],
        [{"content": "second"}],
        [{"content": "a\n```py\nx = 1\n```"}],
        [{"content": "new"}],
    ]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(fake.url)
    page.ask("question")
    page.wait_for_selector(".md:has-text('begun')")
    page.fill("#ask", "a draft")
    page.press("#ask", "Enter")  # while an answer comes, this sends nothing
    page.click("#send")
    page.idle()
    page.until(lambda: fake.left == 1)
    assert page.inner_text(".stats").startswith("stopped") and len(fake.bodies) == 1
    for text in ("second", "a"):
        page.click("[aria-label='Regenerate answer']")
        page.idle()
        page.wait_for_selector(f".md:has-text('{text}')")
    assert fake.bodies[1] == fake.bodies[2] == fake.bodies[0] and page.locator(".assistant").count() == 1
    page.click("[data-action=copy-code]")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"
    page.click("[aria-label='Copy answer']")
    assert page.evaluate("navigator.clipboard.readText()") == "a\n```py\nx = 1\n```"
    page.evaluate(
        "() => { navigator.clipboard.writeText = () => Promise.reject(); }"
    )  # as on a page that came over plain HTTP
    page.hover(".user")
    page.click("[aria-label='Copy message']")
    assert page.evaluate("navigator.clipboard.readText()") == "question"
    page.click("[aria-label='Edit message']")
    assert page.evaluate("document.activeElement.value") == "question"
    page.keyboard.press("Escape")
    assert page.is_visible(".bubble") and page.locator(".editor").count() == 0
    page.click("[aria-label='Edit message']")
    page.keyboard.press("Control+A")
    page.keyboard.type("better question")
    page.keyboard.press("Enter")
    page.idle()
    assert page.texts(".bubble") == ["better question"] and page.texts(".md") == ["new"]
    assert fake.bodies[3]["messages"] == [{"role": "user", "content": "better question"}]
    assert page.input_value("#ask") == "a draft"


def test_errors_are_sentences_with_a_retry(page: Any, fake: Any) -> None:
    def refused(status: int, message: str) -> JSONResponse:
        return JSONResponse({"error": {"message": message}}, status)

    broken = [{"content": "half"}, {"error": {"message": "The engine stopped."}}]
    refusals = [refused(429, "The server is <b>busy</b>."), Response("<h1>502</h1>", 502), refused(401, "Wrong key.")]
    fake.answers = [*refusals, broken, [{"content": "good"}]]
    page.refused = 3
    page.goto(fake.url)
    page.ask("hello")
    for sentence in ("The server is <b>busy</b>.", "The server answered 502."):
        page.wait_for_selector(f".failure p[role=alert]:text-is('{sentence}')")
        page.idle()
        page.click(".failure >> text=Retry")
    page.wait_for_selector("#settings[open]")
    assert page.evaluate("document.activeElement.dataset.field") == "key"
    page.keyboard.type("sesame")
    page.keyboard.press("Escape")
    assert page.is_visible(".failure") and "authorization" not in fake.headers[-1]
    page.click(".failure >> text=Retry")
    page.wait_for_selector(".failure p:text-is('The engine stopped.')")
    assert page.texts(".md") == ["half"] and fake.headers[-1]["authorization"] == "Bearer sesame"
    page.idle()
    page.click(".failure >> text=Retry")
    page.idle()
    assert page.texts(".md") == ["good"] and page.is_hidden(".failure")
    page.reload()
    assert page.input_value("[data-field=key]") == "sesame"
    assert "sesame" not in page.evaluate("JSON.stringify({...localStorage})")


def test_settings_reach_the_server_and_can_be_reset(page: Any, fake: Any) -> None:
    fake.answers = [[{"content": "{}"}]]
    page.goto(fake.url)
    numbers = {"temperature": 0.25, "max_tokens": 40, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -7,
               "presence_penalty": -1, "frequency_penalty": 0.5, "repetition_penalty": 1.1}  # fmt: skip
    for name, value in numbers.items():
        page.setting(name, str(value))
    page.setting("system", "Be brief.")
    page.setting("stop", "END\n###\n")
    page.setting("json", True)
    page.click("#thinking-chip")
    page.reload()
    assert page.get_attribute("#thinking-chip", "aria-pressed") == "false" and page.is_visible("#json-chip")
    page.ask("q")
    page.idle()
    assert fake.bodies[-1] == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}], "stream": True,
        "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": False},
        **numbers, "stop": ["END", "###"], "response_format": {"type": "json_object"},
    }  # fmt: skip
    for name, value, problem in (
        ("tools", "[{", "The tools are not JSON: "), ("tools", "[{}]", 'Tool 1 needs a "function" with a "name".'),
        ("tools", json.dumps([WEATHER, WEATHER]), 'Two tools are named "weather".'),
        ("top_p", "1.5", "Top p must be at most 1."), ("top_k", "1.5", "Top k must be a whole number."),
    ):  # fmt: skip
        page.setting(name, value)
        page.ask("not sent")
        page.wait_for_selector("#settings[open]")
        assert page.evaluate("document.activeElement.dataset.field") == name
        assert page.inner_text(".problem").startswith(problem)
        page.keyboard.press("Escape")
        page.setting(name, "")
    assert len(fake.bodies) == 1 and page.input_value("#ask") == "not sent"
    page.click("#open-settings")
    page.click("#reset")
    page.keyboard.press("Escape")
    page.press("#ask", "Enter")
    page.idle()
    left = {key: value for key, value in fake.bodies[-1].items() if key != "messages"}
    assert left == {
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": True},
    }
    assert fake.bodies[-1]["messages"][0]["role"] == "user"


def test_theme_and_narrow_screens(page: Any, fake: Any) -> None:
    wide = (
        "| "
        + " | ".join(f"column {i}" for i in range(20))
        + " |\n"
        + "|-" * 20
        + "|\n\n`"
        + "w" * 300
        + "`\n\n```\n"
        + "x" * 400
        + "\n```\n"
    )
    fake.answers = [[{"content": wide + "v" * 300}, fake.call(0, "n" * 200, json.dumps({"k" * 100: "v" * 300}))]]
    page.goto(fake.url)
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.click("#theme")
    dark = page.evaluate(back)
    page.reload()
    assert page.evaluate(back) == dark != light and page.get_attribute("#theme", "aria-pressed") == "true"
    page.click("#theme")
    assert page.evaluate(back) == light and page.evaluate("localStorage.getItem('glm5.theme')") is None
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(back) == dark
    page.setting("json", True)
    page.setting("tools", json.dumps([WEATHER]))
    page.ask("q" * 300)
    page.idle()
    for width, height in ((360, 740), (320, 568), (740, 320)):
        page.set_viewport_size({"width": width, "height": height})
        for opener in (None, "#open-settings", "#open-chats"):
            if opener:
                page.click(opener)
            assert page.evaluate(
                "document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth"
            )
            assert page.evaluate(
                "[...document.querySelectorAll('#log, dialog[open], .fields')]"
                ".every((one) => one.scrollWidth <= one.clientWidth)"
            )
            if opener:
                page.keyboard.press("Escape")
        box = page.locator("#send").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= height


def test_a_whole_turn_by_keyboard(page: Any, fake: Any) -> None:
    fake.answers = [[{"content": "no"}, fake.call(0, "f", "{}")], [{"content": "yes"}, 60.0], [{"content": "again"}]]
    page.goto(fake.url)
    press, typed = page.keyboard.press, page.keyboard.type

    def tab_to(label: str, key: str = "Tab") -> None:
        for _ in range(60):
            found = page.evaluate("""() => {
                const at = document.activeElement, style = getComputedStyle(at);
                const seen = style.outlineStyle !== "none" || at.closest(".card") !== null;
                return [at.getAttribute("aria-label") || at.textContent.trim(), seen];
            }""")
            assert found[1], f"{found[0]} has the focus and does not show it"
            if found[0] == label:
                return
            press(key)
        raise AssertionError(f"{label} cannot be reached")

    typed("one")  # the message box has the focus from the start
    press("Shift+Enter")
    typed("two")
    press("Enter")
    page.idle()
    assert fake.bodies[0]["messages"][0]["content"] == "one\ntwo"
    typed("result")  # of the call: its field took the focus
    press("Enter")
    page.wait_for_selector(".md:has-text('yes')")
    assert fake.bodies[1]["messages"][-1]["content"] == "result"
    press("Escape")
    page.idle()
    page.until(lambda: fake.left == 1)
    tab_to("Regenerate answer", "Shift+Tab")
    press("Enter")
    page.idle()
    assert page.texts(".last .md") == ["again"]
    tab_to("Settings", "Shift+Tab")
    press("Enter")
    press("Tab")
    press("Space")  # the switch behind the system prompt
    press("Escape")
    assert page.get_attribute("#thinking-chip", "aria-pressed") == "false"
    tab_to("New chat", "Shift+Tab")
    press("Enter")
    assert page.is_visible("#empty") and page.evaluate("document.activeElement.id") == "ask"
