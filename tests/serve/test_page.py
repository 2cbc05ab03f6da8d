"""The chat page, as far as it can be judged without a browser (`test_page_e2e.py` has one)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from typing import Any

import pytest
from fastapi.testclient import TestClient

from glm5.engine.engine import Engine
from glm5.records import SamplingParams
from glm5.serve.app import create_app
from glm5.serve.page import HERE, SCRIPTS, content_policy, page_route, page_text

OURS = ("page.html", "page.css", *SCRIPTS)


def blocks(tag: str, page: str) -> list[str]:
    return re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)


def test_everything_of_the_page_is_in_the_page(client: TestClient) -> None:
    response = client.get("/")
    page, policy = response.text, response.headers["content-security-policy"]
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert "<h1>nano</h1>" in page and "{{" not in page
    for tag, names in (("style", ["page.css"]), ("script", SCRIPTS)):
        [block] = blocks(tag, page)
        assert block == "".join((HERE / name).read_text(encoding="utf-8") for name in names)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy.split("; ")
    assert set(HERE.glob("[!_]*.*")) == {HERE / name for name in OURS}


def test_the_policy_allows_no_more_than_the_page_needs(client: TestClient) -> None:
    rules = dict(rule.split(" ", 1) for rule in client.get("/").headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'" and rules["img-src"] == "data:"
    assert rules["require-trusted-types-for"] == "'script'" and rules["trusted-types"] == "'none'"
    assert all(re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules[name]) for name in ("script-src", "style-src"))
    with pytest.raises(ValueError, match="no <script>"):
        content_policy("<style></style>")


@pytest.mark.parametrize("name", OURS)
def test_no_way_from_text_to_markup_and_no_other_origin(name: str) -> None:
    source = (HERE / name).read_text(encoding="utf-8")
    code = re.sub(r"(?m)^\s*//.*$", "", source)
    assert not re.search(r"https?:|[\"'(]//", code), "an address of somewhere else"
    assert not re.search(r"@import|url\(|\ssrc=|srcset|<link (?!rel=\"icon\" href=\"data:,\")", code)
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|DOMParser|createContextualFragment"
    assert not re.search(
        banned + r"|\beval\b|\bFunction\(|\bimport\(|srcdoc|\bon\w+\s*=[^=>]|\sstyle=|javascript:", code
    )
    assert not re.search(r"set(?:Timeout|Interval)\(\s*[\"'`]|\b(?:alert|confirm|prompt)\(", code)
    for line in code.splitlines():  # attributes that take an address get ours, or a checked one
        if re.search(r"\.href = |\.src = ", line):
            assert line.strip() == "link.href = address;"


def test_ids_and_fields_of_the_script_exist() -> None:
    page = page_text("m")
    ids = re.findall(r'\sid="([\w-]+)"', page)
    assert len(ids) == len(set(ids))
    [script] = blocks("script", page)
    named = set(re.findall(r"\$\(\"([\w-]+)\"\)|cloneOf\(\"([\w-]+)\"\)|\bon\(\"([\w-]+)\"", script))
    assert {name for found in named for name in found if name} <= set(ids)
    assert {f"i-{name}" for name in re.findall(r'href="#i-([\w-]+)"', page)} <= set(ids)
    for label in re.findall(r"<button[^>]*>", page):  # a button of an icon alone has a name
        assert 'type="' in label
    fields = re.findall(r'data-field="(\w+)"', page.replace(script, ""))
    numbers = re.findall(r'type="number" data-field="(\w+)"', page)
    [listed] = re.findall(r"const NUMBERS = \[(.*?)\]", script, re.DOTALL)
    assert sorted(re.findall(r"\"(\w+)\"", listed)) == sorted(numbers) and len(set(fields)) == len(fields) == 16


def test_numbers_have_the_bounds_of_the_server() -> None:
    """What the page lets through, the server takes, and the other way round."""
    from pydantic import ValidationError

    from glm5.serve.surfaces.openai.schema import ChatRequest

    def taken(name: str, value: float) -> bool:
        try:
            ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], name: value})
        except ValidationError:
            return False
        return True

    found = re.findall(r'data-field="(\w+)" min="([\d.-]+)" max="([\d.-]+)" step="(\w+)"', page_text("m"))
    assert len(found) == 9
    for name, low, high, step in found:
        kind: Any = int if step == "1" else float
        assert taken(name, kind(low)) and taken(name, kind(high)), name
        if name != "seed":  # whose bounds are those of a number in JavaScript
            assert not taken(name, kind(low) - 1) and not taken(name, kind(high) + 1), name


@pytest.mark.parametrize("name", ["<b>&\"'", "{{script}}", "\\1{{model}}", "</title><script>alert(1)</script>"])
def test_a_model_name_is_text(name: str) -> None:
    route: Any = page_route(name).routes[0]
    page = asyncio.run(route.endpoint()).body.decode()
    assert len(blocks("script", page)) == 1 and "<b>" not in page and "alert(1)</script>" not in page
    assert content_policy(page) == content_policy(page_text("plain"))


def test_usage_tells_of_drafts(model: Any, tokenizer: Any) -> None:
    """The page shows how many drafts an answer kept; the figures add up to the engine's own."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    engine = Engine(model, tokenizer, speculative=2)
    app = create_app(engine, tokenizer, model_name="nano", defaults=SamplingParams())
    with TestClient(app) as client:
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    details = usage["completion_tokens_details"]
    assert usage["completion_tokens"] == 24 and details["draft_tokens"] == 2 * engine.rounds > 0
    # The last step may have had more than there was room for.
    assert details["accepted_draft_tokens"] == 24 - 1 - engine.rounds <= sum(engine.accepted)
    app = create_app(Engine(model, tokenizer), tokenizer, model_name="nano", defaults=SamplingParams())
    with TestClient(app) as client:
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["completion_tokens_details"].keys() == {"reasoning_tokens"}
