"""Makes the questions of a web: drawn, checked, spread over depths and forms, kept over rebuilds. Resumable.

`OUT/questions.jsonl` begins with a line that says what it was made from and how far it has come; then one question a
line. It is replaced as a whole after each round, so a build that was stopped goes on after the last round, and one that
has ended stays as it is. Which questions a new build makes depends on the web, the rules and the seed only, not on the
number of processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError
from glm5.files import atomic_write, read_rows
from glm5.obs.logs import get_logger
from glm5.tasks.search.browser import View
from glm5.tasks.search.checks import Checker, Question, shape
from glm5.tasks.search.draw import DEPTHS, KINDS, MOST_FILTERS, Drawer
from glm5.tasks.search.graph import Graph
from glm5.tasks.search.query import Evaluator, named
from glm5.tasks.search.schema import TYPES
from glm5.tasks.search.web import Web

_log = get_logger(__name__)
FORM = 2
"""Version of the words and the checks of questions; those of another version are made anew."""
HEAD = ("rules", "draws", "empty", "rejects")
"""What the first line of a file of questions has besides the version and the web's digest."""
ROUND = 48
"""Draws per piece of work; a round has up to ROUND_PIECES pieces per depth."""
ROUND_PIECES = 8
MOST_EMPTY = 12
"""Rounds in a row without a new question after which a depth is given up: a small web has no more."""
PER_ANSWER, PER_ENTITY = 2, 30
"""Questions with the same answer (the default), and with the same hidden entity."""


