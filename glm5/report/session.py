"""The log of an agent's session -> one self-contained HTML file, step by step with what each call changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from glm5.agents.coding import message_of
from glm5.agents.session_log import read_log
from glm5.errors import DataError
from glm5.files import atomic_write
from glm5.report.drawing import palette_css
from glm5.report.report import environment
from glm5.report.wording import duration, visible

TEMPLATE = Path(__file__).with_name("session.html")
MOST_DIFF = 20_000
"""Characters shown of one patch."""


@dataclass(frozen=True)
class Step:
    """An event as shown: `kind` is reply, call, result, note or end; `failed` marks results that are errors."""

    kind: str
    title: str
    text: str = ""
    folded: str = ""
    diff: str = ""
    failed: bool = False


def build_session_page(log: Path) -> Path:
    """Write the page of a session beside its log, as LOG.html, and return its path.

    Raises DataError for a file that is no log of an agent, or one with malformed events.
    """
    events, _ = read_log(log)
    try:
        steps = [step for event in events[1:] for step in _steps(event)]
        task = str(events[0]["settings"]["task"])
        replies = [event for event in events if event["kind"] == "reply"]
        facts = {
            "replies": f"{len(replies):,}",
            "tokens": f"{sum(e['prompt_tokens'] for e in replies):,} read, "
            f"{sum(e['completion_tokens'] for e in replies):,} written",
            "time": duration(float(events[-1].get("seconds", 0.0))),
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{log} holds a malformed event: {error!r:.200}") from None
    out = log.with_name(log.name + ".html")
    text = environment().from_string(TEMPLATE.read_text(encoding="utf-8"))
    atomic_write(out, text.render(name=log.name, task=task, facts=facts, steps=steps, palette=palette_css()))
    return out


def _steps(event: Mapping[str, Any]) -> Iterator[Step]:
    match event["kind"]:
        case "reply":
            message = message_of(event["message"])
            said = f"{event['completion_tokens']:,} tokens after {event['prompt_tokens']:,}"
            cut = "" if event["finish"] in ("stop", "tool_calls", "end_turn", "tool_use") else f", {event['finish']}"
            yield Step("reply", said + cut, message.content, message.reasoning or "")
            for number, call in enumerate(message.tool_calls):
                broken = event["broken"].get(str(number))
                given = "\n".join(f"{name}: {value}" for name, value in call.arguments.items())
                yield Step("call", call.name, given if broken is None else str(broken), failed=broken is not None)
        case "result":
            shown = _coloured(str(event.get("diff", "")))
            yield Step("result", str(event["name"]), str(event["content"]), diff=shown, failed=not event["ok"])
        case "note":
            yield Step("note", "told by the agent", str(event["text"]))
        case "end":
            yield Step("end", str(event["reason"]), str(event["why"]))


def _coloured(patch: str) -> Markup:
    """A patch with its lines marked as added, removed or heading."""
    marks, parts = {"+": "added", "-": "removed", "@": "head", "d": "head"}, []
    for line in patch[:MOST_DIFF].split("\n"):
        mark = "head" if line.startswith(("+++ ", "--- ")) else marks.get(line[:1], "")
        parts.append(Markup('<span class="{}">{}</span>').format(mark, visible(line)))
    if len(patch) > MOST_DIFF:
        parts.append(Markup("…"))
    return Markup("\n").join(parts) if patch else Markup("")
