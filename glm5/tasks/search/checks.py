"""What a question must be, decided exactly on the graph and the index: unique, each constraint necessary, nothing given
away, no answer by a single search, and reachable by the tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from glm5.errors import DataError
from glm5.tasks.search.browser import Browser, View
from glm5.tasks.search.graph import Graph
from glm5.tasks.search.oracle import Oracle, Unreachable
from glm5.tasks.search.query import (
    Constraint,
    Either,
    Evaluator,
    Link,
    Node,
    Query,
    canonical,
    depth,
    named,
    of_json,
    to_json,
    without_each,
)
from glm5.tasks.search.records import leaks
from glm5.tasks.search.schema import TYPES
from glm5.tasks.search.web import Web
from glm5.tasks.search.wording import clause
from glm5.tasks.search.wording import question as in_words

Reason = Literal[
    "no answer", "not unique", "wrong answer", "a constraint is not necessary", "gives a name away",
    "ambiguous name", "a single search finds the answer", "wrong depth", "not reachable by the tools",
    "another of the same form", "unnamed type", "wrong list of evidence",
    "an empty alternative", "not the same in both readings",
]  # fmt: skip


@dataclass(frozen=True)
class Question:
    """One question. `answer` is the entity's id, `names` its name and aliases; `evidence` are the pages of one gold
    chain. `kind` is "tree", "difference", "union" or "superlative". `domain` is the type of the answer."""

    query: Query
    text: str
    answer: str
    names: tuple[str, ...]
    depth: int
    kind: str
    evidence: tuple[str, ...] = ()
    constants: Mapping[str, str] = field(default_factory=dict)
    """Names of the constants by id."""
    pages: int = 0
    """Pages that the oracle opened."""
    paraphrase: str = ""
    """The text that a model wrote; it is not part of the row."""

    @property
    def id(self) -> str:
        return canonical(self.query)

    @property
    def asked(self) -> str:
        """The text that is put to agents."""
        return self.paraphrase or self.text

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id, "question": self.text, "answer": self.names[0],
            "names": self.names, "entity": self.answer, "depth": self.depth, "kind": self.kind,
            "evidence": self.evidence, "constants": dict(self.constants), "pages": self.pages,
            "query": to_json(self.query),
        }  # fmt: skip

    @classmethod
    def of(cls, row: Any) -> Question:
        """Raises DataError for a malformed row."""
        try:
            names, evidence = tuple(map(str, row["names"])), tuple(map(str, row["evidence"]))
            if not names:
                raise ValueError("it has no answer")
            return cls(of_json(row["query"]), str(row["question"]), str(row["entity"]), names, int(row["depth"]),
                       str(row["kind"]), evidence, {str(k): str(v) for k, v in row["constants"].items()},
                       int(row["pages"]))  # fmt: skip
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"a row of questions.jsonl is malformed: {error!r:.200}") from None


@dataclass
class Checker:
    """Checks questions on one web. `view` is how much a search shows of the answer at most: see `shortcut`."""

    web: Web
    graph: Graph
    evaluator: Evaluator
    view: View = field(default_factory=View)

    def reject(self, question: Question, reach: bool = True) -> Reason | None:
        """The first reason against a question, or None. `reach` also lets the oracle answer it."""
        query, graph = question.query, self.graph
        answers = self.evaluator.answers(query)
        if not answers:
            return "no answer"
        if len(answers) > 1:
            return "not unique"
        if answers != {question.answer} or question.names[0] != graph.entities[question.answer].name:
            return "wrong answer"
        if self.evaluator.answers(query, distinct=True) != answers:
            return "not the same in both readings"
        if not TYPES[query.root.type].answer:
            return "unnamed type"
        if question.depth != depth(query.root):
            return "wrong depth"
        if tuple(self.evidence(query, question.answer)) != question.evidence:
            return "wrong list of evidence"
        if any(not self.evaluator.constraint(*one) for one in alternatives(query.root)):
            return "an empty alternative"
        if not graph.only_one_named(question.answer) or not all(map(graph.only_one_named, named(query.root))):
            return "ambiguous name"
        if self.gives_away(question):
            return "gives a name away"
        if not self.necessary(query):
            return "a constraint is not necessary"
        if self.shortcut(question):
            return "a single search finds the answer"
        if reach and self.reached(question) is None:
            return "not reachable by the tools"
        return None

    def question(self, query: Query, answer: str, kind: str) -> Question:
        """The question of a query in words, with all that its row has but the number of pages."""
        entity = self.graph.entities[answer]
        others = (name for name in entity.aliases if self.graph.bearers(entity.type, name) == 1)
        constants = {one: self.graph.entities[one].name for one in named(query.root)}
        return Question(query, in_words(query, self.graph), answer, (entity.name, *others), depth(query.root), kind,
                        tuple(self.evidence(query, answer)), constants)  # fmt: skip

    def necessary(self, query: Query) -> bool:
        """Whether a unique question has another answer, or several, without any one of its constraints, in both
        readings."""
        [answer] = self.evaluator.answers(query)
        rivals = self._siblings(query, answer) if query.best is None else []
        return all(
            self._differs(replace(query, root=changed), answer, rivals) for _, changed in without_each(query.root)
        )

    def _differs(self, query: Query, answer: str, rivals: Sequence[str]) -> bool:
        """Whether a question has not this one answer, in neither reading. What fits in the narrow reading fits in the
        wide one too. `rivals` are looked at first: they may be other answers without the whole set."""
        taken = frozenset(named(query.root))

        def answers_too(entity: str) -> bool:
            return self._as_good(query, entity, answer) and self.evaluator.fits(entity, query.root, taken)

        if any(map(answers_too, rivals)):
            return True
        wide = self.evaluator.node(query.root)
        return answer not in wide or any(map(answers_too, wide - {answer}))

    def _as_good(self, query: Query, entity: str, answer: str) -> bool:
        """Whether an entity would be an answer beside or before another; who has no number could be the best."""
        if query.best is None:
            return True
        relation, end = query.best
        own, other = (self.graph.values(one, relation) for one in (entity, answer))
        return not own or (float(own[0]) >= float(other[0]) if end == "largest" else float(own[0]) <= float(other[0]))

    def _siblings(self, query: Query, answer: str) -> list[str]:
        """Some entities that share a neighbour with the answer: likely answers of a question with less constraints."""
        link = query.root.constraints[0] if query.root.constraints else None
        if not isinstance(link, Link):
            return []
        ends = self.graph.related(answer, link.relation, link.reverse)
        found = (e for end in ends[:4] for e in self.graph.related(end, link.relation, not link.reverse)[:20])
        return [entity for entity in dict.fromkeys(found) if entity != answer]

    def gives_away(self, question: Question) -> bool:
        """Whether the text names the answer or a hidden entity of the gold chain."""
        constants = set(named(question.query.root))
        hidden = [e for e in question.evidence if e not in constants]
        return any(leaks(name, question.asked) or leaks(name, question.text) for e in hidden for name in self._names(e))

    def _names(self, entity: str) -> Iterator[str]:
        found = self.graph.entities[entity]
        yield found.name
        yield from found.aliases

    def shortcut(self, question: Question) -> bool:
        """Whether a search for the whole question, for a single constraint or for a named entity shows the answer: its
        name or an alias stands in the titles and snippets of the view."""
        browser = Browser(self.web, (question.asked,), self.view)
        texts = [question.asked, question.text, *question.constants.values()]
        texts += [clause(one, self.graph) for one in _all(question.query.root)]
        return any(self._shown(question, browser, text) for text in dict.fromkeys(texts))

    def _shown(self, question: Question, browser: Browser, query: str) -> bool:
        for page in browser.found(query, browser.view.results):
            # Snippets cost time, and are parts of their page.
            if _names_one(question, f"{page.title} <{page.url}>\n{page.text}") and (
                _names_one(question, browser.result(page, query))
            ):
                return True
        return False

    def evidence(self, query: Query, answer: str) -> Iterator[str]:
        """The gold chain, from the answer on: for every hidden node an entity that satisfies it, is linked to its
        parent's, and differs from those before if any does. A superlative also needs all that it compares."""
        found = [answer]

        def walk(node: Node, entity: str) -> None:
            for constraint in node.constraints:
                if isinstance(constraint, Link):
                    child, taken = constraint.child, frozenset((*found, *named(query.root)))
                    ends = self.graph.related(entity, constraint.relation, constraint.reverse)
                    ends = tuple(end for end in ends if end in self.evaluator.node(child))
                    if ends:
                        end = next((end for end in ends if self.evaluator.fits(end, child, taken)), ends[0])
                        found.append(end)
                        walk(child, end)

        walk(query.root, answer)
        compared = sorted(self.evaluator.node(query.root)) if query.best is not None else []
        return iter(dict.fromkeys([*found, *compared]))

    def reached(self, question: Question) -> int | None:
        """Pages that the oracle opens to find the right answer, or None if it does not find it."""
        oracle = Oracle(Browser(self.web, (question.asked,), View(snippet=20)), question.constants)
        try:
            right = oracle.answer(question.query) == question.names[0]
        except Unreachable:
            return None
        return len(oracle.browser.opened) if right else None


def _names_one(question: Question, text: str) -> bool:
    """Whether a text has a link to the answer, or a name of it."""
    return f"<{question.answer}>" in text or any(leaks(name, text) for name in question.names)


def _all(node: Node) -> Iterator[Constraint]:
    for constraint in node.constraints:
        yield constraint
        if isinstance(constraint, Link):
            yield from _all(constraint.child)


def alternatives(node: Node) -> Iterator[tuple[Constraint, str]]:
    """The alternatives of all unions in a tree, with the type of their subject."""
    for constraint in node.constraints:
        if isinstance(constraint, Either):
            yield from ((constraint.first, node.type), (constraint.second, node.type))
        elif isinstance(constraint, Link):
            yield from alternatives(constraint.child)


def shape(query: Query) -> str:
    """The form of a question without its constants."""
    return canonical(query, constants=False)
