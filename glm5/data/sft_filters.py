"""Filters of style and logic for answers that may become SFT data (§3.1), and masks of erroneous segments in traces of
agents."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from glm5.data.sft import Conversation, TurnMarks
from glm5.records import Message

REASONS = {
    "unfinished": "it does not end with an answer of the assistant",
    "too_long": "its answers have more characters than the limit",
    "repeated_lines": "lines that stand three times or more have too many of its characters",
    "loop": "it ends in a text that repeats itself",
    "broken_reasoning": "marks of reasoning, roles or calls stand in its text",
    "answer_differs": "the answers that it states are not all the same",
}
"""Why an answer is left out."""
_MARKS = re.compile(
    r"</?think>|</?tool_call>|</?arg_(?:key|value)>|<\|(?:system|user|assistant|observation|endoftext)\|>"
)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_STATED = re.compile(
    r"(?:^|[.!?*])[^\S\n]*+(?:so |thus |therefore,? |hence,? )?(?:the )?(?:final )?answer(?: is)?\s*+[:=]?+\s*+(\S.*)",
    re.IGNORECASE | re.MULTILINE,
)
_NUMBER = re.compile(r"[\s$€£=]*(-?\d[\d,]*(?:\.\d+)?)\s*[A-Za-z%° ]{0,20}[.\s$]*")
SHORTEST_LINE, TIMES = 20, 3
_LONGEST_ANSWER = 80
_LOOP, _LOOP_CHARACTERS = 4, 200
"""Copies of a text at the end that make a loop, and their characters; the text has at least SHORTEST_LINE."""
_FAILED = re.compile(
    r"\A\W*(?:error\b|exception\b|traceback \(most recent|fatal:|failed\b|invalid\b|unknown (?:tool|function|command)"
    r"|no such (?:tool|file|function)|\[exit code (?!0\b)-?\d+\]|exit (?:code|status):? (?!0\b)\d+)",
    re.IGNORECASE,
)


def fault(conversation: Conversation, longest: int, repeated: float) -> str:
    """A key of REASONS, or "" if the conversation has no fault. `longest`: characters of all answers with their
    reasoning; `repeated`: share of characters in repeated lines that is still good."""
    answers = [message for message in conversation.messages if message.role == "assistant" and message.train]
    last = conversation.messages[-1]
    if not answers or last.role != "assistant" or not last.content.strip() or last.tool_calls:
        return "unfinished"
    texts = [part for message in answers for part in (message.reasoning or "", message.content) if part]
    if sum(map(len, texts)) > longest:
        return "too_long"
    if any(_MARKS.search(text) for text in texts):
        return "broken_reasoning"
    if any(_repeated(text) > repeated for text in texts):
        return "repeated_lines"
    if any(loops(text) for text in texts):
        return "loop"
    return "answer_differs" if _differs(last) else ""


def _repeated(text: str) -> float:
    """Share of the characters of a text in lines that stand several times; code in fences does not count."""
    lines = [line.strip() for part in text.split("```")[::2] for line in part.split("\n")]
    lines = [line for line in lines if len(line) >= SHORTEST_LINE]
    again = sum(len(line) * n for line, n in Counter(lines).items() if n >= TIMES)
    return again / max(1, len(text))


def loops(text: str) -> bool:
    """Whether a text ends in copies of one piece, as models that lost their way write it."""
    end = text.rstrip()[-4000:]
    for size in range(SHORTEST_LINE, len(end) // _LOOP + 1):
        piece = end[-size:]
        copies = max(_LOOP, -(-_LOOP_CHARACTERS // size))
        if end.endswith(piece * copies) and len(set(piece)) > 3:
            return True
    return False


def stated(text: str) -> list[str]:
    """The answers that a text states, in their order: in boxes, else after "the answer is"."""
    boxes = _BOXED.findall(text)
    said = (found.rstrip().rstrip(".*").rstrip() or found[0] for found in _STATED.findall(text))
    return [_plain(found) for found in boxes or said if boxes or len(found) <= _LONGEST_ANSWER]


def _plain(answer: str) -> str:
    """An answer for comparison: a number without its unit, else letters, digits and operators."""
    answer = answer.strip().strip("$*`\"' ").rstrip(".")
    found = _NUMBER.fullmatch(answer) if len(answer) <= _LONGEST_ANSWER else None
    if found:
        number = found[1].replace(",", "")
        return number.rstrip("0").rstrip(".") if "." in number else number
    return re.sub(r"[^\w+\-*/^=<>]", "", answer).lower()


def _differs(message: Message) -> bool:
    """Whether the content states several answers, or another one than the reasoning ends with."""
    shown = list(dict.fromkeys(stated(message.content)))
    if len(shown) > 1 and len(_BOXED.findall(message.content)) == len(stated(message.content)):
        return True
    thought = stated("\n".join((message.reasoning or "").rstrip().split("\n")[-3:]))
    return bool(shown and thought and thought[-1] != shown[-1])


def mask_errors(conversation: Conversation) -> tuple[Conversation, int]:
    """The conversation with erroneous segments out of the loss, and their number: calls whose results are errors, and
    calls that repeat one with the same result. Results are in the order of their calls, and left alone if some are
    missing. A turn all of whose calls are wrong is masked whole. What follows them
    is trained: it is how the agent recovered."""
    messages, marks = list(conversation.messages), dict(conversation.marks)
    masked = 0
    last: tuple[str, str, str] | None = None
    for i, message in enumerate(messages):
        if message.role != "assistant" or not message.tool_calls or not message.train:
            continue
        results = _results(messages, i)
        if len(results) != len(message.tool_calls):
            continue
        known = marks.get(i, TurnMarks())
        wrong = list[int](known.calls)
        for k, (call, result) in enumerate(zip(message.tool_calls, results)):
            now = (call.name, json.dumps(dict(call.arguments), sort_keys=True), result.content)
            if k not in wrong and (failed(result.content) or now == last):
                wrong.append(k)
                masked += 1
            last = now
        if len(wrong) == len(message.tool_calls):
            messages[i] = replace(message, train=False)
            marks.pop(i, None)
        elif wrong:
            marks[i] = replace(known, calls=tuple(sorted(wrong)))
    return (replace(conversation, messages=messages, marks=marks) if masked else conversation), masked


def _results(messages: Sequence[Message], i: int) -> list[Message]:
    found = []
    for message in messages[i + 1 :]:
        if message.role != "tool":
            break
        found.append(message)
    return found


def failed(result: str) -> bool:
    """Whether the result of a tool says that the call failed."""
    text = result.strip()
    if text[:1] == "{":
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return bool(found.get("error")) or found.get("success") is False or found.get("ok") is False
    return _FAILED.match(text[:200]) is not None
