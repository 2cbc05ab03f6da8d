"""`glm5 task check` on a build of search tasks: every question again, planted bad ones, the oracle, guesses without
tools, and how fast retrieval is."""

from __future__ import annotations

import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from glm5.stats import wilson
from glm5.tasks.search.answers import right
from glm5.tasks.search.browser import Browser, View
from glm5.tasks.search.checks import Checker, Question
from glm5.tasks.search.family import split_of_answer
from glm5.tasks.search.index import Index
from glm5.tasks.search.oracle import Oracle, Unreachable
from glm5.tasks.search.query import Constraint, Evaluator, Link, Node, Query, Range, without_each
from glm5.tasks.search.questions import read_questions, read_view
from glm5.tasks.search.web import Web

PLANTED = 20
QUERIES = GUESSED = 1000


def audit(
    out: Path, sample: int = 50, seed: int = 0, told: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Check a build. `ok` is whether all questions hold, all planted ones fall, and the oracle reaches 95 % of a
    sample. Raises DataError for a folder without a build."""
    web = Web(out)
    questions, graph = read_questions(out), web.graph()
    checker = Checker(web, graph, Evaluator(graph), view := read_view(out))
    reasons = Counter[str]()
    for number, question in enumerate(questions, 1):
        if (reason := checker.reject(question, reach=False)) is not None:
            reasons[reason] += 1
        if number % 500 == 0:
            told(f"checked {number} of {len(questions)} questions")
    rng = random.Random(f"search audit {seed}")
    chosen = rng.sample(questions, min(sample, len(questions)))
    solved = sum(_solved(web, question) for question in chosen)
    interval = wilson(solved, len(chosen))
    planted = [(reason, checker.reject(bad)) for reason, bad in planted_questions(checker, questions, rng)]
    guesses = closed_book(questions)
    fallen = sum(found is not None for _, found in planted)
    return {
        "ok": not reasons and interval.value >= 0.95 and fallen == len(planted) and not any(guesses.values()),
        "questions": len(questions), "fell": dict(reasons),
        "oracle": interval.plain(),
        "planted": {"planted": len(planted), "rejected": fallen,
                    "reasons": dict(Counter(f"{reason}: {found}" for reason, found in planted))},
        "closed_book_right": guesses,
        "after_one_search": after_one_search(web, rng.sample(questions, min(GUESSED, len(questions))), view),
        "retrieval_ms": latency(web.index, questions),
        "index_bytes": sum(path.stat().st_size for path in (out / "index").iterdir()),
    }  # fmt: skip


def _solved(web: Web, question: Question) -> bool:
    try:
        answer = Oracle(Browser(web, (question.asked,)), question.constants).answer(question.query)
    except Unreachable:
        return False
    return right(answer, question.names)


def planted_questions(
    checker: Checker, questions: Sequence[Question], rng: random.Random, count: int = PLANTED
) -> Iterator[tuple[str, Question]]:
    """`count` bad questions made of good ones, each with what is wrong with it, the ways of spoiling in turn."""
    ways = (_without_constraint, _with_spare_constraint, _with_other_answer, _with_name, _with_wrong_depth,
            _with_shortcut, _without_answer)  # fmt: skip
    made, order = 0, rng.sample(list(questions), len(questions))
    for number, question in enumerate(order * (1 + 8 * count // max(1, len(order)))):
        if made >= count:
            return
        way = ways[(made + number // (4 * count)) % len(ways)]  # a way that fits no question does not block the others
        if (bad := way(checker, question, rng)) is not None:
            made += 1
            yield way.__name__.strip("_").replace("_", " "), bad


def _again(checker: Checker, question: Question, query: Query, answer: str = "") -> Question:
    """The question of another query, with texts that fit it."""
    return checker.question(query, answer or question.answer, question.kind)


def _without_constraint(checker: Checker, question: Question, rng: random.Random) -> Question | None:
    _, root = rng.choice(list(without_each(question.query.root)))
    if not root.constraints:
        return None
    return _again(checker, question, replace(question.query, root=root))


def _with_spare_constraint(checker: Checker, question: Question, rng: random.Random) -> Question | None:
    for name, values in checker.graph.facts_of(question.answer).items():
        if isinstance(values[0], (int, float)):
            spare = Range(name, float(values[0]) - 1, float(values[0]) + 1)
            return _again(checker, question, _with(question.query, spare))
    return None


def _with_other_answer(checker: Checker, question: Question, rng: random.Random) -> Question | None:
    others = [e for e in checker.graph.of_type[question.query.root.type] if e != question.answer]
    return _again(checker, question, question.query, rng.choice(others)) if others else None


def _with_name(checker: Checker, question: Question, rng: random.Random) -> Question | None:
    return replace(question, text=f"{question.text} (It is not far from {question.names[0]}.)")


def _with_wrong_depth(checker: Checker, question: Question, rng: random.Random) -> Question | None:
    return replace(question, depth=question.depth + 1)


def _with_shortcut(checker: Checker, question: Question, rng: random.Random) -> Question | None:
    """A question of one hop to a constant, whose search shows the answer."""
    same = checker.graph.of_type[question.query.root.type]
    for entity in rng.sample(same, min(40, len(same))):
        for name, values in checker.graph.facts_of(entity).items():
            child = checker.graph.entities.get(str(values[0]))
            if child is None or len(checker.graph.related(child.id, name, True)) != 1:
                continue
            query = Query(Node(question.query.root.type, (Link(name, False, Node(child.type, entity=child.id)),)))
            bad = checker.question(query, entity, "tree")
            if checker.shortcut(bad):
                return bad
    return None


def _without_answer(checker: Checker, question: Question, rng: random.Random) -> Question | None:
    for name in checker.graph.facts_of(question.answer):
        if name in checker.graph.numbers:
            never = Range(name, -2e12, -1e12)
            return replace(question, query=_with(question.query, never))
    return None


def _with(query: Query, constraint: Constraint) -> Query:
    return replace(query, root=replace(query.root, constraints=(*query.root.constraints, constraint)))


def closed_book(questions: Sequence[Question]) -> dict[str, int]:
    """Right answers on held-out questions of guesses without tools: the answer of the training question that is most
    like it, and the most frequent answer for the type."""
    by_split: dict[str, list[Question]] = {"train": [], "heldout": []}
    for question in questions:
        by_split.setdefault(split_of_answer(question), []).append(question)
    train, held = [*by_split["train"], *by_split.get("rl", [])], by_split["heldout"]
    found = {"most similar question": 0, "most frequent answer": 0}
    if not train or not held:
        return {}
    near = Index.build([q.names[0] for q in train], [""] * len(train), [q.text for q in train])
    common = Counter((q.query.root.type, q.names[0]) for q in train)
    best = {type: name for (type, name), _ in reversed(common.most_common())}
    for question in held:
        hits = near.search(question.asked, 1)
        found["most similar question"] += bool(hits) and right(hits[0].url, question.names)
        found["most frequent answer"] += right(best.get(question.query.root.type, ""), question.names)
    return found


def after_one_search(web: Web, questions: Sequence[Question], view: View) -> dict[str, dict[str, int]]:
    """How much one search for the whole question gives, by depth, to one who understands nothing but the type that is
    asked for: questions for which the first link to such an entity is the answer, in the results (by the rules of
    questions none) or on their pages, and those for which some link on these pages is. Entities that the question names
    do not count."""
    found: dict[str, Counter[str]] = {}
    for question in questions:
        browser, link = Browser(web, (question.asked,), view), re.compile(rf"<({question.query.root.type}/[^<>\s/]+)>")
        results = browser.search(question.asked, browser.view.results)
        pages = "\n".join(browser.open(url)[0] for url in tuple(browser.returned))
        counts = found.setdefault(str(question.depth), Counter(questions=0, results=0, pages=0, linked=0))
        counts["questions"] += 1
        for place, text in (("results", results), ("pages", pages)):
            links = [url for url in link.findall(text) if url not in question.constants]
            counts[place] += links[:1] == [question.answer]
        counts["linked"] += question.answer in links
    return {depth: dict(found[depth]) for depth in sorted(found)}


def latency(index: Index, questions: Sequence[Question]) -> dict[str, float]:
    """Milliseconds of a search for ten results, for the texts of questions and for the names in them."""
    texts = [text for question in questions for text in (question.asked, *question.constants.values())][:QUERIES]
    times = []
    for text in texts:
        began = time.perf_counter()
        index.search(text, 10)
        times.append(1000 * (time.perf_counter() - began))
    ordered = sorted(times)
    return {"p50": round(statistics.median(ordered), 3), "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 3),
            "n": len(ordered)} if ordered else {}  # fmt: skip
