"""A judge that follows the script of an item instead of a model: it decides our own tasks without any model, and gives
the truth that other judges are measured against.

It decides by the text that tools show. A page that prints what a script looks for passes without doing it, so this is
no judge of a policy that is not trusted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm5.agents.endpoint import Reply
from glm5.agents.wire import OnDelta
from glm5.eval.cc_bench.judge import FAILED, LEAST_EVIDENCE, MOST_EVIDENCE, FrontendJudge, unquoted
from glm5.records import Message, ToolCall
from glm5.tasks.cc_bench.checks import CheckItem, Do

OPEN, LOOK = Do("open", {}), Do("look", {})
LEAST_ALIKE = 0.3
"""A line with a smaller share of the words that were expected is not named in their place."""
MOST_LINE = 200
"""Characters of a line that is named."""
_WORD, _ENDS = re.compile(r"\w+"), re.compile(r"\n|; ")
"""A line ends at a semicolon too: `inspect` tells all of an element's style in one line."""


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
        found = [] if failed else list(compared(step, result))
        said = " ".join(str(one) for one in found) or ("The call failed." if failed else f"Step {done} asks nothing.")
        decisive = next((one.line for one in reversed(found) if one.line), "")
        if failed or not all(one.holds for one in found):
            reason = f"after step {done} of {len(steps)}, {step.tool}: {said}"
            return _verdict(said, False, _quote(decisive, result), reason)
        if done < len(steps):
            said = f"{said} Step {done + 1} of {len(steps)}."
            return _calling(said, steps[done].tool, steps[done].arguments)
        return _verdict(said, True, _quote(decisive, result), "the script ended as it should")


@dataclass(frozen=True)
class Comparison:
    """What is asked of a result, the line of it that decides, "" if none comes near, and whether it is as asked."""

    asked: str
    line: str
    holds: bool
    early: bool = False

    def __str__(self) -> str:
        said = "yes" if self.holds else "too early" if self.early else "no"
        return f"{self.asked}: {self.line.removeprefix('- ')[:MOST_LINE] or 'nothing'}, {said}."


def compared(step: Do, result: str) -> Iterator[Comparison]:
    """What a step asks of its result, part by part, up to the first that does not hold."""
    whole, at = re.search(step.shows, result), 0
    parts = _parts(step.shows) if step.shows else []
    for number, part in enumerate(parts, start=1):
        found = re.compile(part).search(result, at)
        holds = whole is not None or (found is not None and number < len(parts))
        before = None if holds or found else re.search(part, result)
        near = found or before
        line = _line(result, near.end()) if near else _nearest(part, result)
        yield Comparison(_asked(part), line, holds, before is not None)
        if not holds:
            return
        at = found.end() if found else at
    if step.lacks:
        found = re.search(step.lacks, result)
        line = _line(result, found.end()) if found else ""
        yield Comparison(_unasked(step.lacks), line, found is None)


def _told(step: Do) -> str:
    """A step of a plan: the call, and what it asks of the result in the words of `compared`."""
    wanted = [f"{_asked(part)}." for part in _parts(step.shows)] if step.shows else []
    wanted += [f"{_unasked(step.lacks)}."] if step.lacks else []
    return " ".join((step.tool, *map(str, step.arguments.values()), *wanted))


def _asked(part: str) -> str:
    return f"Expected {_plain(part)}"


def _unasked(pattern: str) -> str:
    return f"Not expected {_plain(pattern)}"


def _parts(pattern: str) -> list[str]:
    """What must stand in this order, with anything between."""
    return pattern.removeprefix("(?s)").split(".*")


def _plain(pattern: str) -> str:
    """A regular expression as a person would write it."""
    for old, new in (("(?s)", ""), (r"\b", ""), (r"[\d.]+", "N"), ("(paragraph|text)", "text")):
        pattern = pattern.replace(old, new)
    return re.sub(r"\\(.)", r"\1", pattern)


def _nearest(part: str, result: str) -> str:
    """The first line with the most words of a part of a pattern, "" if none has enough."""
    wanted, lines = set(_WORD.findall(_plain(part))), [line for line in _ENDS.split(result) if line.strip()]
    alike = [len(wanted.intersection(_WORD.findall(line))) for line in lines]
    best = max(alike, default=0)
    return lines[alike.index(best)].strip() if best and best >= LEAST_ALIKE * len(wanted) else ""


def scripted_judge(concurrency: int = 2) -> FrontendJudge:
    return FrontendJudge(lambda task, item: ScriptedItem(item), concurrency)


def _line(text: str, at: int) -> str:
    """The line that ends at or holds the character before `at`."""
    begin = max((end.end() for end in _ENDS.finditer(text, 0, max(at - 1, 0))), default=0)
    return _ENDS.split(text[begin:], maxsplit=1)[0].strip()


def _quote(line: str, text: str) -> str:
    """Evidence: a line, or if it is too short for a quote the last one of the text that is long enough."""
    lines = (line, *reversed(text.split("\n")))
    return next((one.strip() for one in lines if len(one.strip()) >= LEAST_EVIDENCE), " ".join(text.split()))


def _verdict(said: str, passed: bool, evidence: str, reason: str) -> Reply:
    return _calling(said, "verdict", {"passed": passed, "evidence": evidence[:MOST_EVIDENCE], "reason": reason})


def _calling(said: str, name: str, arguments: Mapping[str, Any]) -> Reply:
    return Reply(Message("assistant", reasoning=said, tool_calls=(ToolCall(name, arguments),)), "tool_calls")