@dataclass(frozen=True)
class Rules:
    """What to make. `types` restricts the answers and `kinds` the questions (none: all), `filters` the blurred
    constraints of a question."""

    count: int = 5000
    seed: int = 0
    depths: tuple[int, ...] = DEPTHS
    types: tuple[str, ...] = ()
    filters: int = MOST_FILTERS
    per_shape: int = 0
    """Questions of one form; 0 is one in a hundred, but at least ten."""
    kinds: tuple[str, ...] = ()
    results: int = View.results
    """Results of a search, and characters of their snippets (`snippet`), that may not show the answer: as many as the
    agents will be shown."""
    snippet: int = View.snippet
    per_answer: int = PER_ANSWER

    def __post_init__(self) -> None:
        """Raises ConfigError for rules that make nothing."""
        _ = self.view
        if min(self.count, self.per_answer) < 1 or not self.depths or any(not 1 < d <= 8 for d in self.depths):
            raise ConfigError("search questions: count and per_answer are at least 1, and depths from 2 to 8.")
        if unknown := [type for type in self.types if type not in TYPES or not TYPES[type].answer]:
            known = ", ".join(type for type in TYPES if TYPES[type].answer)
            raise ConfigError(f"search questions: {unknown[0]!r:.40} cannot be asked for; take some of {known}.")
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise ConfigError(f"search questions: {unknown[0]!r:.40} is not a kind; take some of {', '.join(KINDS)}.")
        if not 0 <= self.filters <= 8:
            raise ConfigError("search questions: filters is 0 to 8.")

    @property
    def view(self) -> View:
        return View(self.results, self.snippet)

    @property
    def most_of_shape(self) -> int:
        return self.per_shape or max(10, self.count // 100)

    def plain(self) -> dict[str, Any]:
        """The rules as JSON values, which a file of questions has in its first line."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found


@dataclass
class Set:
    """The questions so far, and what rules out more."""

    rules: Rules
    questions: list[Question] = field(default_factory=list)
    rejects: Counter[str] = field(default_factory=Counter)
    _ids: set[str] = field(default_factory=set)
    _shapes: Counter[str] = field(default_factory=Counter)
    _answers: Counter[str] = field(default_factory=Counter)
    _hidden: Counter[str] = field(default_factory=Counter)
    _chains: set[frozenset[str]] = field(default_factory=set)
    _depths: Counter[int] = field(default_factory=Counter)

    def wanted(self, depth: int) -> int:
        """Questions of a depth that are still to be made; the first depths take what does not divide. A constraint can
        make a question deeper than it was drawn."""
        if depth not in self.rules.depths:
            return 0
        share, more = divmod(self.rules.count, len(self.rules.depths))
        return share + (self.rules.depths.index(depth) < more) - self._depths[depth]

    def add(self, question: Question) -> bool:
        """Take a question unless there are enough like it; the reason is counted."""
        chain, hidden = frozenset(question.evidence), set(question.evidence) - set(named(question.query.root))
        form = shape(question.query)
        if question.id in self._ids:
            reason = "another of the same form"
        elif self._shapes[form] >= self.rules.most_of_shape:
            reason = "enough of its shape"
        elif self._answers[question.answer] >= self.rules.per_answer or (
            any(self._hidden[e] >= PER_ENTITY for e in hidden)
        ):
            reason = "enough about its entities"
        elif chain in self._chains:
            reason = "another over the same entities"
        elif self.wanted(question.depth) < 1:
            reason = "enough of its depth"
        else:
            self.questions.append(question)
            self._ids.add(question.id)
            self._shapes[form] += 1
            self._answers[question.answer] += 1
            self._hidden.update(hidden)
            self._chains.add(chain)
            self._depths[question.depth] += 1
            return True
        self.rejects[reason] += 1
        return False


def make_questions(
    out: Path, graph: Graph, rules: Rules, jobs: int = 1, told: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Make or complete `OUT/questions.jsonl` for the web in `out`; returns counts.

    Questions of an earlier web are checked again: those that still hold stay."""
    web = Web(out)
    made, head = Set(rules), {"form": FORM, "web": web.digest, "rules": rules.plain()}
    draws, empty = Counter[str](), Counter[str]()
    earlier, rows = _read(out / "questions.jsonl")
    again: Counter[str] = Counter()
    if earlier.get("form") == FORM and {**ADDED, **earlier["rules"]} == head["rules"]:
        checker = Checker(web, graph, Evaluator(graph), rules.view)
        for row in rows:
            question = Question.of(row)
            reason = checker.reject(question) if earlier["web"] != web.digest else None
            again[reason or "kept"] += 1
            if reason is None:
                made.add(question)
        if earlier["web"] == web.digest:
            made.rejects, empty = Counter(earlier["rejects"]), Counter(earlier["empty"])
        draws = Counter(earlier["draws"])
    elif rows:
        _log.warning("%s: %d questions made by other rules are replaced.", out, len(rows))

    def save() -> None:
        counted = {"draws": draws, "empty": empty, "rejects": made.rejects}
        _save(out / "questions.jsonl", {**head, **counted}, made.questions)

    with _workers(out, graph, rules, jobs) as work:
        while open_depths := [d for d in rules.depths if made.wanted(d) > 0 and empty[str(d)] < MOST_EMPTY]:
            pieces = list[tuple[int, int]]()
            for depth in open_depths:
                size = max(1, min(ROUND_PIECES, -(-made.wanted(depth) * 6 // ROUND)))
                first = draws[str(depth)]
                pieces += [(depth, first + i * ROUND) for i in range(size)]
                draws[str(depth)] = first + size * ROUND
            before = Counter(question.depth for question in made.questions)
            for found, rejects in work(pieces):
                made.rejects.update(rejects)
                for row in found:
                    made.add(Question.of(row))
            after = Counter(question.depth for question in made.questions)
            empty = Counter({str(d): empty[str(d)] + 1 if after[d] == before[d] else 0 for d in rules.depths})
            save()
            told(f"questions: {len(made.questions)} of {rules.count}")
    save()
    return counts(made.questions) | {
        "draws": sum(draws.values()), "rejects": dict(made.rejects.most_common()), "from before": dict(again),
    }  # fmt: skip


def counts(questions: list[Question]) -> dict[str, Any]:
    """Numbers of questions by depth, kind and type of answer."""
    found: dict[str, Any] = {"questions": len(questions)}
    for name, key in (("depths", lambda q: str(q.depth)), ("kinds", lambda q: q.kind),
                      ("types", lambda q: q.query.root.type)):  # fmt: skip
        found[name] = dict(sorted(Counter(map(key, questions)).items()))
    return found


def read_questions(out: Path) -> list[Question]:
    """The questions of a build with a model's paraphrases (`OUT/paraphrases.jsonl`), without those that its filters
    rejected (`OUT/model.jsonl`). Raises DataError if there are none, or they belong to another web."""
    head, rows = _read(out / "questions.jsonl")
    if not rows:
        raise DataError(f"{out} has no questions; make them with `glm5 task build search --out {out}`.")
    fallen = {row["id"] for row in read_filtered(out) if row.get("reason")}
    digest = Web(out).digest
    if (head.get("form"), head.get("web")) != (FORM, digest):
        raise DataError(f"The questions in {out} belong to an earlier web or version; build them again.")
    texts = {row["id"]: str(row.get("paraphrase", "")) for row in read_paraphrases(out, digest)}
    questions = (question for question in map(Question.of, rows) if question.id not in fallen)
    return [replace(question, paraphrase=texts.get(question.id, "")) for question in questions]


def read_rules(out: Path) -> dict[str, Any]:
    """The rules of a build's questions, as `Rules.plain`; those that a file of an earlier version lacks have the values
    that it was made with."""
    return {**ADDED, **_read(out / "questions.jsonl")[0].get("rules", {})}


def read_view(out: Path) -> View:
    """What a search shows of the questions of a build at most; they were checked with it."""
    rules = read_rules(out)
    return View(rules["results"], rules["snippet"])


def read_filtered(out: Path) -> list[dict[str, Any]]:
    """The rows of the model's filters."""
    return [row for row in read_rows(out / "model.jsonl") if isinstance(row.get("id"), str)]


def read_paraphrases(out: Path, web: str) -> list[dict[str, Any]]:
    """The rows of the model's paraphrases, also of those that were not taken, which were checked on the web with that
    digest."""
    rows = read_rows(out / "paraphrases.jsonl")
    return [row for row in rows if isinstance(row.get("id"), str) and (row.get("form"), row.get("web")) == (FORM, web)]


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first line of a file of questions, and its rows; empty if there is none."""
    try:
        with path.open(encoding="utf-8") as file:
            head, *rows = map(json.loads, file)
        if not isinstance(head, dict) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("not a line of objects")
        if head.get("form") == FORM and not all(isinstance(head.get(key), dict) for key in HEAD):
            raise ValueError("its first line lacks something")
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}. Delete it, and build again.") from error
    return head, rows


def _save(path: Path, head: dict[str, Any], questions: list[Question]) -> None:
    lines = [json.dumps(head), *(json.dumps(question.to_json()) for question in questions)]
    atomic_write(path, "\n".join(lines) + "\n")


ADDED = {"kinds": [], "results": View.results, "snippet": View.snippet, "per_answer": PER_ANSWER}
"""Rules that files of this version may lack, with what they meant."""
Piece = tuple[list[dict[str, Any]], dict[str, int]]
"""Questions that passed, as rows, and the reasons of the others."""


class _Worker:
    def __init__(self, web: Web, graph: Graph, rules: Rules) -> None:
        self._rules = rules
        evaluator = Evaluator(graph)
        self._drawer = Drawer(graph, evaluator, rules.types, rules.filters, rules.kinds)
        self._checker = Checker(web, graph, evaluator, rules.view)

    def __call__(self, piece: tuple[int, int]) -> Piece:
        depth, first = piece
        found, rejects = list[dict[str, Any]](), Counter[str]()
        for number in range(first, first + ROUND):
            drawn = self._drawer.draw(random.Random(f"search {self._rules.seed} {depth} {number}"), depth)
            if isinstance(drawn, str):
                rejects[drawn] += 1
                continue
            question = self._checker.question(*drawn)
            reason: str | None = self._checker.reject(question, reach=False)
            pages = self._checker.reached(question) if reason is None else None
            if pages is None:
                rejects[reason or "not reachable by the tools"] += 1
            else:
                found.append(replace(question, pages=pages).to_json())
        return found, dict(rejects)


_WORKER: _Worker | None = None


def _start(out: str, rules: Rules) -> None:
    global _WORKER
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    web = Web(Path(out))
    _WORKER = _Worker(web, web.graph(), rules)


def _piece(piece: tuple[int, int]) -> Piece:
    assert _WORKER is not None
    return _WORKER(piece)


@contextlib.contextmanager
def _workers(
    out: Path, graph: Graph, rules: Rules, jobs: int
) -> Iterator[Callable[[list[tuple[int, int]]], Iterator[Piece]]]:
    """Does pieces of work in order, in this process or in several."""
    if jobs == 1:
        yield partial(map, _Worker(Web(out), graph, rules))
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, _start, (str(out), rules)) as pool:
        try:
            yield partial(pool.map, _piece)
        except BrokenProcessPool as error:
            text = "A process that makes questions ended, perhaps for lack of memory; go on with a lower --jobs."
            raise DataError(text) from error
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def digest(path: Path) -> str:
    """SHA-256 of a file, or "" if there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
