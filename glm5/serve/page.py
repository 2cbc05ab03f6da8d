"""The chat page at `/`: one file without outside requests, and the policy that keeps it so."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

PAGE = Path(__file__).with_name("page.html")


def page_route(model_name: str) -> APIRouter:
    """GET / with the page for one model."""
    text = PAGE.read_text(encoding="utf-8").replace("{{model}}", html.escape(model_name))
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


def content_policy(text: str) -> str:
    """Only this page's own script and style, known by their hashes, and only requests to where it came from."""
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
        )
    )


def _hash(text: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    if found is None:
        raise ValueError(f"{PAGE.name} has no <{tag}>")
    return f"'sha256-{base64.b64encode(hashlib.sha256(found.group(1).encode()).digest()).decode()}'"
