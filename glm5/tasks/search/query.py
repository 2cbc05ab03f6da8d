"""Questions as trees of constraints over the fact graph, and their exact evaluation.

A node stands for an entity of a type: a constant, or everything that satisfies all of its constraints. The answer of a
query is the set of its root, or with `best` the one entity of that set with the largest or smallest number.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from glm5.errors import DataError
from glm5.tasks.search.graph import Graph
from glm5.tasks.search.schema import RELATIONS, TYPES

MOST_DEPTH = 40
MOST_PARTS = 64
MOST_TESTED = 3_000
"""Entities that are tested one by one."""


@dataclass(frozen=True)
class Range:
    """A number or year from `low` to `high`."""

    relation: str
    low: float
    high: float


@dataclass(frozen=True)
class Equals:
    """A text that is exactly `value`."""

    relation: str
    value: str


@dataclass(frozen=True)
class Rank:
    """Among the `most` subjects with the largest number, of those that share the object of `group`. In a group with a
    tie at that place nobody is."""

    relation: str
    group: str
    most: int


@dataclass(frozen=True)
class Link:
    """Some entity of `child` is the object of `relation`, or with `reverse` its subject."""

    relation: str
    reverse: bool
    child: Node


@dataclass(frozen=True)
class Not:
    inner: Constraint


@dataclass(frozen=True)
class Either:
    first: Constraint
    second: Constraint


Constraint = Range | Equals | Rank | Link | Not | Either


@dataclass(frozen=True)
class Node:
    """A constant if `entity` is set."""

    type: str
    constraints: tuple[Constraint, ...] = ()
    entity: str = ""


@dataclass(frozen=True)
class Query:
    root: Node
    best: tuple[str, Literal["largest", "smallest"]] | None = None


class Evaluator:
    """Evaluates queries on one graph. Results of parts are cached."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._node = functools.lru_cache(maxsize=20_000)(self._eval_node)
        self._constraint = functools.lru_cache(maxsize=20_000)(self._eval_constraint)

    def answers(self, query: Query, distinct: bool = False) -> frozenset[str]:
        """All answers: one entity if the question is unique. With `distinct` in the narrowest reading: all hidden
        entities differ from each other and from those that the question names, as "a second city" is another one."""
        found, taken = self._node(query.root), frozenset(named(query.root))

        def fitting(entities: Iterable[str]) -> frozenset[str]:
            return frozenset(e for e in entities if not distinct or self.fits(e, query.root, taken))

        if query.best is None:
            return fitting(found)
        relation, end = query.best
        numbers = self.graph.objects.get(relation, {})
        if len(found) < 2 or fitting(entity for entity in found if entity not in numbers):
            return frozenset()  # who has no number could be the best
        valued = defaultdict[float, list[str]](list)
        for entity in found & numbers.keys():
            valued[float(numbers[entity][0])].append(entity)
        best_first = sorted(valued, reverse=end == "largest")
        return next((best for value in best_first if (best := fitting(valued[value]))), frozenset())

    def node(self, node: Node) -> frozenset[str]:
        return self._node(node)

    def constraint(self, constraint: Constraint, type: str) -> frozenset[str]:
        """All entities of a type that satisfy a constraint."""
        return self._constraint(constraint, type)

    def _eval_node(self, node: Node) -> frozenset[str]:
        if node.entity:
            constant = self.graph.entities.get(node.entity)
            return frozenset((node.entity,)) if constant is not None and constant.type == node.type else frozenset()
        if not node.constraints:
            return frozenset(self.graph.of_type.get(node.type, ()))
        # Links to few entities first; what is left is tested one by one, for the sets of ranges are large.
        links = [one for one in node.constraints if isinstance(one, Link)]
        sets = sorted((self._constraint(one, node.type) for one in links), key=len)
        rest = [one for one in node.constraints if not isinstance(one, Link)]
        if not sets or len(sets[0]) > MOST_TESTED:
            sets += [self._constraint(one, node.type) for one in rest]
            rest = []
        found = frozenset.intersection(*sets)
        return frozenset(e for e in found if all(self.holds(e, one, node.type) for one in rest)) if rest else found

    def holds(self, entity: str, constraint: Constraint, type: str) -> bool:
        """Whether an entity of a type satisfies a constraint."""
        match constraint:
            case Range(relation, low, high):
                return any(low <= float(value) <= high for value in self.graph.values(entity, relation))
            case Equals(relation, value):
                return value in self.graph.values(entity, relation)
            case Not(inner):
                return not self.holds(entity, inner, type)
            case Either(first, second):
                return self.holds(entity, first, type) or self.holds(entity, second, type)
            case _:
                return entity in self._constraint(constraint, type)

    def fits(self, entity: str, node: Node, taken: frozenset[str] | None = None) -> bool:
        """Whether an entity may stand for a node: the same as `entity in self.node(node)`, from the top down. With
        `taken` there must be an entity for each hidden node, all different, and none of these."""
        if taken is not None:
            return any(True for _ in self._choices(entity, node, taken))
        if node.entity:
            return entity == node.entity
        if self.graph.entities[entity].type != node.type:
            return False
        rest = [one for one in node.constraints if not isinstance(one, Link)]
        links = [one for one in node.constraints if isinstance(one, Link)]
        return all(self.holds(entity, one, node.type) for one in rest) and all(
            any(self.fits(end, one.child) for end in self.graph.related(entity, one.relation, one.reverse))
            for one in links
        )

    def _choices(self, entity: str, node: Node, taken: frozenset[str]) -> Iterator[frozenset[str]]:
        """The ways to choose entities for a node and the hidden ones below it; each with what is then taken."""
        if node.entity:
            if entity == node.entity:
                yield taken
        elif entity not in taken and self.graph.entities[entity].type == node.type:
            cheap_first = sorted(node.constraints, key=lambda one: isinstance(one, Link))
            yield from self._choices_below(entity, tuple(cheap_first), node.type, taken | {entity})

    def _choices_below(
        self, entity: str, parts: Sequence[Constraint], type: str, taken: frozenset[str]
    ) -> Iterator[frozenset[str]]:
        if not parts:
            yield taken
            return
        first, *rest = parts
        match first:
            case Link(relation, reverse, child):
                fitting = self._node(child)  # the wider set spares most ways that lead nowhere
                for end in self.graph.related(entity, relation, reverse):
                    for more in self._choices(end, child, taken) if end in fitting else ():
                        yield from self._choices_below(entity, rest, type, more)
            case Either(one, other):
                yield from self._choices_below(entity, (one, *rest), type, taken)
                yield from self._choices_below(entity, (other, *rest), type, taken)
            case _:
                if self.holds(entity, first, type):
                    yield from self._choices_below(entity, rest, type, taken)

    def _eval_constraint(self, constraint: Constraint, type: str) -> frozenset[str]:
        graph = self.graph
        match constraint:
            case Range(relation, low, high):
                return frozenset(graph.within(relation, low, high))
            case Equals(relation, value):
                return frozenset(graph.subjects.get(relation, {}).get(value, ()))
            case Rank(relation, group, most):
                return self._ranked(relation, group, most)
            case Link(relation, reverse, child):
                by = (graph.objects if reverse else graph.subjects).get(relation, {})
                found: set[Any] = set()
                for end in self._node(child):
                    found.update(by.get(end, ()))
                return frozenset(found)
            case Not(inner):
                return frozenset(graph.of_type.get(type, ())) - self._constraint(inner, type)
            case Either(first, second):
                return self._constraint(first, type) | self._constraint(second, type)

    def _ranked(self, relation: str, group: str, most: int) -> frozenset[str]:
        found: set[str] = set()
        for members in self.graph.subjects.get(group, {}).values():
            valued = sorted(((float(v[0]), m) for m in members if (v := self.graph.values(m, relation))), reverse=True)
            if len(valued) > most and valued[most - 1][0] > valued[most][0]:
                found.update(member for _, member in valued[:most])
        return frozenset(found)


