"""A model server that plays a script, in both dialects: whole answers or events, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Say:
    """One reply of a script. `calls` are (name, arguments); arguments may be text that is no JSON."""

    text: str = ""
    calls: Sequence[tuple[str, Any]] = ()
    thought: str = ""
    finish: str | None = None
    signature: str = ""


Script = Sequence[Say] | Callable[[dict[str, Any], int], Say]


class _Server(ThreadingHTTPServer):
    request_queue_size = 256  # the standard library's 5 drop connections of many threads that begin together


@dataclass
class ScriptedModel:
    """`with` serves the script. A list answers its n-th reply to a conversation with n assistant messages."""

    script: Script
    stream: bool = True
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    refuse: list[tuple[int, str]] = field(default_factory=list)
    """Statuses and bodies to answer first, one for each request."""
    refuse_kind: str = "application/json"
    owner: str = ""
    """Who owns the model; `glm5 serve` says "glm5"."""
    listed: int = 0
    """Requests for the list of models."""

    def __enter__(self) -> ScriptedModel:
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                model.listed += 1
                card = {"id": "scripted"} | ({"owned_by": model.owner} if model.owner else {})
                self._send("application/json", json.dumps({"data": [card]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                model.bodies.append(body)
                if model.refuse:
                    status, text = model.refuse.pop(0)
                    self._send(model.refuse_kind, text.encode(), status)
                    return
                say, anthropic = model._next(body), self.path.endswith("/messages")
                if "prompt" in body:  # a completion
                    choice = {"index": 0, "text": say.text, "finish_reason": say.finish or "stop"}
                    self._send("application/json", json.dumps({"choices": [choice]}).encode())
                    return
                if model.stream:
                    events = _anthropic_events(say) if anthropic else _openai_events(say)
                    lines = [f"event: {e.get('type', 'x')}\ndata: {json.dumps(e)}\n\n" for e in events]
                    self._send("text/event-stream", "".join(lines).encode() + b"data: [DONE]\n\n")
                else:
                    whole = _anthropic_whole(say) if anthropic else _openai_whole(say)
                    self._send("application/json", json.dumps(whole).encode())

            def _send(self, kind: str, data: bytes, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None: ...

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _next(self, body: dict[str, Any]) -> Say:
        turn = sum(m["role"] == "assistant" for m in body.get("messages", ()))
        if callable(self.script):
            return self.script(body, turn)
        return self.script[min(turn, len(self.script) - 1)]


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _openai_whole(say: Say) -> dict[str, Any]:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": _arguments(a)}}
        for i, (n, a) in enumerate(say.calls)
    ]
    message = {"role": "assistant", "content": say.text, "reasoning_content": say.thought or None, "tool_calls": calls}
    finish = say.finish or ("tool_calls" if calls else "stop")
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    head = {"id": "x", "object": "chat.completion", "created": 0, "model": "scripted"}
    return {**head, "choices": [choice], "usage": usage}


def _openai_events(say: Say) -> Iterator[dict[str, Any]]:
    def delta(**part: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": part, "finish_reason": None}]}

    for kind, text in (("reasoning_content", say.thought), ("content", say.text)):
        for at in range(0, len(text), 7):
            yield delta(**{kind: text[at : at + 7]})
    for i, (name, arguments) in enumerate(say.calls):
        text = _arguments(arguments)
        yield delta(tool_calls=[{"index": i, "id": f"c{i}", "function": {"name": name, "arguments": ""}}])
        for at in range(0, len(text), 4096):
            yield delta(tool_calls=[{"index": i, "function": {"arguments": text[at : at + 4096]}}])
    whole = _openai_whole(say)
    yield {"choices": [{"index": 0, "delta": {}, "finish_reason": whole["choices"][0]["finish_reason"]}]}
    yield {"choices": [], "usage": whole["usage"]}


def _anthropic_whole(say: Say) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if say.thought:
        content.append({"type": "thinking", "thinking": say.thought, "signature": say.signature})
    content += [{"type": "text", "text": say.text}] if say.text else []
    for i, (name, arguments) in enumerate(say.calls):
        content.append({"type": "tool_use", "id": f"c{i}", "name": name, "input": arguments})
    finish = {"length": "max_tokens"}.get(say.finish or "", "tool_use" if say.calls else "end_turn")
    return {"content": content, "stop_reason": finish, "usage": {"input_tokens": 100, "output_tokens": 10}}


def _anthropic_events(say: Say) -> Iterator[dict[str, Any]]:
    whole = _anthropic_whole(say)
    yield {"type": "message_start", "message": {"usage": {"input_tokens": 100, "output_tokens": 1}}}
    for i, block in enumerate(whole["content"]):
        start = dict(block)
        kinds = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}
        if block["type"] == "tool_use":
            start["input"], text, kind = {}, _arguments(block["input"]), "input_json_delta"
            key = "partial_json"
        else:
            key, kind = kinds[block["type"]]
            text = block[key]
            start |= {key: ""} | ({"signature": ""} if key == "thinking" else {})
        yield {"type": "content_block_start", "index": i, "content_block": start}
        for at in range(0, len(text), 1000):
            delta = {"type": kind, key: text[at : at + 1000]}
            yield {"type": "content_block_delta", "index": i, "delta": delta}
        if block.get("signature"):
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}
    yield {"type": "message_delta", "delta": {"stop_reason": whole["stop_reason"]}, "usage": {"output_tokens": 10}}
    yield {"type": "message_stop"}
