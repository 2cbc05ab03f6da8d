"""The chat page in a real browser, and a server that says what a test wants."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from glm5.serve.page import page_route
from tests.pages import Served, browser, wait_for

__all__ = ["browser"]


@dataclass
class Fake:
    """An OpenAI endpoint with the page. `answers` are given in turn, each a list of deltas, chunks, seconds and gates,
    or a response; the last one is given for ever."""

    answers: list[Any] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    GATE: ClassVar[object] = object()  # in an answer: wait until the test opens the gate
    CUT: ClassVar[object] = object()  # in an answer: end without a last word
    left: int = 0  # answers whose reader hung up
    gate: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    model: str = "glm-5-<fake>"

    @staticmethod
    def usage(completion: int, **details: int) -> dict[str, Any]:
        tokens = {"prompt_tokens": 1234, "completion_tokens": completion, "total_tokens": 1234 + completion}
        cached = {"prompt_tokens_details": {"cached_tokens": 1000}}
        return {"choices": [], "usage": tokens | cached | {"completion_tokens_details": details}}

    @staticmethod
    def call(index: int, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"tool_calls": [{"index": index, "id": f"call_{index}", "type": "function", "function": function}]}

    def app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(page_route(self.model))

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            self.bodies.append(await request.json())
            self.headers.append(dict(request.headers))
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, Response):
                return answer
            return StreamingResponse(self._events(answer), media_type="text/event-stream")

        return app

    async def _events(self, answer: list[Any]) -> AsyncIterator[str]:
        finish = "tool_calls" if any("tool_calls" in one for one in answer if isinstance(one, dict)) else "stop"
        try:
            for item in answer:
                if item is self.CUT:
                    return
                elif item is self.GATE:
                    while not self.gate.is_set():
                        await asyncio.sleep(0.005)
                    self.gate.clear()
                elif isinstance(item, float):
                    await asyncio.sleep(item)
                elif "choices" in item or "error" in item:
                    yield f"data: {json.dumps(item)}\n\n"
                else:
                    yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': item}]})}\n\n"
            yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {}, 'finish_reason': finish}]})}\n\n"
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise


@pytest.fixture
def fake() -> Iterator[Fake]:
    fake = Fake()
    served = Served(fake.app())
    fake.url = served.url
    yield fake
    fake.gate.set()
    served.stop()


class Chat:
    """A page with what a user does on it; all else is the page of playwright. What it must not do is noted down."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.refused = 0  # answers that the test wanted to be errors; the console tells of each
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.page, name)

    def ask(self, text: str) -> None:
        self.fill("#ask", text)
        self.press("#ask", "Enter")

    def idle(self) -> None:
        self.wait_for_selector("body:not(.running)")

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.locator(selector).all_inner_texts()]

    def setting(self, name: str, value: str | bool) -> None:
        self.evaluate("openSettings('key')")
        part = self.locator(f"[data-field={name}]")
        if isinstance(value, bool):
            part.set_checked(value)
        else:
            part.fill(value)
        self.click("#settings footer [data-close]")

    @staticmethod
    def until(condition: Callable[[], Any]) -> None:
        wait_for(condition)


@pytest.fixture
def page(browser: Any) -> Iterator[Chat]:
    """A page of a fresh profile; at the end it has asked nobody but its server, and the console is clean."""
    context = browser.new_context(viewport={"width": 1100, "height": 800}, color_scheme="light")
    page = Chat(context.new_page())
    page.set_default_timeout(20_000)
    yield page
    context.close()
    origins = {"/".join(url.split("/")[:3]) for url in page.requests if not url.startswith("data:")}
    refusals = [text for text in page.errors if "Failed to load resource" in text]
    assert len(origins) == 1 and origins.pop().startswith("http://127.0.0.1:")
    assert len(refusals) == page.refused and len(page.errors) == len(refusals), page.errors
    assert not page.dialogs
