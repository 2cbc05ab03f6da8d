"""Questions in words. The chain is hidden: entities on it are called by their types only, constants by their names."""

from __future__ import annotations

from glm5.tasks.search.graph import Graph
from glm5.tasks.search.query import Constraint, Either, Equals, Link, Node, Not, Query, Range, Rank
from glm5.tasks.search.schema import RELATIONS, TYPES

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
SUPERLATIVES = {"largest": "highest", "smallest": "lowest"}


def question(query: Query, graph: Graph) -> str:
    """The question: a sentence for the root, and one for each hidden entity of the chain, in the order of the path.

    The first link of a node to a hidden entity continues the chain; further ones stand inside the sentence. A clause in
    which a following "and" could be read as its own part is the last of its sentence; each further one has its own."""
    writer = _Writer(graph)
    bare = TYPES[query.root.type].bare
    first, rest = writer.sentences(query.root)
    if query.best is None:
        start = f"Which {bare} {first}?"
    else:
        relation, end = query.best
        label = RELATIONS[relation].label.lower()
        start = (
            f"Of the {plural(bare)} for which all of this holds, which has the {SUPERLATIVES[end]} {label}? It {first}."
        )
    return " ".join([start, *rest])


def clause(constraint: Constraint, graph: Graph) -> str:
    """One constraint by itself, with everything below it."""
    return _Writer(graph).inline(constraint)


def plural(noun: str) -> str:
    head, of, tail = noun.partition(" of ")
    head = head[:-1] + "ies" if head.endswith("y") else head + "s" if not head.endswith("s") else head
    return head + of + tail


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._seen: dict[str, int] = {}

    def sentences(self, node: Node, subject: str = "It") -> tuple[str, list[str]]:
        """The clauses of a node's first sentence, and the further sentences: its own, and about those below it."""
        closed, open_ended, following = list[str](), list[str](), list[str]()
        self._seen.setdefault(node.type, 1)
        for constraint in node.constraints:
            match constraint:
                case Link(relation, reverse, child) if not child.entity and child.constraints and not following:
                    bare = TYPES[child.type].bare
                    number = self._seen[child.type] = self._seen.get(child.type, 0) + 1
                    article = TYPES[child.type].noun if number == 1 else f"a {ORDINALS[number - 1]} {bare}"
                    called = f"That {bare}" if number == 1 else f"The {ORDINALS[number - 1]} {bare}"
                    closed.append(_verb(relation, reverse).format(article))
                    own, rest = self.sentences(child, called)
                    following = [f"{called} {own}.", *rest]
                case _:
                    (open_ended if _open_ended(constraint) else closed).append(self.inline(constraint))
        own_sentences = [f"{subject} {clause}." for clause in open_ended[1:]]
        return joined([*closed, *open_ended[:1]]), own_sentences + following

    def inline(self, constraint: Constraint) -> str:
        match constraint:
            case Link(relation, reverse, child):
                return _verb(relation, reverse).format(self._noun(child))
            case Range(relation, low, high):
                return RELATIONS[relation].forward.format(between(relation, low, high))
            case Equals(relation, value):
                return RELATIONS[relation].forward.format(f'"{value}"')
            case Rank(relation, group, most):
                found = RELATIONS[relation]
                many = plural(TYPES[found.subject].bare)
                group_name = RELATIONS[group].label.lower()
                return f"is among the {most} {many} with the highest {found.label.lower()} of the same {group_name}"
            case Not(inner):
                return f"is not one that {self.inline(inner)}"
            case Either(first, second):
                return f"either {self.inline(first)} or {self.inline(second)}"

    def _noun(self, node: Node) -> str:
        if node.entity:
            return f"the {TYPES[node.type].bare} {self._graph.entities[node.entity].name}"
        inside = joined([self.inline(one) for one in sorted(node.constraints, key=_open_ended)])
        return TYPES[node.type].noun + (f" that {inside}" if inside else "")


def _open_ended(constraint: Constraint) -> bool:
    """Whether "and" after a constraint's clause could be read as a part of it."""
    match constraint:
        case Link(_, _, child):
            return not child.entity and bool(child.constraints)
        case Not() | Either():
            return True
        case _:
            return False


def _verb(relation: str, reverse: bool) -> str:
    return RELATIONS[relation].reverse if reverse else RELATIONS[relation].forward


def joined(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def between(relation: str, low: float, high: float) -> str:
    """A range in words: a decade, or two bounds with the unit."""
    found = RELATIONS[relation]
    if found.kind == "year":
        decade = low % 10 == 0 and high == low + 9
        return f"in the {int(low)}s" if decade else f"between {int(low)} and {int(high)}"
    return f"between {number(low)} and {number(high)} {found.unit}".rstrip()


def number(value: float) -> str:
    if abs(value) >= 1e15 or 0 < abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.6g}"
