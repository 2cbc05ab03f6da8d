"""The search tools of a built web over HTTP, for agents that others wrote: `glm5 task serve DIR`.

- `POST /retrieve`, as Search-R1's retriever: `{queries, topk, return_scores}` gives `{result: [[{document, score}]]}`,
  each document with `id` and `contents` (title in quotes, then the text).
- `POST /search` and `POST /get_document`, as BrowseComp-Plus's tools: `{query, k}` gives `{results: [{docid, score,
  snippet}]}`, `{docid}` gives `{docid, text}`.
- `POST /mcp`: the same two tools over the Model Context Protocol (streamable HTTP without sessions or streams).

`forbidden_texts` in a body, a list of texts, leaves out pages that quote one of them by 13 words in a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from glm5.errors import GradingError
from glm5.serve.access import KEY_ALONE, add_guard, hosts_answered
from glm5.serve.connection import Server, ServerConfig, bind, fitted
from glm5.serve.errors import HANDLED, ApiError, on_error
from glm5.serve.http_io import read_body
from glm5.serve.options import Limits
from glm5.tasks.search.index import ngrams, quotes, snippet
from glm5.tasks.search.records import Page
from glm5.tasks.search.web import Web

MOST_QUERIES = 256
MOST_RESULTS = 100
MOST_DOCUMENTS = 5_120
"""Results of all queries of a request together."""
MOST_TEXT = 4_000
MOST_FORBIDDEN = 64
SNIPPET = 2_048
"""Characters of a snippet: about the 512 tokens of BrowseComp-Plus."""
PROTOCOL = "2025-06-18"
"""Version of the Model Context Protocol that is answered if the client names none."""


class Retrieval:
    """The answers to requests, as plain data. Thread-safe."""

    def __init__(self, web: Web) -> None:
        self._web = web

    def retrieve(self, body: dict[str, Any]) -> dict[str, Any]:
        """Search-R1's `/retrieve`."""
        queries = body.get("queries")
        if not isinstance(queries, list) or len(queries) > MOST_QUERIES or not all(map(_is_query, queries)):
            raise ApiError(400, f"queries is a list of at most {MOST_QUERIES} texts of at most {MOST_TEXT} characters.")
        num, scored, grams = _number(body, "topk", 3), body.get("return_scores", False), _forbidden(body)
        if num * len(queries) > MOST_DOCUMENTS:
            raise ApiError(400, f"topk times the number of queries is at most {MOST_DOCUMENTS}.", param="topk")
        found = list[list[Any]]()
        for query in queries:
            pages = self._found(query, num, grams)
            documents = [{"id": page.url, "contents": f'"{page.title}"\n{page.text}'} for page, _ in pages]
            scores = [score for _, score in pages]
            rows = [{"document": d, "score": s} for d, s in zip(documents, scores)] if scored is True else documents
            found.append(rows)
        return {"result": found}

    def search(self, body: dict[str, Any]) -> dict[str, Any]:
        """BrowseComp-Plus's `search`."""
        query = body.get("query")
        if not _is_query(query):
            raise ApiError(400, f"query is a text of at most {MOST_TEXT} characters.")
        pages = self._found(str(query), _number(body, "k", 5), _forbidden(body))
        rows = [
            {"docid": page.url, "score": score, "snippet": snippet(f"{page.title}\n{page.text}", str(query), SNIPPET)}
            for page, score in pages
        ]
        return {"results": rows}

    def get_document(self, body: dict[str, Any]) -> dict[str, Any]:
        """BrowseComp-Plus's `get_document`."""
        docid = body.get("docid")
        if not isinstance(docid, str):
            raise ApiError(400, "docid is a text.")
        page = self._web.page(docid)
        if page is None or quotes(page.text, _forbidden(body)):
            raise ApiError(404, f"There is no document {docid!r:.200}.")
        return {"docid": page.url, "text": f"{page.title}\n{page.text}"}

    def _found(self, query: str, num: int, grams: list[frozenset[tuple[str, ...]]]) -> list[tuple[Page, float]]:
        hits = self._web.index.search(query, num * 2 if grams else num)
        pages = ((self._web.page(hit.url), hit.score) for hit in hits)
        return [(page, score) for page, score in pages if page is not None and not quotes(page.text, grams)][:num]

    def mcp(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """One message of the Model Context Protocol; None for a notification."""
        method, params, id = body.get("method"), body.get("params", {}), body.get("id")
        if not isinstance(method, str) or not isinstance(params, dict):
            return _failure(id, -32600, "not a request")
        if "id" not in body:
            return None
        match method:
            case "initialize":
                version = params.get("protocolVersion")
                given: dict[str, Any] = {
                    "protocolVersion": version if isinstance(version, str) else PROTOCOL,
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "glm5-search", "version": "1"},
                }
            case "ping":
                given = {}
            case "tools/list":
                given = {"tools": MCP_TOOLS}
            case "tools/call":
                tool = {"search": self.search, "get_document": self.get_document}.get(str(params.get("name")))
                arguments = params.get("arguments", {})
                if tool is None or not isinstance(arguments, dict):
                    return _failure(id, -32602, "there are the tools search and get_document")
                given = _tool_result(tool, arguments)
            case _:
                return _failure(id, -32601, f"no method {method:.80}")
        return {"jsonrpc": "2.0", "id": id, "result": given}