def without_each(node: Node) -> Iterator[tuple[Constraint, Node]]:
    """Every constraint of a tree, at any depth, with the tree without it."""
    for i, constraint in enumerate(node.constraints):
        yield constraint, replace(node, constraints=node.constraints[:i] + node.constraints[i + 1 :])
        for part, changed in _within(constraint):
            yield part, replace(node, constraints=(*node.constraints[:i], changed, *node.constraints[i + 1 :]))


def _within(constraint: Constraint) -> Iterator[tuple[Constraint, Constraint]]:
    match constraint:
        case Link(_, _, child):
            for part, changed in without_each(child):
                yield part, replace(constraint, child=changed)
        case Not(inner):
            for part, new in _within(inner):
                yield part, Not(new)


def depth(node: Node) -> int:
    """Facts on the longest chain from the root to a leaf: links to constants, and literals, count one each."""
    return max((_depth(one) for one in node.constraints), default=0)


def _depth(constraint: Constraint) -> int:
    match constraint:
        case Link(_, _, child):
            return 1 + depth(child)
        case Not(inner):
            return _depth(inner)
        case Either(first, second):
            return max(_depth(first), _depth(second))
        case _:
            return 1


def named(node: Node) -> Iterator[str]:
    """The constants of a tree."""
    if node.entity:
        yield node.entity
    for constraint in node.constraints:
        yield from _named(constraint)


