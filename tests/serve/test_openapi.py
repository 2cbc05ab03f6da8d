"""The OpenAPI document says what the routes do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from glm5.serve.errors import ApiError
from glm5.serve.openapi import BODIES
from glm5.serve.service import Service


@pytest.fixture(scope="module")
def written(client: TestClient) -> dict[str, Any]:
    answer = client.get("/openapi.json")
    assert answer.status_code == 200
    read: dict[str, Any] = answer.json()
    return read


def test_bodies_are_those_that_the_routes_read(
    scripted: Callable[..., Any], written: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = scripted("x", client=("127.0.0.1", 1))
    seen: list[Any] = []

    async def read(self: Service, request: Any, kind: Any) -> Any:
        seen.append(kind)
        raise ApiError(400, "This test wants to know the kind only.")

    monkeypatch.setattr(Service, "read", read)
    for path, methods in written["paths"].items():
        if "post" in methods:
            seen.clear()
            client.post(path, json={"x": 1})
            assert seen == ([BODIES[path]] if path in BODIES else []), path
            assert ("requestBody" in methods["post"]) == (path in BODIES)
    assert BODIES.keys() <= written["paths"].keys()


def test_references_resolve(written: dict[str, Any]) -> None:
    text, known = json.dumps(written), written["components"]["schemas"]
    used = {part.split('"', 1)[0] for part in text.split('"#/components/schemas/')[1:]}
    assert used <= known.keys() and {"ChatRequest", "MessagesRequest", "GenerateRequest", "OpenAIError"} <= used
    names = [operation["operationId"] for methods in written["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


def test_null_stands_for_absent_and_refused_fields_are_named(written: dict[str, Any]) -> None:
    schema = written["components"]["schemas"]["ChatRequest"]
    assert {"type": "null"} in schema["properties"]["top_p"]["anyOf"]
    assert schema["properties"]["messages"]["type"] == "array" and schema["required"] == ["messages"]
    assert [] in schema["properties"]["functions"]["enum"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/generate"])
def test_errors_are_as_declared(client: TestClient, written: dict[str, Any], path: str) -> None:
    answer = client.post(path, json={"messages": 3})
    declared = written["paths"][path]["post"]["responses"][str(answer.status_code)]["content"]["application/json"]
    schema = written["components"]["schemas"][declared["schema"]["$ref"].rsplit("/", 1)[1]]
    assert schema["required"] == ["error"]
    assert set(schema["properties"]["error"]["required"]) <= answer.json()["error"].keys()
    assert set(written["paths"][path]["post"]["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }
