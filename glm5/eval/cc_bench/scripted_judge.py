"""A judge that follows the script of an item instead of a model: it decides our own tasks without any model, and gives
the truth that other judges are measured against.

It decides by the text that tools show. A page that prints what a script looks for passes without doing it, so this is
no judge of a policy that is not trusted."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm5.agents.endpoint import Reply
from glm5.agents.wire import OnDelta
from glm5.eval.cc_bench.judge import FAILED, LEAST_EVIDENCE, MOST_EVIDENCE, FrontendJudge, unquoted
from glm5.records import Message, ToolCall
from glm5.tasks.cc_bench.checks import CheckItem, Do

OPEN, LOOK = Do("open", {}), Do("look", {})
LEAST_ALIKE = 0.4
"""A line less like what was expected (difflib's ratio) is not named in its place."""
MOST_LINE = 200
"""Characters of a line that is named."""


@dataclass(frozen=True)
class ScriptedItem:
    """A model that plays the script: one call per reply, then the verdict with the line that decided it. It thinks:
    first of all it plans, then it says what it expected of the last call and what there is. So its sessions can teach a
    model to judge."""

    item: CheckItem

    def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], on_delta: OnDelta | None = None
    ) -> Reply:
        steps = (OPEN, *self.item.script)
        if steps[-1].tool == "inspect":  # that it finds nothing is no evidence of what the page shows
            steps = (*steps, LOOK)
        results = [message.content for message in messages if message.role == "tool"]
        done = min(len(results), len(steps))
        if not done:
            lines = [f"{number}. {_told(step)}" for number, step in enumerate(steps, start=1)]
            said = "\n".join(("Plan:", *lines, f"Step 1 of {len(steps)}."))
            return _calling(said, steps[0].tool, steps[0].arguments)
        step, result = steps[done - 1], unquoted(results[-1])
        failed = results[-1].startswith(f"BEGIN {FAILED} ")
        said = "The call failed." if failed else compared(step, result) or f"Step {done} asks nothing."
        if failed or not _holds(step, result):
            lacking = re.search(step.lacks, result) if step.lacks else None
            where = lacking.end() if lacking else _nearest(_parts(step.shows)[0], result)[1]
            reason = f"after step {done} of {len(steps)}, {step.tool}: {said}"
            return _verdict(said, False, _quote(result, where), reason)
        if done < len(steps):
            said = f"{said} Step {done + 1} of {len(steps)}."
            return _calling(said, steps[done].tool, steps[done].arguments)
        shown = re.search(step.shows, result)
        return _verdict(said, True, _quote(result, shown.end() if shown else 0), "the script ended as it should")


def compared(step: Do, result: str) -> str:
    """What a step asks of its result, the lines of it that come nearest, and whether that is enough. "" if it asks
    nothing."""
    said = []
    if step.shows:
        near = [_nearest(part, result) for part in _parts(step.shows)]
        there = " ... ".join(dict.fromkeys(line for line, _ in sorted(near, key=lambda one: one[1]) if line))
        said.append(f"Expected: {_wanted(step.shows)}. There is: {there or 'nothing'}.")
    if step.lacks:
        found = re.search(step.lacks, result)
        there = _named(_line(result, found.end())) if found else "nothing"
        said.append(f"Not expected: {_plain(step.lacks)}. There is: {there}.")
    if said:
        said.append("It holds." if _holds(step, result) else "It does not hold.")
    return " ".join(said)


def _holds(step: Do, result: str) -> bool:
    return re.search(step.shows, result) is not None and not (step.lacks and re.search(step.lacks, result))


def _told(step: Do) -> str:
    """A step of a plan: the call, and what it asks of the result in the words of `compared`."""
    wanted = [f"Expected: {_wanted(step.shows)}."] if step.shows else []
    wanted += [f"Not expected: {_plain(step.lacks)}."] if step.lacks else []
    return " ".join((step.tool, *map(str, step.arguments.values()), *wanted))


def _wanted(pattern: str) -> str:
    return " ... ".join(map(_plain, _parts(pattern)))


def _parts(pattern: str) -> list[str]:
    """What must stand in this order, with anything between."""
    return pattern.removeprefix("(?s)").split(".*")


def _plain(pattern: str) -> str:
    """A regular expression as a person would write it."""
    for old, new in (("(?s)", ""), (r"\b", ""), (r"[\d.]+", "N"), ("(paragraph|text)", "text")):
        pattern = pattern.replace(old, new)
    return re.sub(r"\\(.)", r"\1", pattern)


def _nearest(part: str, result: str) -> tuple[str, int]:
    """The line with what fits a part of a pattern, or else the line most like it ("" if none is); and where it ends."""
    if (found := re.search(part, result)) is not None:
        return _named(_line(result, found.end())), found.end()
    wanted, lines = _plain(part), list(re.finditer(r"[^\n]+", result))
    alike = [difflib.SequenceMatcher(None, wanted, line[0]).ratio() for line in lines]
    if max(alike, default=0.0) < LEAST_ALIKE:
        return "", 0
    best = lines[alike.index(max(alike))]
    return _named(best[0]), best.end()


def _named(line: str) -> str:
    return line.strip().removeprefix("- ")[:MOST_LINE]


def scripted_judge(concurrency: int = 2) -> FrontendJudge:
    return FrontendJudge(lambda task, item: ScriptedItem(item), concurrency)


def _line(text: str, at: int) -> str:
    """The line that ends at or holds the character before `at`."""
    begin = text.rfind("\n", 0, max(at, 1)) + 1
    return text[begin:].split("\n", 1)[0].strip()


def _quote(text: str, at: int) -> str:
    """Evidence: that line, or all if it is too short for a quote."""
    line = _line(text, at)
    return line if len(line) >= LEAST_EVIDENCE else " ".join(text.split())[:200]


def _verdict(said: str, passed: bool, evidence: str, reason: str) -> Reply:
    return _calling(said, "verdict", {"passed": passed, "evidence": evidence[:MOST_EVIDENCE], "reason": reason})


def _calling(said: str, name: str, arguments: Mapping[str, Any]) -> Reply:
    return Reply(Message("assistant", reasoning=said, tool_calls=(ToolCall(name, arguments),)), "tool_calls")
