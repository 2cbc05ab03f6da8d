"""Queries against a slow evaluation from their definition, and their forms."""

from __future__ import annotations

import itertools
import random

import pytest

from glm5.errors import DataError
from glm5.tasks.search.draw import Drawer
from glm5.tasks.search.graph import Graph
from glm5.tasks.search.query import (
    Constraint,
    Either,
    Equals,
    Evaluator,
    Link,
    Node,
    Not,
    Query,
    Range,
    Rank,
    canonical,
    depth,
    named,
    of_json,
    to_json,
    without_each,
)
from glm5.tasks.search.records import Entity


@pytest.fixture(scope="module")
def graph() -> Graph:
    rng = random.Random(3)
    entities = [
        Entity(f"{t}/{i}", t, f"{t} {i}", url=f"{t}/{i}") for t in ("city", "country", "airport") for i in range(25)
    ]
    facts: set[tuple[str, str, str | int]] = set()
    for i in range(25):
        facts |= {
            (f"city/{i}", "city_country", f"country/{i % 9}"),
            (f"city/{i}", "city_population", rng.randrange(6)),
            (f"airport/{i}", "serves", f"city/{rng.randrange(25)}"),
            (f"airport/{i}", "elevation", rng.randrange(9)),
            (f"airport/{i}", "iata", f"A{i % 20}"),
            (f"country/{i}", "area", rng.randrange(1, 9)),
            (f"country/{i}", "borders", f"country/{(i + 1) % 25}"),
            (f"country/{(i + 1) % 25}", "borders", f"country/{i}"),
        }
    return Graph(entities, facts)


def slow(graph: Graph, entity: str, part: Node | Constraint) -> bool:
    match part:
        case Node(type, constraints, constant):
            if constant:
                return entity == constant
            return graph.entities[entity].type == type and all(slow(graph, entity, one) for one in constraints)
        case Range(relation, low, high):
            return any(low <= float(v) <= high for v in graph.values(entity, relation))
        case Equals(relation, value):
            return value in graph.values(entity, relation)
        case Link(relation, reverse, child):
            others = [
                o
                for o in graph.entities
                if (o if not reverse else entity) in graph.values(entity if not reverse else o, relation)
            ]
            return any(slow(graph, other, child) for other in others)
        case Rank(relation, group, most):
            same = [
                e
                for e in graph.entities
                if graph.values(e, group) and graph.values(e, group) == graph.values(entity, group)
            ]
            numbers = sorted((float(v[0]) for e in same if (v := graph.values(e, relation))), reverse=True)
            tie = len(numbers) <= most or numbers[most - 1] == numbers[most]
            return not tie and float(graph.values(entity, relation)[0]) >= numbers[most - 1]
        case Not(inner):
            return not slow(graph, entity, inner)
        case Either(first, second):
            return slow(graph, entity, first) or slow(graph, entity, second)


def drawn(graph: Graph) -> list[Query]:
    drawer, found = Drawer(graph, Evaluator(graph)), list[Query]()
    for i in range(60):
        result = drawer.draw(random.Random(i), 2 + i % 3)
        found += [] if isinstance(result, str) else [result[0]]
    return found


def test_evaluation_is_the_definition(graph: Graph) -> None:
    queries = drawn(graph)
    extra = Query(
        Node(
            "city",
            (
                Rank("city_population", "city_country", 1),
                Not(Range("city_population", 0, 3)),
                Either(Range("city_population", 4, 4), Range("city_population", 5, 5)),
            ),
        )
    )
    assert len(queries) > 10
    evaluator = Evaluator(graph)
    for query in [*queries, extra]:
        for node in [query.root, *(changed for _, changed in without_each(query.root))]:
            wanted = {e for e in graph.entities if slow(graph, e, node)}
            assert evaluator.node(node) == wanted


def hidden(node: Node) -> list[Node]:
    """The hidden nodes of a tree, from the root on."""
    inner = [hidden(one.child) for one in node.constraints if isinstance(one, Link) and not one.child.entity]
    return [node, *(one for some in inner for one in some)]


