"""A search agent on any chat endpoint: question, tools and context policy in, answer out (§4.2.4).

The loop is that of the paper's browse evaluation: `search`, `click`, `open`, `find` and `python`, one of four context
policies between the turns, and an answer as a plain message or by `finish`. A fault of the endpoint or of the web is an
exception; it says nothing about the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from glm5.agents.context import ContextPolicy, Counter, approximate_tokens, fold
from glm5.agents.endpoint import EndpointError, Model
from glm5.records import Message
from glm5.tasks.search.browser import Browser, misuse

DEFAULT_TOOLS = ("search", "click", "open", "find", "python")
SYSTEM = """You answer questions by searching a closed web of pages. Use the tools: {tools}.
Work step by step: search for what the question names, open pages, follow their links, check every condition on the
pages themselves. All conditions of the question hold for exactly one answer. End with a message in this form:

Explanation: your reasons, with the addresses of the pages that show them in square brackets, such as [country/france]
Exact Answer: the name alone{number}
Confidence: a number from 0% to 100%"""
NUMBER = ", or the number of a link of the open page that has this name, such as [2]"
MOST_CALLS = 8  # per reply
MOST_MALFORMED = 3
EMPTY = "Your reply was empty or cut off. Call a tool, or give the answer in the form asked for."

Reason = Literal["answer", "turns", "tokens", "malformed", "context"]


def instructions(tools: Sequence[str], numbered: bool) -> str:
    """The system prompt for these tools; `numbered`: links of pages have numbers, which are answers as well."""
    return SYSTEM.format(tools=", ".join(tools), number=NUMBER if numbered else "")


@dataclass(frozen=True)
class Limits:
    """Replies of the model, and tokens of all prompts and replies of a session (0: no limit)."""

    turns: int = 100
    tokens: int = 0


@dataclass
class Session:
    """What became of a session. `messages` is the whole conversation; `discards` the restarts from the question."""

    answer: str = ""
    reason: Reason = "answer"
    turns: int = 0
    tokens: int = 0
    discards: int = 0
    messages: list[Message] = field(default_factory=list)


@dataclass
class SearchAgent:
    """Plays questions with one model. `count` and `overhead` measure prompts in tokens. `system` replaces the
    instructions. `tools` are those that it may call; requests have their specifications if `sends_tools`."""

    model: Model
    context: ContextPolicy = field(default_factory=ContextPolicy)
    limits: Limits = Limits()
    count: Counter = approximate_tokens
    overhead: int = 0
    system: str | None = None
    tools: Sequence[str] = DEFAULT_TOOLS
    sends_tools: bool = True

    def run(self, question: str, browser: Browser) -> Session:
        """Play one question. Raises EndpointError and GradingError."""
        specs = browser.view.tools(self.tools) if self.sends_tools else ()
        system = instructions(self.tools, browser.view.numbered) if self.system is None else self.system
        session = Session(messages=[Message("system", system), Message("user", question)])
        malformed = 0
        while session.turns < self.limits.turns:
            folded = fold(session.messages, self.context, self.count, self.overhead)
            session.discards = folded.plan.discards
            try:
                reply = self.model.complete(folded.messages, specs)
            except EndpointError as error:
                if error.too_long:  # the policy lets the context grow beyond the model's: that is the policy's result
                    session.reason = "context"
                    return session
                raise
            session.turns += 1
            session.tokens += (reply.prompt_tokens or folded.plan.tokens) + (
                reply.completion_tokens or self.count(reply.message)
            )
            session.messages.append(reply.message)
            if not reply.message.tool_calls:
                if reply.message.content.strip() and reply.finish_reason != "length":
                    session.answer = reply.message.content
                    return session
                malformed += 1
                session.messages.append(Message("user", EMPTY))
            else:
                finished, bad = self._carry_out(reply.message, reply.broken, browser, session)
                if finished:
                    return session
                malformed = malformed + 1 if bad else 0
            if malformed >= MOST_MALFORMED:
                session.reason = "malformed"
                return session
            if self.limits.tokens and session.tokens >= self.limits.tokens:
                session.reason = "tokens"
                return session
        session.reason = "turns"
        return session

    def _carry_out(
        self, message: Message, broken: Mapping[int, str], browser: Browser, session: Session
    ) -> tuple[bool, bool]:
        """Whether the model gave its answer by a call, and whether no call could be carried out."""
        done = 0
        for number, call in enumerate(message.tool_calls):
            if call.name == "finish" and "finish" in self.tools and misuse(call) is None:
                session.answer = str(call.arguments["answer"])
                return True, False
            if number in broken:
                text, good = "error: the arguments are not a JSON object", False
            elif number >= MOST_CALLS:
                text, good = "error: too many calls at once", False
            elif call.name not in self.tools:
                text, good = "error: no such tool", False
            else:
                text, _ = browser.call(call)
                good = misuse(call) is None
            done += good
            session.messages.append(Message("tool", text))
        return False, done == 0
