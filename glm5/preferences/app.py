"""The page of `glm5 prefer`: a small server on this machine only, without any request to another one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pydantic

from glm5.errors import MissingExtraError, UsageError
from glm5.preferences.store import CONSENT, CONSENT_HASH, MOST_WHY, PreferenceStore

try:
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse, JSONResponse
except ImportError as error:
    raise MissingExtraError("fastapi", "serve") from error

from glm5.serve.access import LOOPBACK_NAMES, Access, add_guard, is_loopback
from glm5.serve.connection import Server, ServerConfig, announce, bind
from glm5.serve.options import Limits
from glm5.serve.page import content_policy

HERE = Path(__file__).parent / "page"
MOST_BODY = 1 << 16
STOP_S = 2.0


class Named(pydantic.BaseModel):
    """A request of a rater."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    rater: str


class Agreement(Named):
    """The hash of the text that the rater has accepted."""

    consent: str


class Vote(Named):
    """A vote on a pair."""

    pair: str = pydantic.Field(max_length=64)
    side: str = pydantic.Field(max_length=16)
    why: str = pydantic.Field("", max_length=MOST_WHY)
    seconds: Annotated[float, pydantic.Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0


class Back(Named):
    """From which pair to go back; None: from the end."""

    pair: str | None = pydantic.Field(None, max_length=64)


def page_text() -> str:
    """The document with its style and script inlined."""
    text = (HERE / "prefer.html").read_text(encoding="utf-8")
    for name in ("style", "script"):
        part = (HERE / f"prefer.{'css' if name == 'style' else 'js'}").read_text(encoding="utf-8")
        text = text.replace("{{" + name + "}}", part)
    return text


def create_app(store: PreferenceStore, rater: str = "", host: str = "127.0.0.1") -> FastAPI:
    """The page and its requests. `rater` is the name that the page proposes, `host` the address it is served on."""
    app = FastAPI(title="glm5 prefer", docs_url=None, redoc_url=None, openapi_url=None)
    text = page_text()
    headers = {
        "Content-Security-Policy": content_policy(text),
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }

    def state(name: str, pair: str | None) -> dict[str, Any]:
        card = None if pair is None else asdict(store.card(name, pair))
        return {"card": card, "progress": store.progress(name), "agreed": store.agreed(name)}

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=headers)

    @app.get("/api/consent")
    async def consent() -> dict[str, str]:
        return {"text": CONSENT, "hash": CONSENT_HASH, "rater": rater}

    # The following are not `async`: while the store waits for the disk or another process, other requests go on.

    @app.post("/api/agree")
    def agree(said: Agreement) -> dict[str, Any]:
        name = store.rater(said.rater)
        store.agree(name, said.consent)
        return state(name, store.next_pair(name))

    @app.post("/api/next")
    def following(said: Named) -> dict[str, Any]:
        name = store.rater(said.rater)
        return state(name, store.next_pair(name) if store.agreed(name) else None)

    @app.post("/api/vote")
    def vote(said: Vote) -> dict[str, Any]:
        name = store.rater(said.rater)
        store.vote(name, said.pair, said.side, said.why, said.seconds)
        return state(name, store.next_pair(name))

    @app.post("/api/back")
    def back(said: Back) -> dict[str, Any]:
        name = store.rater(said.rater)
        if not store.agreed(name):
            return state(name, None)
        return state(name, store.previous_pair(name, said.pair) or said.pair)

    @app.post("/api/unskip")
    def unskip(said: Named) -> dict[str, Any]:
        name = store.rater(said.rater)
        store.unskip(name)
        return state(name, store.next_pair(name) if store.agreed(name) else None)

    @app.post("/api/forget")
    def forget(said: Named) -> dict[str, int]:
        return {"deleted": store.forget(store.rater(said.rater))}

    @app.middleware("http")
    async def small(request: Request, call_next: Any) -> Any:
        length = request.headers.get("content-length", "")
        if request.method == "POST" and not (length.isascii() and length.isdigit() and int(length) <= MOST_BODY):
            return JSONResponse({"error": "The request is too large or does not say how large it is."}, 413)
        return await call_next(request)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        # Without the value itself: it may be a number or a text that JSON cannot say.
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        text = f"The request is malformed at {ascii(where)[1:-1][:80] or 'its beginning'}: {first['msg']}."
        return JSONResponse({"error": text}, 422)

    @app.exception_handler(sqlite3.OperationalError)
    async def busy(request: Request, error: sqlite3.OperationalError) -> JSONResponse:
        locked = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        why = "Another program is writing to it; try again in a moment." if locked else f"{error}."
        return JSONResponse({"error": f"The file of votes cannot be used now. {why}"}, 503)

    @app.exception_handler(UsageError)
    async def refused(request: Request, error: UsageError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 400)

    add_guard(app, None, Access(), {*LOOPBACK_NAMES, host}, 64, lambda path, status: None)
    return app


def bind_local(host: str, port: int) -> socket.socket:
    """The page's socket. Raises UsageError for a host that other machines reach, or a port in use."""
    if not is_loopback(host):
        raise UsageError(f"{host} can be reached from other machines; the page has no password, so use 127.0.0.1.")
    return bind(host, port)


def serve_page(store: PreferenceStore, rater: str, host: str, listener: socket.socket, open_browser: bool) -> None:
    """Serve the page on `bind_local`'s socket until Ctrl-C, and close it."""

    def ready(sockets: Iterable[socket.socket]) -> None:
        announce(sockets)
        if open_browser:
            import webbrowser

            with contextlib.suppress(webbrowser.Error):
                webbrowser.open(f"http://127.0.0.1:{listener.getsockname()[1]}/")

    limits = Limits()
    server = Server(ServerConfig(create_app(store, rater, host), limits, STOP_S), ready)
    with contextlib.closing(listener), contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve([listener]))
