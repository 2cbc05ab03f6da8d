"""How a coding agent's session looks in a terminal: streamed text, folded thoughts, calls with their results."""

from __future__ import annotations

import json

from glm5.agents.coding import Outcome, View
from glm5.agents.endpoint import Reply
from glm5.agents.tools import CHANGING, ToolResult, shortened
from glm5.records import ToolCall
from glm5.terminal.screen import Screen

SHOWN_LINES = 12
"""Lines of a result that are shown."""


class AgentView(View):
    """Shows a session on a screen. With `approve`, calls that may change something wait for the user.

    Thoughts are folded: while the model thinks, one line counts the words; afterwards it is gone, and `thoughts` of the
    log have the text.
    """

    def __init__(self, screen: Screen, *, approve: bool = False) -> None:
        self._screen = screen
        self._asks = approve
        self._words = 0

    def delta(self, kind: str, text: str) -> None:
        if kind == "thought":
            self._words += len(text.split())
            self._screen.waiting(f"Thinking, {self._words} words")
            return
        self._fold()
        self._screen.write(text)

    def _fold(self) -> None:
        if self._words:
            self._screen.note(f"Thought, {self._words} words.")
            self._words = 0

    def reply(self, reply: Reply) -> None:
        self._fold()
        self._screen.end_line()

    def approve(self, call: ToolCall) -> str | None:
        self._screen.end_line()
        self._screen.write(_shown(call) + "\n", style="cyan")
        if not self._asks or call.name not in CHANGING:
            return None
        while True:
            try:
                answer = self._screen.read("Carry this out? [y]es, [a]lways, [n]o, [q]uit, or tell the agent: ").strip()
            except EOFError:
                raise KeyboardInterrupt from None
            if answer in ("y", "yes", ""):
                return None
            if answer in ("a", "always"):
                self._asks = False
                return None
            if answer in ("q", "quit"):
                raise KeyboardInterrupt
            return "" if answer in ("n", "no") else f"The user says: {answer}"

    def output(self, stream: str, data: bytes) -> None:
        lines = data.decode("utf-8", "replace").strip().splitlines()
        if lines:
            self._screen.waiting(f"Running: {lines[-1][:100]}")

    def result(self, call: ToolCall, result: ToolResult) -> None:
        lines = result.content.splitlines()
        if call.name in ("read", "list", "search") and result.ok:
            self._screen.note(f"  {len(lines)} lines")
            return
        shown = lines if len(lines) <= SHOWN_LINES else [*lines[:4], f"... {len(lines) - 10} lines ...", *lines[-6:]]
        text = "\n".join(f"  {line[:200]}" for line in shown)
        self._screen.note(text, style="dim" if result.ok else "red")

    def note(self, text: str) -> None:
        self._screen.note(text)

    def end(self, outcome: Outcome, patch: str) -> None:
        """The last lines: the patch, and how the session ended."""
        for line in patch.splitlines():
            style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
            self._screen.write(line + "\n", style=style)
        files = f"{len(outcome.changes.files)} files changed"
        used = f"{outcome.turns} turns, {outcome.tokens:,} tokens, {outcome.seconds:.0f} s"
        self._screen.note(f"{outcome.reason}: {files}; {used}.")
        if not outcome.ok:
            self._screen.note("To go on: glm5 agent --resume and the log.")
        for path, why in outcome.changes.left_out.items():
            self._screen.note(f"Left out: {path} ({why})")


def _shown(call: ToolCall) -> str:
    """A call in a few lines: the command, or the text that an edit replaces."""
    given = dict(call.arguments)
    if call.name == "edit" and {"path", "old", "new"} <= given.keys():
        signs = [f"- {line}" for line in str(given["old"]).splitlines()]
        signs += [f"+ {line}" for line in str(given["new"]).splitlines()]
        more = [f"  ... {len(signs) - 40} lines"] if len(signs) > 40 else []
        return "\n  ".join([f"edit {given['path']}", *signs[:40], *more])
    text = " ".join(str(v) if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in given.values())
    return f"{call.name} {shortened(text, 2000)}"  # what is left out shows
