"""Published search benchmarks, such as BrowseComp and BrowseComp-ZH, with the tools of `Browser` (App. B).

Rows are a file of the user's, as it was published: fields that are encrypted against crawlers are read with the row's
canary. The pages come from a search web of ours (`glm5 task build search`) or from a search service behind a URL. Pages
that quote the question do not exist for the agent. A judge compares the answer with the right one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError
from glm5.records import Env, Message, Outcome, StepResult
from glm5.tasks.contract import ToolSpec
from glm5.tasks.judged import unjudged
from glm5.tasks.questions import JUDGED, QuestionProblem, QuestionsFamily
from glm5.tasks.search.answers import read_reply
from glm5.tasks.search.browser import TOOLS, Browser, View
from glm5.tasks.search.family import BrowserEnv, loaded
from glm5.tasks.search.service import Service, ServiceBrowser
from glm5.tasks.search.web import Web
from glm5.tasks.tools.python_tool import default_programs

CANARY = "canary"
CALLS_S = 300.0
"""Seconds after which no further call of a message is run; services on the network are slow."""
SYSTEM = """You answer questions by searching the web with your tools. Search for what the question names, open pages,
follow what they say, and check every condition on the pages themselves. End with a message in this form, in the
language of the question:

Explanation: your reasons, with the addresses of the pages that show them in square brackets
Exact Answer: the answer alone
Confidence: a number from 0% to 100%"""


def decrypted(text: str, canary: str) -> str:
    """A text in the form in which BrowseComp is published: base64 of its bytes, each xor-ed with a byte of the SHA-256
    of the canary, again and again. Raises ValueError for a text that is not of this form."""
    key = itertools.cycle(hashlib.sha256(canary.encode()).digest())
    try:
        data = base64.b64decode(text, validate=True)
        return bytes(byte ^ mask for byte, mask in zip(data, key, strict=False)).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise ValueError("a field is not encrypted with the row's canary") from None


@dataclass(frozen=True)
class BrowseProblem(QuestionProblem):
    """One question, its tools and where its pages are."""

    source: Web | Service | None = None
    view: View = field(default_factory=View)
    max_turns: int = 100
    strict: bool = False

    def browser(self) -> Browser:
        """The tools of a new session."""
        if isinstance(self.source, Service):
            return ServiceBrowser(self.source, (self.text,), self.view, default_programs)
        assert self.source is not None
        return Browser(self.source, (self.text,), self.view, default_programs)

    def env(self) -> Env:
        return BrowseEnv(self)


class BrowseEnv(BrowserEnv):
    """Ends with an answer for the judge."""

    calls_s = CALLS_S

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        messages, tools, thinking = super().start()
        return (Message("system", SYSTEM), *messages), tools, thinking

    def _answer(self, text: str) -> StepResult:
        return unjudged(text, self._counts() | {"confidence": read_reply(text).confidence})

    def _end(self, outcome: Outcome) -> StepResult:
        return StepResult(done=True, outcome=outcome, detail=self._counts())

    def _counts(self) -> dict[str, Any]:
        browser = self._browser
        pages = {"searches": browser.searches, "opened": len(browser.opened), "found": len(set(browser.returned))}
        return {"calls": self._calls, "malformed": self._malformed, **pages}


class BrowseCompFamily(QuestionsFamily):
    """The questions of `file` (JSONL or CSV) with the search tools.

    Args:
        folder: a search web of `glm5 task build search`; or
        search: the URL of a search service (`glm5.tasks.search.service`); GLM5_SEARCH_KEY has its key.
        tools: of search, click, open, find, python.
        question, answer: fields of a row, decrypted if the row has a field "canary".
        results, snippet, page: what the tools show, in results and characters.
    """

    name = domain = "browsecomp"

    def __init__(
        self,
        seed: int = 0,
        *,
        file: str = "",
        folder: str = "",
        search: str = "",
        question: str = "problem",
        answer: str = "answer",
        tools: Sequence[str] = ("search", "open", "find", "python"),
        results: int = 10,
        snippet: int = 300,
        page: int = 10_000,
        max_turns: int = 100,
        thinking: bool = True,
    ) -> None:
        super().__init__(seed, file=file, grader=JUDGED, question=question, answer=answer, thinking=thinking)
        if bool(folder) == bool(search):
            raise ConfigError(
                "browsecomp: set folder to a search web (`glm5 task build search`), or search to the URL of a service."
            )
        if not tools or isinstance(tools, str) or any(tool not in TOOLS or tool == "finish" for tool in tools):
            raise ConfigError(f"browsecomp: tools is a list of {', '.join(t for t in TOOLS if t != 'finish')}.")
        if type(max_turns) is not int or max_turns < 1:
            raise ConfigError("browsecomp: max_turns is a whole number above 0.")
        self._source: Web | Service = Service(search) if search else loaded(Path(folder))[0]
        self._view, self._tools, self._max_turns = View(results, snippet, page), tuple(tools), max_turns

    def _made(self, line: int, row: Any) -> BrowseProblem:
        if isinstance(row, Mapping) and isinstance(canary := row.get(CANARY), str) and canary:
            names = [str(self.fields[name]) for name in ("question", "answer")]
            row = {**row, **{name: decrypted(str(row[name]), canary) for name in names}}
        made = super()._made(line, row)
        plain = {one.name: getattr(made, one.name) for one in fields(made)}
        return BrowseProblem(
            **plain | {"tools": tuple(TOOLS[name] for name in self._tools), "domain": self.domain},
            source=self._source, view=self._view, max_turns=self._max_turns,
        )  # fmt: skip
