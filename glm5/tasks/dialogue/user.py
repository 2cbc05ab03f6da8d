"""The simulated user of a dialogue: who plays it, what it knows, and the rules that it keeps (App. B.3).

The user is a model too. Its view has the roles the other way round: what the agent says comes to it as messages of the
user, and what it says itself are messages of the assistant.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from glm5.errors import GradingError
from glm5.records import Message, ToolCall
from glm5.tasks.contract import ToolSpec

RULES = Path(__file__).with_name("user_rules.toml")
STOP, TRANSFER, OUT_OF_SCOPE = "###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"
"""What ends a dialogue, in a message of the user (tau2-bench)."""
MOST_CALLS = 16
"""Calls of the user's own tools between two of its messages."""

UserModel = Callable[[Sequence[Message], Sequence[ToolSpec]], Message]
"""Says the user's next message. What it raises says nothing about the agent."""


@runtime_checkable
class UserProblem(Protocol):
    """A problem in which a model plays a user."""

    def with_user(self, user: UserModel) -> Any: ...


def rules_of(domain: str) -> str:
    """The rules of the user in a domain, or for "all" those in every one; "" for a domain without rules of its own."""
    found: Mapping[str, Mapping[str, str]] = tomllib.loads(RULES.read_text(encoding="utf-8"))
    return found[domain]["text"].strip() if domain in found else ""


def scenario_of(scenario: Mapping[str, Any]) -> str:
    """What the user knows and wants, as text: `user_scenario` of a task."""
    told = scenario.get("instructions")
    parts = {"persona": scenario.get("persona"), **(told if isinstance(told, dict) else {"instructions": told})}
    names = {"reason_for_call": "reason for the call", "known_info": "what you know",
             "unknown_info": "what you do not know", "task_instructions": "instructions"}  # fmt: skip
    return "\n".join(f"{names.get(key, key)}: {value}" for key, value in parts.items() if isinstance(value, str))


@dataclass
class SimulatedUser:
    """One dialogue as its user sees it. `tools` are the user's own, called by `call`."""

    model: UserModel
    domain: str
    scenario: str
    tools: Sequence[ToolSpec] = ()
    call: Callable[[ToolCall], str] | None = None
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts = rules_of("all"), f"<scenario>\n{self.scenario}\n</scenario>", rules_of(self.domain)
        self.messages.insert(0, Message("system", "\n\n".join(filter(None, parts))))

    def hear(self, text: str) -> str:
        """The user's answer to what the agent says. Raises GradingError if there is none."""
        self.messages.append(Message("user", text))
        for _ in range(MOST_CALLS):
            said = self.model(self.messages, self.tools)
            self.messages.append(Message("assistant", said.content, tool_calls=said.tool_calls))
            if not said.tool_calls:
                if not said.content.strip():
                    raise GradingError("the simulated user said nothing.")
                return said.content
            for call in said.tool_calls:
                answer = self.call(call) if self.call is not None else "error: you have no tools"
                self.messages.append(Message("tool", answer))
        raise GradingError(f"the simulated user called its tools {MOST_CALLS} times without saying anything.")


def ends(said: str) -> str | None:
    """The token that ends the dialogue in what the user said, or None."""
    return next((token for token in (STOP, TRANSFER, OUT_OF_SCOPE) if token in said), None)
