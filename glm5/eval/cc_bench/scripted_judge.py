"""A judge that follows the script of an item instead of a model: it decides our own tasks without any model, and gives
the truth that other judges are measured against.

It decides by the text that tools show. A page that prints what a script looks for passes without doing it, so this is
no judge of a policy that is not trusted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm5.agents.endpoint import Reply
from glm5.agents.wire import OnDelta
from glm5.eval.cc_bench.judge import FAILED, FrontendJudge, unquoted
from glm5.records import Message, ToolCall
from glm5.tasks.cc_bench.checks import CheckItem, Do

OPEN, LOOK = Do("open", {}), Do("look", {})


@dataclass(frozen=True)
class ScriptedItem:
    """A model that plays the script: one call per reply, then the verdict with the line that decided it."""

    item: CheckItem

    def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], on_delta: OnDelta | None = None
    ) -> Reply:
        steps = (OPEN, *self.item.script)
        if steps[-1].tool == "inspect":  # that it finds nothing is no evidence of what the page shows
            steps = (*steps, LOOK)
        results = [message.content for message in messages if message.role == "tool"]
        if not results:
            return _calling("open", {})
        step, result = steps[min(len(results), len(steps)) - 1], unquoted(results[-1])
        shown = re.search(step.shows, result)
        lacking = re.search(step.lacks, result) if step.lacks else None
        if results[-1].startswith(f"BEGIN {FAILED} ") or shown is None or lacking is not None:
            where = lacking.end() if lacking else 0
            return _verdict(False, _line(result, where), f"after {step.tool} {dict(step.arguments)}")
        if len(results) < len(steps):
            return _calling(steps[len(results)].tool, steps[len(results)].arguments)
        return _verdict(True, _line(result, shown.end()), "the script ended as it should")


def scripted_judge(concurrency: int = 2) -> FrontendJudge:
    return FrontendJudge(lambda task, item: ScriptedItem(item), concurrency)


def _line(text: str, at: int) -> str:
    """The line that ends at or holds the character before `at`, or the first line long enough for a quote."""
    begin = text.rfind("\n", 0, max(at, 1)) + 1
    line = text[begin:].split("\n", 1)[0].strip()
    return line if len(line) >= 4 else " ".join(text.split())[:200]


def _verdict(passed: bool, evidence: str, reason: str) -> Reply:
    return _calling("verdict", {"passed": passed, "evidence": evidence[:1000], "reason": reason})


def _calling(name: str, arguments: Mapping[str, Any]) -> Reply:
    return Reply(Message("assistant", tool_calls=(ToolCall(name, arguments),)), "tool_calls")
