"""What the chat page keeps in the browser."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.browser]


def test_chats_are_kept_until_deleted(page: Any, fake: Any) -> None:
    fake.answers = [
        [{"reasoning_content": "hm"}, {"content": "**one**"}, fake.usage(5, reasoning_tokens=2)],
        [{"content": "two"}],
    ]
    page.goto(fake.url)
    page.ask("first question")
    page.idle()
    look = page.inner_text("#turns")
    page.reload()
    assert page.inner_text("#turns") == look and page.texts(".md strong") == ["one"]
    page.click("#new")
    assert page.is_visible("#empty")
    page.ask("second question")
    page.idle()
    other = page.context.new_page()  # another tab begins with the latest chat
    other.goto(fake.url)
    assert other.locator(".md").all_inner_texts() == ["two"]
    other.close()
    page.click("#open-chats")
    assert page.texts("#chat-list .open span") == ["second question", "first question"]
    page.click("text=first question")
    assert page.inner_text("#turns") == look
    page.click("#open-chats")
    page.click("[aria-label='Delete first question']")
    assert page.texts("#chat-list .open span") == ["second question"] and page.locator(".turn").count() == 0
    page.click("#clear-all")
    page.click("text=Really delete all? Press again")
    page.reload()
    assert page.is_visible("#empty")
    assert page.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('glm5.chat.'))") == []


def test_damaged_or_full_storage_is_no_obstacle(page: Any, fake: Any) -> None:
    fake.answers = [[{"content": "fine"}]]
    page.goto(fake.url)
    page.evaluate("""() => {
        localStorage["glm5.settings"] = "{";
        localStorage["glm5.theme"] = "[]";
        localStorage["glm5.chat.x"] = '{"id": "x"}';
        const turns = [null, { role: "assistant", content: 5, calls: [7] }, { role: "evil" }];
        localStorage["glm5.chat.y"] = JSON.stringify({ id: "y", turns });
        const full = [{ role: "user", content: "x".repeat(5e6) }];
        localStorage["glm5.chat.full"] = JSON.stringify({ id: "full", updated: 1, turns: full });
    }""")
    page.reload()
    page.click("#new")
    page.ask("y" * 400_000)
    page.idle()
    page.reload()
    assert page.texts(".md") == ["fine"] and page.is_hidden("#notice")  # the oldest made room
    page.evaluate(
        "() => { Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }; }"
    )
    page.ask("again")
    page.idle()
    assert "will not survive a reload" in page.inner_text("#notice")