def slow_distinct(graph: Graph, root: Node) -> set[str]:
    """The answers with all hidden entities different, by trying every choice of entities."""

    def holds(entity: str, node: Node, rest: list[str]) -> bool:
        for one in node.constraints:
            if not isinstance(one, Link):
                if not slow(graph, entity, one):
                    return False
                continue
            end = one.child.entity or rest.pop(0)
            if end not in graph.related(entity, one.relation, one.reverse):
                return False
            if not one.child.entity and not holds(end, one.child, rest):
                return False
        return True

    nodes, constants = hidden(root), set(named(root))
    choices = itertools.product(*([e for e in graph.of_type[node.type] if e not in constants] for node in nodes))
    return {first for first, *rest in choices if len({first, *rest}) == len(nodes) and holds(first, root, rest)}


def test_a_second_one_is_another_in_the_narrow_reading(graph: Graph) -> None:
    evaluator, compared, narrower = Evaluator(graph), 0, 0
    branch = Link("borders", False, Node("country", (Range("area", 1, 4),)))
    near = Link("borders", False, Node("country", (Link("borders", False, Node("country", (Range("area", 2, 3),))),)))
    made = [Query(Node("country", pair)) for pair in ((branch, near), (near, branch), (branch, branch))]
    for query in [*drawn(graph), *made]:
        if len(hidden(query.root)) <= 3 and query.best is None:
            wanted = slow_distinct(graph, query.root)
            assert evaluator.answers(query, distinct=True) == wanted <= evaluator.answers(query)
            compared += 1
            narrower += wanted < evaluator.answers(query)
    assert compared >= 9 and narrower > 0


def test_a_superlative_has_one_winner(graph: Graph) -> None:
    evaluator = Evaluator(graph)
    tied = Query(Node("city", (Range("city_population", 0, 9),)), ("city_population", "largest"))
    best = max(int(v[0]) for e in graph.of_type["city"] if (v := graph.values(e, "city_population")))
    assert len(evaluator.answers(tied)) == sum(
        graph.values(e, "city_population") == (best,) for e in graph.of_type["city"]
    )


def test_forms_and_json(graph: Graph) -> None:
    for query in drawn(graph):
        assert of_json(to_json(query)) == query
    a, b = Range("area", 1, 2), Link("capital", False, Node("city", entity="city/1"))
    assert canonical(Query(Node("country", (a, b)))) == canonical(Query(Node("country", (b, a))))
    other = Link("capital", False, Node("city", entity="city/2"))
    assert canonical(Query(Node("country", (other,)))) != canonical(Query(Node("country", (b,))))
    assert canonical(Query(Node("country", (other,))), False) == canonical(Query(Node("country", (b,))), False)
    assert (
        depth(Node("country", (a, Not(b)))) == 1
        and depth(Node("city", (Link("capital", True, Node("country", (b,))),))) == 2
    )


@pytest.mark.parametrize(
    "row",
    [
        {},
        [],
        {"root": {"type": "spy", "entity": "", "all": []}, "best": None},
        {"root": 3, "best": None},
        {
            "root": {"type": "city", "entity": "", "all": [{"is": "range", "relation": "x", "low": 1, "high": 2}]},
            "best": None,
        },
        {"root": {"type": "city", "entity": "", "all": []}, "best": ["area", "widest"]},
    ],
)
def test_rows_that_are_no_queries(row: object) -> None:
    with pytest.raises(DataError, match="not a query of this version"):
        of_json(row)


def test_a_row_nested_too_deeply() -> None:
    row: dict[str, object] = {"type": "city", "entity": "", "all": []}
    for _ in range(100):
        row = {
            "type": "city",
            "entity": "",
            "all": [{"is": "link", "relation": "capital", "reverse": True, "child": row}],
        }
    with pytest.raises(DataError):
        of_json({"root": row, "best": None})
