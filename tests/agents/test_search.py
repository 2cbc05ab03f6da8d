"""The search agent on a scripted model: tools, context policies, and how sessions end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from glm5.agents.context import OMITTED, ContextPolicy
from glm5.agents.endpoint import Endpoint, EndpointError, Reply
from glm5.agents.search import Limits, SearchAgent, instructions
from glm5.agents.wire import OnDelta
from glm5.records import Message, ToolCall
from glm5.tasks.search.browser import Browser, View
from glm5.tasks.search.web import Web
from tests.agents.scripted_model import Say, ScriptedModel
from tests.tasks.search.world import tiny_web

pytest.importorskip("bm25s")


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Web:
    return Web(tiny_web(tmp_path_factory.mktemp("tiny")))


@dataclass
class Scripted:
    """Plays replies in order, and keeps the prompts."""

    script: Sequence[Reply | EndpointError]
    prompts: list[list[Message]] = field(default_factory=list)
    tools: list[list[str]] = field(default_factory=list)

    def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], on_delta: OnDelta | None = None
    ) -> Reply:
        self.prompts.append(list(messages))
        self.tools.append([tool["function"]["name"] for tool in tools])
        reply = self.script[min(len(self.prompts), len(self.script)) - 1]
        if isinstance(reply, EndpointError):
            raise reply
        return reply


def says(text: str = "", *calls: tuple[str, dict[str, Any]], finish: str = "stop", **rest: Any) -> Reply:
    made = tuple(ToolCall(name, arguments) for name, arguments in calls)
    return Reply(Message("assistant", text, tool_calls=made), finish, **rest)


SEARCH = ("search", {"query": "machine"})


def test_a_session(web: Web) -> None:
    model = Scripted(
        [says("", SEARCH), says("", ("open", {"url": "term/gamma"}), ("fly", {})), says("Exact Answer: gamma")]
    )
    browser = Browser(web)
    session = SearchAgent(model).run("Which term?", browser)
    assert (session.answer, session.reason, session.turns) == ("Exact Answer: gamma", "answer", 3)
    assert [m.role for m in session.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert session.messages[6].content == "error: no such tool" and browser.opened == ["term/gamma"]
    assert model.prompts[1] == session.messages[:4] and session.tokens > 0


def test_finish_is_an_answer(web: Web) -> None:
    agent = SearchAgent(Scripted([says("", ("finish", {"answer": "gamma"}))]), tools=("search", "finish"))
    assert agent.run("?", Browser(web)).answer == "gamma"


def test_instructions_name_the_tools_and_the_form_of_the_answer(web: Web) -> None:
    for tools, numbered, sent in ((("search", "click"), True, False), (("search", "open", "find"), False, True)):
        model = Scripted([says("x")])
        SearchAgent(model, tools=tools, sends_tools=sent).run("?", Browser(web, view=View(numbered=numbered)))
        system = model.prompts[0][0].content
        assert system == instructions(tools, numbered) and f"Use the tools: {', '.join(tools)}.\n" in system
        assert ("a link of the open page that has this name, such as [2]\n" in system) == numbered
        assert ("\nExact Answer: the name alone\n" in system) != numbered
        assert model.tools == [list(tools) if sent else []]
    model = Scripted([says("x")])
    SearchAgent(model, system="Search.").run("?", Browser(web))
    assert model.prompts[0][0].content == "Search."


def test_context_policies(web: Web) -> None:
    for mode, restarts in (("none", 0), ("keep-recent", 0), ("discard-all", 2), ("hierarchical", 1)):
        model = Scripted([says("", SEARCH)] * 6 + [says("done")])
        policy = ContextPolicy(mode, keep=1, limit=60 if mode != "none" else 0)  # type: ignore[arg-type]
        agent = SearchAgent(model, policy, count=lambda message: 3 if message.content == OMITTED else 10)
        session = agent.run("?", Browser(web))
        assert session.answer == "done" and session.discards >= restarts
        assert (session.discards > 0) == (mode in ("discard-all", "hierarchical"))
        omitted = sum(m.content == OMITTED for m in model.prompts[2])
        assert omitted == (1 if mode in ("keep-recent", "hierarchical") else 0)
        assert len(session.messages) == 2 + 2 * 6 + 1  # folding changes prompts, not the record


def test_how_sessions_end(web: Web) -> None:
    def end(*script: Reply | EndpointError, **limits: int) -> str:
        return SearchAgent(Scripted(list(script)), limits=Limits(**limits)).run("?", Browser(web)).reason

    assert end(says("", SEARCH), turns=4) == "turns"
    assert end(says("", SEARCH, prompt_tokens=600), tokens=1000) == "tokens"
    assert end(says("")) == "malformed" and end(says("cut off", finish="length")) == "malformed"
    assert end(says("", SEARCH, broken={0: "{"})) == "malformed"
    too_long = EndpointError("too long")
    too_long.too_long = True
    assert end(says("", SEARCH), too_long) == "context"
    with pytest.raises(EndpointError, match="down"):
        end(EndpointError("down"))


@pytest.mark.parametrize("stream", [True, False])
def test_a_cut_off_reply_is_no_answer_in_any_dialect(web: Web, stream: bool) -> None:
    script = [Say("Exact Answer: cut off in the mid", finish="length"), Say("Exact Answer: whole")]
    with ScriptedModel(script, stream=stream) as model:
        with contextlib.closing(Endpoint(model.url, dialect="anthropic")) as endpoint:
            session = SearchAgent(endpoint).run("?", Browser(web))
    assert (session.answer, session.turns) == ("Exact Answer: whole", 2)


def test_broken_arguments_and_many_calls(web: Web) -> None:
    model = Scripted([says("", *[SEARCH] * 10, broken={0: "{"}), says("", SEARCH), says("x")])
    session = SearchAgent(model).run("?", Browser(web))
    results = [m.content for m in session.messages if m.role == "tool"]
    assert results[0] == "error: the arguments are not a JSON object" and results[9] == "error: too many calls at once"
    assert len(results) == 11 and session.reason == "answer"
