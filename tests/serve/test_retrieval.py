"""The search tools over HTTP: Search-R1's and BrowseComp-Plus's forms, MCP, and requests that are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from glm5.errors import GradingError
from glm5.serve.retrieval import _forbidden, create_app
from glm5.tasks.search.index import quotes
from glm5.tasks.search.web import Web
from tests.tasks.search.world import tiny_web

pytest.importorskip("bm25s")


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Web:
    return Web(tiny_web(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def client(web: Web) -> TestClient:
    return TestClient(create_app(web), base_url="http://127.0.0.1")


def test_search_r1(client: TestClient) -> None:
    body = {"queries": ["computing built 1951", "nothing-like-it"], "topk": 2, "return_scores": True}
    found, empty = client.post("/retrieve", json=body).json()["result"]
    assert empty == [] and len(found) == 2 and found[0]["score"] >= found[1]["score"] > 0
    assert found[0]["document"]["contents"].startswith('"alpha machine"\nalpha machine is a computing term.')
    assert found[0]["document"]["id"] == "term/alpha-machine"
    [plain, *_] = client.post("/retrieve", json={"queries": ["beta"]}).json()["result"]
    assert set(plain[0]) == {"id", "contents"} and len(plain) == 3


def test_browsecomp_plus(client: TestClient) -> None:
    [first, *_] = client.post("/search", json={"query": "computing built 1951", "k": 2}).json()["results"]
    assert first["docid"] == "term/alpha-machine" and "1951" in first["snippet"]
    whole = client.post("/get_document", json={"docid": first["docid"]}).json()
    assert whole["docid"] == first["docid"] and "See beta code" in whole["text"]
    forbidden = {"forbidden_texts": [whole["text"]]}
    assert client.post("/get_document", json={"docid": first["docid"], **forbidden}).status_code == 404
    assert all(
        r["docid"] != first["docid"]
        for r in client.post("/search", json={"query": "computing 1951", **forbidden}).json()["results"]
    )


def rpc(client: TestClient, method: str, id: int | None = 1, **params: Any) -> Any:
    body = {"jsonrpc": "2.0", "method": method, "params": params} | ({} if id is None else {"id": id})
    answer = client.post("/mcp", json=body)
    return answer.json() if id is not None else answer.status_code


def test_mcp(client: TestClient) -> None:
    assert rpc(client, "initialize", protocolVersion="2025-03-26")["result"]["protocolVersion"] == "2025-03-26"
    assert rpc(client, "notifications/initialized", id=None) == 202
    assert {tool["name"] for tool in rpc(client, "tools/list")["result"]["tools"]} == {"search", "get_document"}
    found = rpc(client, "tools/call", name="search", arguments={"query": "computing built 1951", "k": 1})["result"]
    assert (
        json.loads(found["content"][0]["text"])["results"][0]["docid"] == "term/alpha-machine" and not found["isError"]
    )
    assert rpc(client, "tools/call", name="get_document", arguments={"docid": "no"})["result"]["isError"]
    assert rpc(client, "tools/call", name="shell", arguments={})["error"]["code"] == -32602
    assert rpc(client, "resources/list")["error"]["code"] == -32601
    assert client.post("/mcp", json={"id": 1, "params": []}).json()["error"]["code"] == -32600


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/retrieve", {}),
        ("/retrieve", {"queries": "x"}),
        ("/retrieve", {"queries": ["x"], "topk": 0}),
        ("/retrieve", {"queries": ["x"], "topk": True}),
        ("/retrieve", {"queries": [1]}),
        ("/retrieve", {"queries": ["x"] * 999}),
        ("/search", {"query": 3}),
        ("/search", {"query": "x" * 9999}),
        ("/search", {"query": "x", "k": 10**9}),
        ("/search", {"query": "x", "forbidden_texts": "y"}),
        ("/get_document", {"docid": 3}),
        ("/search", []),
    ],
)
def test_wrong_requests(client: TestClient, path: str, body: object) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/retrieve", "/search", "/get_document", "/mcp"])
@pytest.mark.parametrize(
    "value",
    [r'"\ud800"', "NaN", "1e400", "-Infinity", "[" * 9000, "9" * 5000],
    ids=["half", "nan", "inf", "minus", "deep", "long"],
)
def test_values_that_cannot_be_sent_back(client: TestClient, path: str, value: str) -> None:
    """Wherever they stand in a body."""
    for key in ("id", "docid", "query", "method", "other"):
        body = f'{{"jsonrpc": "2.0", "method": "ping", "query": "x", "queries": [], "{key}": {value}}}'
        answer = client.post(path, content=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"] == "The body is not JSON."


def test_a_request_for_too_much(client: TestClient) -> None:
    body = {"queries": ["computing built 1951"] * 256, "topk": 100}
    refused = client.post("/retrieve", json=body)
    assert refused.status_code == 400 and "at most 5120" in refused.json()["error"]["message"]
    assert client.post("/retrieve", json=body | {"topk": 20}).status_code == 200


def test_many_forbidden_texts_are_one_set_for_each_size() -> None:
    texts = [" ".join(f"word{i} {j}" for j in range(size)) for i in range(30) for size in (4, 5, 20)]
    found = _forbidden({"forbidden_texts": texts[:64]})
    assert sorted(len(next(iter(grams))) for grams in found) == [8, 10, 13]
    page = " ".join(f"word3 {j}" for j in range(4))
    assert quotes(page, found) and quotes(f"so {page} on", found) and not quotes(page.replace("3 0", "3 1"), found)


def test_what_guards_it(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    client = TestClient(create_app(web, api_key="k"), base_url="http://127.0.0.1")
    assert client.post("/search", json={"query": "x"}).status_code == 401
    assert client.post("/search", json={"query": "x"}, headers={"authorization": "Bearer k"}).status_code == 200
    assert client.post("/search", content=b"{", headers={"authorization": "Bearer k"}).status_code == 400

    def broken(url: str) -> None:
        raise GradingError("the disk is gone")

    monkeypatch.setattr(web, "page", broken)
    answer = client.post("/search", json={"query": "beta"}, headers={"authorization": "Bearer k"})
    assert answer.status_code == 503 and "the disk is gone" in answer.json()["error"]["message"]
