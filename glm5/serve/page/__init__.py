"""The chat page at `/`: one document without external requests, and the content security policy that enforces it."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

HERE = Path(__file__).parent
SCRIPTS = ("markdown.js", "state.js", "view.js", "stream.js", "chat.js")
"""The scripts are inlined in this order; they share one scope."""


def page_route(model_name: str) -> APIRouter:
    """GET / with the page for one model."""
    text = page_text(model_name)
    headers = {
        "Content-Security-Policy": content_policy(text),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    routes = APIRouter()

    @routes.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=headers)

    return routes


def page_text(model_name: str) -> str:
    """The document with its style and scripts inlined. All placeholders are replaced in one pass, so a model name that
    looks like a placeholder stays as it is."""
    parts = {
        "model": html.escape(model_name),
        "style": _read("page.css"),
        "script": "".join(map(_read, SCRIPTS)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("page.html"))


def content_policy(text: str) -> str:
    """A policy that allows only this page's own script and style, by their hashes, and requests only to its own origin.
    Browsers with trusted types refuse to parse any text as markup."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _hash(text: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    if found is None:
        raise ValueError(f"page.html has no <{tag}>")
    return f"'sha256-{base64.b64encode(hashlib.sha256(found.group(1).encode()).digest()).decode()}'"
