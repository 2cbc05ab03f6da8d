"""The family "search": questions over a built web, played with the tools of `Browser` (§4.2.3, §4.2.4).

A message without calls, or a call of `finish`, is the answer. The reward is 1 if it is exactly the answer's name or an
alias, else 0. A fault of the web, the index or the sandbox is an environment error and gives no reward.
"""

from __future__ import annotations

import functools
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from glm5.errors import ConfigError, DataError
from glm5.records import Env, Message, Outcome, StepResult, ToolCall
from glm5.tasks.contract import CALLS_S, SPLITS, Family, Problem, ToolSpec, split_of
from glm5.tasks.search.answers import read_reply, right
from glm5.tasks.search.browser import TOOLS, Browser, View, misuse
from glm5.tasks.search.oracle import Oracle, Unreachable
from glm5.tasks.search.records import plain_name
from glm5.tasks.tools.python_tool import default_programs

if TYPE_CHECKING:
    from glm5.tasks.search.checks import Question
    from glm5.tasks.search.web import Web

MOST_CALLS = 4  # per message
MOST_MALFORMED = 3


@functools.lru_cache(maxsize=4)
def load(folder: str, state: tuple[int, ...]) -> tuple[Web, list[Question]]:
    """The web and the questions of a build, once per process and state of its files."""
    from glm5.tasks.search.questions import read_questions
    from glm5.tasks.search.web import Web

    return Web(Path(folder)), read_questions(Path(folder))


def loaded(folder: Path) -> tuple[Web, list[Question]]:
    """The web and the questions of a build; made again if its files have changed."""
    files = (folder / name for name in ("web.sqlite", "questions.jsonl", "model.jsonl", "paraphrases.jsonl"))
    return load(str(folder.resolve()), tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in files))


def split_of_answer(question: Question) -> str:
    """The split of a question: it depends on the answer's name only, so no answer is in two splits, not even if two
    entities of different types have the same name."""
    return split_of_name(question.names[0])


def split_of_name(name: str) -> str:
    """The split of questions whose answer has a name."""
    return split_of(f"search {plain_name(name)}")


@dataclass(frozen=True)
class SearchProblem:
    """One question. `strict` ends the episode with 0 at the first wrong call."""

    question: Question
    web: Web
    tools: Sequence[ToolSpec]
    view: View
    max_turns: int
    strict: bool
    thinking: bool
    hint: str = ""
    domain: str = "search"

    @property
    def id(self) -> str:
        return f"search/{self.question.id}"

    @property
    def key(self) -> str:
        return self.question.id

    @property
    def prompt(self) -> str:
        return f"{self.question.asked}{self.hint}"

    def browser(self) -> Browser:
        """The tools of a new session; pages that quote the question do not exist in it."""
        return Browser(self.web, (self.question.asked,), self.view, default_programs, self.question.id)

    def env(self) -> Env:
        return SearchEnv(self)

    def demonstration(self, rng_seed: int) -> list[Message]:
        """The oracle's way over the gold chain. Raises DataError if the tools show too little for it."""
        named = (*self.question.evidence, *self.question.constants)
        browser = self.browser()
        if self.view.numbered:  # the oracle goes by addresses, of pages that may show as much with numbers
            browser.view = replace(self.view, page=4 * self.view.page, numbered=False)
        oracle = Oracle(browser, self.question.constants, named, self.thinking)
        try:
            answer = oracle.answer(self.question.query)
            messages = self._by_numbers(oracle.messages) if self.view.numbered else oracle.messages
        except Unreachable as error:
            raise DataError(f"{self.id}: with this view the oracle does not find the answer: {error}.") from error
        final = Message("assistant", answer, reasoning="this is it" if self.thinking else None)
        return [Message("user", self.prompt), *messages, final]

    def _by_numbers(self, messages: Sequence[Message]) -> list[Message]:
        """The oracle's messages with numbers for addresses. Raises Unreachable if a page does not show a link."""
        browser, found = self.browser(), list[Message]()
        for message in messages:
            for call in message.tool_calls:
                if call.name == "open":
                    number = browser.number(call.arguments["url"])
                    if number is None:
                        raise Unreachable(f"no link to {call.arguments['url']}")
                    call = ToolCall("click", {"link_id": number})
                shown, _ = browser.call(call)
                found += [replace(message, tool_calls=(call,)), Message("tool", shown)]
        return found


