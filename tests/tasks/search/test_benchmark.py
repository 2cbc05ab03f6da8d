"""Published search benchmarks: encrypted rows, both sources of pages, context policies, and the suites."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from glm5.agents.context import OMITTED
from glm5.agents.endpoint import Endpoint
from glm5.errors import ConfigError, DataError, GradingError
from glm5.eval.answer_judge import AnswerJudge
from glm5.eval.remote_player import RemotePlayer
from glm5.eval.suite import find_suite, run_suite
from glm5.records import Message, Outcome, ToolCall
from glm5.tasks import make_family
from glm5.tasks.search.benchmark import decrypted
from tests.agents.scripted_model import Say, ScriptedModel

pytest.importorskip("bm25s")
CANARY = "never put this online: 3f1"
QUESTION = "Which machine of the eight that the dictionary calls computing terms has alpha in its name?"


def encrypted(text: str, canary: str = CANARY) -> str:
    """An independent way: the key is made as long as the text, then numbers are xor-ed."""
    data, digest = text.encode(), hashlib.sha256(canary.encode()).digest()
    key = (digest * (len(data) // 32 + 1))[: len(data)]
    mixed = int.from_bytes(data, "big") ^ int.from_bytes(key, "big")
    return base64.b64encode(mixed.to_bytes(len(data), "big")).decode()


@pytest.mark.parametrize("text", ["a", "Which town? – 您好", "x" * 100, "\x00"])
def test_decryption_is_the_inverse(text: str) -> None:
    assert decrypted(encrypted(text), CANARY) == text


def test_decryption_of_a_vector_by_hand() -> None:
    digest = hashlib.sha256(b"k").digest()  # 8254c329...
    assert (
        digest[:2] == b"\x82\x54"
        and decrypted(base64.b64encode(bytes([0x82 ^ 0x68, 0x54 ^ 0x69])).decode(), "k") == "hi"
    )
    for wrong in ("not base64!", encrypted("é" * 40, "another canary")):
        with pytest.raises(ValueError, match="not encrypted"):
            decrypted(wrong, CANARY)


class Pages(BaseHTTPRequestHandler):
    """A search service with three pages; one quotes the question."""

    PAGES = {
        "https://a/alpha": ("Alpha machine", "The alpha machine is a computing term. " + "More of it. " * 40),
        "https://a/leak": ("Leak", f"{QUESTION} The answer is alpha machine."),
        "https://a/beta": ("Beta code", "Beta code is something else."),
    }
    keys: list[str | None] = []
    broken = ""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.keys.append(self.headers.get("authorization"))
        status, answer = 200, dict[str, Any]()
        if self.path == "/search":
            rows = [{"url": url, "title": title, "text": text[:200]} for url, (title, text) in self.PAGES.items()]
            answer = {"results": rows[: body["num"]]}
        elif body["url"] in self.PAGES:
            title, text = self.PAGES[body["url"]]
            answer = {"url": body["url"], "title": title, "text": text}
        else:
            status = 404
        data = (Pages.broken or json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("GLM5_SEARCH_KEY", "secret")
    Pages.keys, Pages.broken = [], ""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def table(tmp_path: Path) -> str:
    """The published form: a CSV file whose questions and answers are encrypted."""
    with (tmp_path / "browse.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["problem", "answer", "problem_topic", "canary"])
        writer.writeheader()
        rows = ((QUESTION, "alpha machine"), ("Which code is something else?", "beta code"))
        for question, answer in rows:
            writer.writerow({"problem": encrypted(question), "answer": encrypted(answer), "canary": CANARY})
    return str(tmp_path / "browse.csv")


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", tool_calls=(ToolCall(name, arguments),))


def test_tools_over_a_service(table: str, service: str) -> None:
    problem = make_family("browsecomp", file=table, search=service).problem("heldout", 0)
    assert problem.prompt == QUESTION and problem.material.items == ("alpha machine",)  # type: ignore[attr-defined]
    env = problem.env()
    messages, tools, thinking = env.start()
    assert [m.role for m in messages] == ["system", "user"] and "Exact Answer" in messages[0].content and thinking
    assert [tool["function"]["name"] for tool in tools] == ["search", "open", "find", "python"]
    found = env.step(call("search", query="alpha")).messages[0].content
    assert "[0] Alpha machine <https://a/alpha>" in found and "leak" not in found.lower()
    opened = env.step(call("open", url="https://a/alpha")).messages[0].content
    assert opened.count("More of it.") == 40
    assert "no page" in env.step(call("open", url="https://a/leak")).messages[0].content
    assert "no page" in env.step(call("open", url="https://a/none")).messages[0].content
    assert "error" in env.step(call("click", link_id=0)).messages[0].content
    done = env.step(Message("assistant", "Exact Answer: alpha machine\nConfidence: 80%"))
    assert done.outcome is Outcome.ENV_ERROR and done.detail["cause"] == "judge" and done.detail["confidence"] == 0.8
    assert (done.detail["searches"], done.detail["opened"], done.detail["found"]) == (1, 1, 2)
    assert set(Pages.keys) == {"Bearer secret"}
    for Pages.broken, said in (("{", "not JSON"), ('{"results": [{"url": 3}]}', "without the texts"), ("[]", "a list")):
        with pytest.raises(GradingError, match=said):
            make_family("browsecomp", file=table, search=service).problem("heldout", 0).env().step(
                call("search", query="x")
            )


@pytest.mark.parametrize(
    ("head", "pieces", "said"),
    [
        ([], 300, "did not finish its answer in 0 seconds"),
        ([("content-encoding", "gzip")], 1, "a compressed form"),
        ([("location", "http://[")], 1, "status 302|does not answer"),
    ],
)
def test_answers_of_a_hostile_service(
    head: list[tuple[str, str]], pieces: int, said: str, table: str, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def post(self: Pages) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        seen.append(self.headers["accept-encoding"])
        self.send_response(302 if ("location", "http://[") in head else 200)
        for pair in head:
            self.send_header(*pair)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(pieces):
                self.wfile.write(b" ")
                time.sleep(0.02)

    seen: list[str] = []
    monkeypatch.setattr(Pages, "do_POST", post)
    problem = make_family("browsecomp", file=table, search=service).problem("heldout", 0)
    if pieces > 1:
        monkeypatch.setattr("glm5.tasks.search.service.SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(GradingError, match=said):
        problem.env().step(call("search", query="x"))
    assert seen == ["identity"] and time.monotonic() - started < 5.0  # all pieces take six


@pytest.mark.long
def test_options_and_rows_that_do_not_fit(table: str, service: str, tmp_path: Path, built: Path) -> None:
    for options, said in (
        ({}, "set folder"), ({"search": service, "folder": str(built)}, "set folder"),
        ({"search": "ftp://x"}, "not an http"),
        ({"search": "http://["}, "not an http"), ({"search": "http://a:b@c"}, "without a password"),
        ({"search": service, "tools": ["finish"]}, "tools is a list"),
        ({"search": service, "max_turns": 0}, "max_turns"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            make_family("browsecomp", file=table, **options)
    with pytest.raises(GradingError, match="does not answer"):
        make_family("browsecomp", file=table, search="http://127.0.0.1:9").problem("heldout", 0).env().step(
            call("search", query="x")
        )
    rows = tmp_path / "rows.jsonl"
    for row, said in (
        ({"problem": "plain", "answer": "x", "canary": CANARY}, "line 1: a field is not encrypted"),
        ({"problem": "plain"}, "line 1"), ({"answer": "x", "canary": CANARY}, "line 1"),
    ):  # fmt: skip
        rows.write_text(json.dumps(row))
        with pytest.raises(DataError, match=said):
            make_family("browsecomp", file=str(rows), search=service).problem("heldout", 0)
    rows.write_text(json.dumps({"Question": "plain?", "Answer": "x"}))
    family = make_family("browsecomp", file=str(rows), folder=str(built), question="Question", answer="Answer")
    env = family.problem("heldout", 0).env()
    env.start()
    assert "<term/alpha-machine>" in env.step(call("search", query="alpha machine")).messages[0].content


@pytest.mark.parametrize("name", ["browsecomp", "browsecomp-context"])
def test_a_suite_with_its_context_policy(name: str, table: str, built: Path, tmp_path: Path) -> None:
    """Ten searches, then an answer, which the judge finds right for one of two questions."""

    def agent(body: dict[str, Any], turn: int) -> Say:
        shown = [m["content"] for m in body["messages"] if m["role"] == "tool"]
        number = len(seen[body["messages"][1]["content"]])
        seen[body["messages"][1]["content"]].append(shown)
        return (
            Say("Exact Answer: alpha machine") if number == 10 else Say(calls=[("search", {"query": "alpha machine"})])
        )

    def judge(body: dict[str, Any], turn: int) -> Say:
        text = body["messages"][0]["content"]
        return Say(
            json.dumps({"final_answer": "", "reason": "", "correct": "| alpha machine" in text.split("REPLY")[0]})
        )

    seen: dict[str, list[list[str]]] = {QUESTION: [], "Which code is something else?": []}
    suite = find_suite(name, {"file": table, "folder": str(built)}, discard_above=None)
    if name == "browsecomp-context":
        suite = suite.model_copy(update={"discard_above": 1200})
    with ScriptedModel(agent) as model, ScriptedModel(judge) as one:
        player, grader = RemotePlayer(Endpoint(model.url, pauses=())), AnswerJudge(Endpoint(one.url, pauses=()))
        found = run_suite(suite, player, folder=tmp_path / "out", judge=grader)
    assert (found["score"], found["n"]) == (0.5, 2) and "errors" not in found
    counts = [len(shown) for shown in seen[QUESTION]]
    omitted = [shown.count(OMITTED) for shown in seen[QUESTION]]
    if name == "browsecomp":
        assert counts == list(range(11)) and omitted == [max(0, n - 5) for n in range(11)]
    else:  # begins again, more than once
        assert counts[:3] == [0, 1, 2] and counts.count(0) > 2 and max(counts) < 10