MCP_TOOLS = [
    {"name": "search", "description": "Search the web; returns docid, score and snippet of each result.",
     "inputSchema": {"type": "object", "properties": {"query": {"type": "string"}, "k": {"type": "integer"}},
                     "required": ["query"]}},
    {"name": "get_document", "description": "The whole text of a document.",
     "inputSchema": {"type": "object", "properties": {"docid": {"type": "string"}}, "required": ["docid"]}},
]  # fmt: skip


def _tool_result(tool: Callable[[dict[str, Any]], dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        text, failed = json.dumps(tool(arguments), ensure_ascii=False), False
    except ApiError as error:
        text, failed = str(error), True
    return {"content": [{"type": "text", "text": text}], "isError": failed}


def _failure(id: object, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}}


def _is_query(query: object) -> bool:
    return isinstance(query, str) and len(query) <= MOST_TEXT


def _number(body: dict[str, Any], name: str, default: int) -> int:
    value = body.get(name, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_RESULTS:
        raise ApiError(400, f"{name} is a whole number from 1 to {MOST_RESULTS}.", param=name)
    return value


def _forbidden(body: dict[str, Any]) -> list[frozenset[tuple[str, ...]]]:
    texts = body.get("forbidden_texts", [])
    if not isinstance(texts, list) or len(texts) > MOST_FORBIDDEN or not all(map(_is_query, texts)):
        raise ApiError(400, f"forbidden_texts is a list of at most {MOST_FORBIDDEN} texts.")
    by_size: dict[int, set[tuple[str, ...]]] = {}
    for text in texts:  # sets of one size are one, so that many texts cost no more than one
        for gram in ngrams(text):
            by_size.setdefault(len(gram), set()).add(gram)
    return [frozenset(grams) for grams in by_size.values()]


def create_app(
    web: Web, *, api_key: str | None = None, limits: Limits | None = None, allowed_hosts: Collection[str] | None = None
) -> FastAPI:
    """The tools of a web as an ASGI application."""
    limits, answers = limits or Limits(body_bytes=1 << 20), Retrieval(web)
    app = FastAPI(title="glm5", docs_url=None, redoc_url=None, openapi_url=None)

    def add(path: str, answer: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        async def route(request: Request) -> Response:
            body = _object(await read_body(request, limits))
            try:
                found = await asyncio.to_thread(answer, body)
            except GradingError as error:  # the machine's fault, not the client's
                raise ApiError(503, str(error), code="search_failed") from error
            return Response(status_code=202) if found is None else JSONResponse(found)

        app.add_api_route(path, route, methods=["POST"])

    for path, answer in (("/retrieve", answers.retrieve), ("/search", answers.search),
                         ("/get_document", answers.get_document), ("/mcp", answers.mcp)):  # fmt: skip
        add(path, answer)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "pages": len(web.index.urls)}

    add_guard(app, api_key, KEY_ALONE, allowed_hosts, limits.requests, lambda path, status: None)
    for kind in HANDLED:
        app.add_exception_handler(kind, on_error)
    return app


def _object(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
        # Infinity, NaN and halves of characters could not be sent back.
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is not JSON.") from None
    if not isinstance(body, dict):
        raise ApiError(400, "The body is not a JSON object.")
    return body


def run(folder: Path, host: str = "127.0.0.1", port: int = 8000, api_key: str | None = None) -> None:
    """Serve the web in `folder` until interrupted; port 0 is any free port. Raises DataError, UsageError."""
    hosts, limits = hosts_answered(host, api_key, KEY_ALONE), fitted(Limits(body_bytes=1 << 20), 1)
    app = create_app(Web(folder), api_key=api_key, limits=limits, allowed_hosts=hosts)
    with bind(host, port) as listener, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Server(ServerConfig(app, limits, limits.stop_seconds)).serve(sockets=[listener]))