class BrowserProblem(Problem, Protocol):
    """What an episode needs of a problem: the tools of a session, and how long it may take."""

    @property
    def max_turns(self) -> int: ...

    @property
    def strict(self) -> bool: ...

    def browser(self) -> Browser: ...


class BrowserEnv(ABC):
    """An episode with the search tools: at most `max_turns` messages, the last of which is the answer."""

    calls_s = CALLS_S

    def __init__(self, problem: BrowserProblem) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._asked, self._browser = problem, problem.browser()
        self._offered = {tool["function"]["name"] for tool in problem.tools}
        self._turns = self._malformed = self._calls = 0

    @abstractmethod
    def _answer(self, text: str) -> StepResult:
        """The end of an episode with an answer."""

    @abstractmethod
    def _end(self, outcome: Outcome) -> StepResult:
        """The end of an episode without an answer."""

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        return (Message("user", self._asked.prompt),), self._asked.tools, self._asked.thinking

    def step(self, message: Message | None) -> StepResult:
        """Carry out the calls of a message, or grade the answer. Raises GradingError for a fault of the machine."""
        self._turns += 1
        if message is not None and not message.tool_calls:
            return self._answer(message.content)
        texts, bad, due = list[str](), message is None, time.monotonic() + self.calls_s
        for number, call in enumerate(message.tool_calls if message is not None else ()):
            if call.name == "finish" and "finish" in self._offered and misuse(call) is None:
                return self._answer(call.arguments["answer"])
            text, good = ("error: no time left", True) if time.monotonic() > due else self._carry_out(call, number)
            texts.append(text)
            bad |= not good
        self._malformed += bad
        if self._malformed >= (1 if self._asked.strict else MOST_MALFORMED):
            return self._end(Outcome.MALFORMED)
        if self._turns >= self._asked.max_turns:
            return self._end(Outcome.TRUNCATED)
        return StepResult(messages=tuple(Message("tool", text) for text in texts or ["error: bad call"]))

    def _carry_out(self, call: ToolCall, number: int) -> tuple[str, bool]:
        if number >= MOST_CALLS:
            return "error: too many calls at once", False
        if call.name not in self._offered:
            return "error: no such tool", False
        if (wrong := misuse(call)) is not None:
            return f"error: {wrong}", False
        self._calls += 1
        return self._browser.call(call)[0], True  # a page that is missing is not a malformed call


class SearchEnv(BrowserEnv):
    """An episode over a built web: exactly the answer's name counts."""

    def __init__(self, problem: SearchProblem) -> None:
        super().__init__(problem)
        self._source = problem

    def _answer(self, text: str) -> StepResult:
        answer = self._browser.meant(read_reply(text).answer)
        solved = right(answer, self._source.question.names)
        return self._end(Outcome.SOLVED if solved else Outcome.FAILED, float(solved), answer)

    def _end(self, outcome: Outcome, reward: float = 0.0, answer: str = "") -> StepResult:
        found = set(self._source.question.evidence)
        detail: dict[str, Any] = {
            "calls": self._calls, "malformed": self._malformed, "searches": self._browser.searches, "answer": answer,
            "recall": len(found & set(self._browser.returned)) / max(1, len(found)),
            "depth": self._source.question.depth,
        }  # fmt: skip
        return StepResult(done=True, reward=reward, outcome=outcome, detail=detail)