def _named(constraint: Constraint) -> Iterator[str]:
    match constraint:
        case Link(_, _, child):
            yield from named(child)
        case Not(inner):
            yield from _named(inner)
        case Either(first, second):
            yield from _named(first)
            yield from _named(second)


def canonical(query: Query, constants: bool = True) -> str:
    """A hash that is equal for isomorphic trees, and only for these: on trees Weisfeiler-Lehman refinement ends in the
    same classes. Without `constants` it is the hash of the shape."""
    text = f"{_canon(query.root, constants)} {query.best}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _canon(part: Node | Constraint, constants: bool) -> str:
    match part:
        case Node(type, constraints, entity):
            inside = sorted(_canon(one, constants) for one in constraints)
            return f"{type}({'=' if entity else ''}{entity if constants else ''}{';'.join(inside)})"
        case Link(relation, reverse, child):
            return f"{relation}{'<' if reverse else '>'}{_canon(child, constants)}"
        case Not(inner):
            return f"not {_canon(inner, constants)}"
        case Either(first, second):
            return "either " + "|".join(sorted((_canon(first, constants), _canon(second, constants))))
        case Range(relation, low, high):
            return f"{relation}[{f'{low},{high}' if constants else ''}]"
        case Equals(relation, value):
            return f"{relation}={value if constants else ''}"
        case Rank(relation, group, most):
            return f"{relation}#{group}{most if constants else ''}"


def to_json(part: Query | Node | Constraint) -> dict[str, Any]:
    match part:
        case Query(root, best):
            return {"root": to_json(root), "best": list(best) if best else None}
        case Node(type, constraints, entity):
            return {"type": type, "entity": entity, "all": [to_json(one) for one in constraints]}
        case Range(relation, low, high):
            return {"is": "range", "relation": relation, "low": low, "high": high}
        case Equals(relation, value):
            return {"is": "equals", "relation": relation, "value": value}
        case Rank(relation, group, most):
            return {"is": "rank", "relation": relation, "group": group, "most": most}
        case Link(relation, reverse, child):
            return {"is": "link", "relation": relation, "reverse": reverse, "child": to_json(child)}
        case Not(inner):
            return {"is": "not", "inner": to_json(inner)}
        case Either(first, second):
            return {"is": "either", "first": to_json(first), "second": to_json(second)}


def of_json(row: Any) -> Query:
    """Raises DataError for anything that is not a query over the relations of this version."""
    try:
        best = row["best"]
        if best is not None and (best[0] not in RELATIONS or best[1] not in ("largest", "smallest")):
            raise ValueError("unknown superlative")
        return Query(_node(row["root"], 0), (best[0], best[1]) if best else None)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"not a query of this version: {error!r:.200}") from None


def _node(row: Any, level: int) -> Node:
    if level > MOST_DEPTH or len(row["all"]) > MOST_PARTS or row["type"] not in TYPES:
        raise ValueError("too deep, too wide or of an unknown type")
    return Node(row["type"], tuple(_constraint(one, level + 1) for one in row["all"]), str(row["entity"]))


def _constraint(row: Any, level: int) -> Constraint:
    if level > MOST_DEPTH:
        raise ValueError("too deep")
    kind = row["is"]
    if kind == "not":
        return Not(_constraint(row["inner"], level + 1))
    if kind == "either":
        return Either(_constraint(row["first"], level + 1), _constraint(row["second"], level + 1))
    relation = RELATIONS[row["relation"]].name
    match kind:
        case "range":
            return Range(relation, float(row["low"]), float(row["high"]))
        case "equals":
            return Equals(relation, str(row["value"]))
        case "rank":
            return Rank(relation, RELATIONS[row["group"]].name, int(row["most"]))
        case "link":
            return Link(relation, bool(row["reverse"]), _node(row["child"], level + 1))
    raise ValueError(f"unknown constraint {kind!r:.40}")