class SearchFamily(Family):
    """The questions of the build in `folder` (`glm5 task build search`).

    `depths` and `kinds` restrict them; `tools` are those offered; `results`, `snippet` and `page` limit what they show,
    in results and characters; `numbered` gives links of pages numbers for `click`, not addresses, and the answer "[2]"
    is the title of link 2; `shuffled` gives the facts of each page another order for each question; `hint` is added to
    each question, such as the form of the answer. No answer is in two splits. Raises ConfigError for an unusable
    option, DataError for a folder without questions, MissingExtraError.
    """

    name = domain = "search"

    def __init__(
        self,
        seed: int = 0,
        *,
        folder: str = "",
        depths: Sequence[int] = (),
        kinds: Sequence[str] = (),
        tools: Sequence[str] = ("search", "click", "open", "find"),
        results: int = 10,
        snippet: int = 300,
        page: int = 10_000,
        numbered: bool = False,
        shuffled: bool = False,
        max_turns: int = 30,
        strict: bool = False,
        thinking: bool = True,
        hint: str = "",
    ) -> None:
        if not isinstance(folder, str) or not folder:
            raise ConfigError('families: "search" needs its option folder: a build of search tasks.')
        if not Path(folder).is_dir():
            raise ConfigError(f'families: "search": folder: there is no folder {folder!r:.200}.')
        if not tools or isinstance(tools, str) or any(tool not in TOOLS for tool in tools):
            raise ConfigError(f'families: "search": tools is a list of {", ".join(TOOLS)}.')
        if isinstance(depths, int | str) or isinstance(kinds, str) or not isinstance(hint, str):
            raise ConfigError('families: "search": depths is a list of numbers, kinds a list of names, hint a text.')
        if not all(type(size) is int for size in (results, snippet, page, max_turns)) or max_turns < 1:
            raise ConfigError('families: "search": results, snippet, page and max_turns are whole numbers above 0.')
        if not all(type(flag) is bool for flag in (numbered, shuffled, strict, thinking)):
            raise ConfigError('families: "search": numbered, shuffled, strict and thinking are true or false.')
        self._view = View(results, snippet, page, numbered=numbered, shuffled=shuffled)
        self.web, questions = loaded(Path(folder))
        questions = [q for q in questions if q.depth in (depths or [q.depth]) and q.kind in (kinds or [q.kind])]
        if not questions:
            raise DataError(f'"search": no question in {folder} has the depths {list(depths)} and kinds {list(kinds)}.')
        self._tools = self._view.tools(tools)
        self._max_turns, self._strict, self._thinking, self._hint = max_turns, strict, thinking, hint
        self._shown: dict[str, bool] = {}
        self._questions: dict[str, list[Question]] = {split: [] for split in SPLITS}
        random.Random(f"search {seed}").shuffle(questions)
        for question in questions:
            self._questions[split_of_answer(question)].append(question)

    def problem(self, split: str, index: int) -> SearchProblem:
        """Question `index` of a split, modulo their number; of "train" the next one that has a demonstration."""
        if split not in SPLITS:
            raise ConfigError(f'unknown split "{split}"; use one of {", ".join(SPLITS)}.')
        questions = self._questions[split]
        if not questions:
            raise DataError(f'"search": no question is for the split {split}; build more.')
        for place in range(index, index + len(questions)):
            problem = SearchProblem(
                questions[place % len(questions)], self.web, self._tools, self._view, self._max_turns, self._strict,
                self._thinking, self._hint,
            )  # fmt: skip
            if split != "train" or self._demonstrable(problem):
                return problem
        raise DataError('"search": no question of the split train can be shown with these options; allow larger pages.')

    def _demonstrable(self, problem: SearchProblem) -> bool:
        """Whether the oracle gets to the answer with what the tools show, within the limit of messages."""
        if problem.key not in self._shown:
            try:
                self._shown[problem.key] = len(problem.demonstration(0)) // 2 <= self._max_turns
            except DataError:
                self._shown[problem.key] = False
        return self._shown[problem.key]
