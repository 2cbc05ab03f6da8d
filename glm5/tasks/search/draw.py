"""Draws questions: a hidden chain from a low- or mid-frequency entity, blurred constraints until the answer is unique.

An InfoSeek-style tree: its spine is a walk over links to a constant that the question names; filters on the hidden
nodes are facts of the gold entities, blurred by rules (year to decade, number to range or rank, name to role). The set
operations are WebShaper's: difference, union and, as recursion, a superlative over the set of a sub-question.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from glm5.tasks.search.graph import Graph
from glm5.tasks.search.query import Constraint, Either, Equals, Evaluator, Link, Node, Not, Query, Range, Rank
from glm5.tasks.search.records import leaks
from glm5.tasks.search.schema import RELATIONS, TYPES, Relation, relations_of

DEPTHS = (2, 3, 4, 5, 6)
KINDS = {"tree": 0.5, "superlative": 0.2, "difference": 0.2, "union": 0.1}
MOST_FAN = 60
"""Neighbours that a step of the chain may have to be told from."""
MOST_DEGREE = 0.9
"""Share of the entities of a type, by their number of facts, from which answers and constants are drawn: those with the
most facts are left out."""
MOST_STEPS = 8
"""Tries for each step of a walk."""
MOST_WALKS = 40
"""Walks of a draw: most end at an entity that no question may name, or among too many others."""
MOST_LEVEL = 150
TEXT_ANCHORS = 0.3
"""Share of trees in which the constant too is called by its role: by a code or a text that only it has."""
MOST_FILTERS = 4
RANKED = {"city_population": "city_country", "elevation": "airport_country", "installed_size": "maintained_by",
          "mass_number": "isotope_of", "area": "in_continent", "population": "in_continent"}  # fmt: skip
MOST_RANKED = 40
"""Members of a group in which a rank may be asked for."""
SUPERLATIVE = ("city_population", "elevation", "installed_size", "mass_number", "area", "population", "atomic_number",
               "isotope_year", "term_year", "half_life")  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One link of the chain, from an entity to the next."""

    relation: str
    reverse: bool
    entity: str


@dataclass
class Drawer:
    """Draws candidates. `types` restricts the answers and `kinds` the questions; `filters` the number of blurred
    constraints."""

    graph: Graph
    evaluator: Evaluator
    types: tuple[str, ...] = ()
    filters: int = MOST_FILTERS
    kinds: tuple[str, ...] = ()

    @cached_property
    def _roots(self) -> dict[str, list[str]]:
        """Entities that may be asked for, by type."""
        found = {}
        for type, ids in self.graph.of_type.items():
            if TYPES[type].answer and (not self.types or type in self.types):
                usual = self._degree(type)
                good = [e for e in ids if 1 < self.graph.degree[e] <= usual and self.graph.only_one_named(e)]
                if len(good) >= 5:
                    found[type] = good
        return found

    def _degree(self, type: str) -> int:
        if type not in self._degrees:
            degrees = sorted(self.graph.degree[e] for e in self.graph.of_type[type])
            self._degrees[type] = max(degrees[int(MOST_DEGREE * (len(degrees) - 1))], 8)
        return self._degrees[type]

    @cached_property
    def _degrees(self) -> dict[str, int]:
        return {}

    def draw(self, rng: random.Random, depth: int) -> tuple[Query, str, str] | str:
        """A query of that depth, its answer and its kind; or why this draw came to nothing."""
        if not self._roots:
            return "no type to ask for"
        shares = {kind: share for kind, share in KINDS.items() if not self.kinds or kind in self.kinds}
        kind = rng.choices(list(shares), list(shares.values()))[0]
        types = sorted(self._roots)
        if kind == "superlative":
            types = [type for type in types if any(RELATIONS[name].subject == type for name in SUPERLATIVE)]
            if not types:
                return "no number to compare"
        weights = [math.sqrt(len(self._roots[type])) for type in types]
        by_text = kind == "tree" and depth > 2 and rng.random() < TEXT_ANCHORS
        for _ in range(MOST_WALKS):
            root = rng.choice(self._roots[rng.choices(types, weights)[0]])
            steps = self._walk(rng, root, depth - by_text, by_text)
            if steps is not None and self._narrow(steps) and not self._named_by(root, steps):
                break
        else:
            return "no chain that is narrow enough"
        chain = self._chain(rng, root, steps, by_text)
        if kind == "superlative":
            return self._superlative(rng, chain)
        if kind == "union":
            chain = self._union(rng, chain, steps)
        filtered = self._filter(rng, chain, root, steps, kind == "difference")
        return (Query(filtered), root, kind) if filtered is not None else "no filters make it unique"

    def _walk(self, rng: random.Random, root: str, depth: int, by_text: bool) -> list[Step] | None:
        """A walk of `depth` links without a broad relation, from the root to a constant with a name of its own, or
        (`by_text`) to an entity with a text of its own."""
        at, seen, steps = root, {root}, list[Step]()
        for left in range(depth - 1, -1, -1):
            options = [
                (relation.name, reverse)
                for relation, reverse in relations_of(self.graph.entities[at].type)
                if relation.kind == "link" and not relation.broad and self.graph.related(at, relation.name, reverse)
            ]
            for _ in range(MOST_STEPS if options else 0):
                relation, reverse = rng.choice(options)
                entity = rng.choice(self.graph.related(at, relation, reverse))
                fan = len(self.graph.related(entity, relation, not reverse))
                if (
                    entity not in seen
                    and fan <= MOST_FAN
                    and (left or (self._anchors(entity) if by_text else self._nameable(entity)))
                ):
                    break
            else:
                return None
            steps.append(Step(relation, reverse, entity))
            seen.add(entity)
            at = entity
        return steps

    def _narrow(self, steps: list[Step]) -> bool:
        """Whether a reader who comes from the constant has at most MOST_LEVEL entities to look at in each step."""
        found: set[str] = {steps[-1].entity}
        for step in reversed(steps):
            by = (self.graph.objects if step.reverse else self.graph.subjects)[step.relation]
            found = {str(e) for end in found for e in by.get(end, ())}
            if len(found) > MOST_LEVEL:
                return False
        return True

    def _named_by(self, root: str, steps: list[Step]) -> bool:
        """Whether the constant's name has that of the root or of a hidden entity in it, as Silver-110 has Silver."""
        name = self.graph.entities[steps[-1].entity].name
        hidden = (root, *(step.entity for step in steps[:-1]))
        return any(leaks(self.graph.entities[entity].name, name) for entity in hidden)

    def _nameable(self, entity: str) -> bool:
        """Whether a question may name an entity: its name is its own, and it is not among the best known."""
        usual = self._degree(self.graph.entities[entity].type)
        return self.graph.degree[entity] <= usual and self.graph.only_one_named(entity)

    def _anchors(self, entity: str) -> list[Constraint]:
        """Texts by which an entity can be searched for and that no other entity has."""
        facts = self.graph.facts_of(entity)
        own = [(name, values[0]) for name, values in sorted(facts.items()) if RELATIONS[name].anchor]
        return [Equals(name, str(value)) for name, value in own if len(self.graph.subjects[name][value]) == 1]

    def _chain(self, rng: random.Random, root: str, steps: list[Step], by_text: bool) -> Node:
        types = [self.graph.entities[e].type for e in (root, *(step.entity for step in steps))]
        last = steps[-1].entity
        node = Node(types[-1], (rng.choice(self._anchors(last)),)) if by_text else Node(types[-1], entity=last)
        for type, step in zip(reversed(types[:-1]), reversed(steps)):
            node = Node(type, (Link(step.relation, step.reverse, node),))
        return node

    def _union(self, rng: random.Random, chain: Node, steps: list[Step]) -> Node:
        """The chain with its constant blurred: it is this one or another of the same type."""
        last = steps[-1]
        by = (self.graph.objects if last.reverse else self.graph.subjects)[last.relation]
        others = [
            e for e in rng.sample(sorted(map(str, by)), min(20, len(by))) if e != last.entity and self._nameable(e)
        ]
        if not others:
            return chain

        def blur(node: Node) -> Node:
            link = node.constraints[0]
            assert isinstance(link, Link)
            if not link.child.entity:
                return replace(node, constraints=(replace(link, child=blur(link.child)),))
            other = replace(link, child=replace(link.child, entity=rng.choice(others)))
            pair = [link, other] if rng.random() < 0.5 else [other, link]
            return replace(node, constraints=(Either(*pair),))

        return blur(chain)

    def _superlative(self, rng: random.Random, chain: Node) -> tuple[Query, str, str] | str:
        numbers = [r for r in SUPERLATIVE if RELATIONS[r].subject == chain.type]
        if not numbers:
            return "no number to compare"
        found = self.evaluator.node(chain)
        if not 3 <= len(found) <= MOST_RANKED:
            return "too few or too many to compare"
        query = Query(chain, (rng.choice(numbers), rng.choice(("largest", "smallest"))))
        answers = self.evaluator.answers(query)
        if len(answers) != 1:
            return "no single best one"
        return query, next(iter(answers)), "superlative"

    def _filter(self, rng: random.Random, chain: Node, root: str, steps: list[Step], negate: bool) -> Node | None:
        """The chain with filters on its hidden nodes, so that only the root is left; None if that needs too many."""
        gold = [root, *(step.entity for step in steps[:-1])]
        added = list[tuple[int, Constraint]]()
        while len(found := self.evaluator.node(chain)) > 1:
            if len(added) >= self.filters:
                return None
            options = list[tuple[int, int, Constraint, Node]]()
            for place in rng.sample(range(len(gold)), min(len(gold), 3)):
                for constraint in self._blurs(rng, gold[place]):
                    changed = _put(chain, place, constraint)
                    left = len(self.evaluator.node(changed))
                    if 0 < left < len(found):
                        options.append((left, place, constraint, changed))
            if negate and not added:
                options += self._negations(rng, chain, root, found)
            if not options:
                return None
            pool = [one for one in options if isinstance(one[2], Not)] or options
            _, place, constraint, chain = min(rng.sample(pool, min(len(pool), 3)), key=lambda one: one[0])
            added.append((place, constraint))
        if negate and not any(isinstance(one, Not) for _, one in added):
            return None
        return chain

    def _negations(
        self, rng: random.Random, chain: Node, root: str, found: frozenset[str]
    ) -> Iterator[tuple[int, int, Constraint, Node]]:
        """What others in the set have and the root has not."""
        for other in rng.sample(sorted(found - {root}), min(4, len(found) - 1)):
            for constraint in self._blurs(rng, other):
                if root not in self.evaluator.constraint(constraint, chain.type):
                    changed = _put(chain, 0, Not(constraint))
                    left = len(self.evaluator.node(changed))
                    if 0 < left < len(found):
                        yield left, 0, Not(constraint), changed

    def _blurs(self, rng: random.Random, entity: str) -> list[Constraint]:
        """Blurred constraints that an entity satisfies, one per fact at most."""
        found = list[Constraint]()
        for name, values in sorted(self.graph.facts_of(entity).items()):
            relation = RELATIONS[name]
            value = rng.choice(values)
            if relation.kind in ("number", "year"):
                if name in RANKED and rng.random() < 0.3 and (rank := self._rank(name, entity)) is not None:
                    found.append(rank)
                else:
                    found.append(_range(rng, relation, float(value)))
            elif relation.kind == "text":
                if not relation.anchor and len(self.graph.subjects[name][value]) > 3:
                    found.append(Equals(name, str(value)))
            elif relation.broad:
                found.append(Link(name, False, Node(relation.object, entity=str(value))))
            elif rng.random() < 0.3:  # a branch: another entity that is called by its role only
                inner = list(self._blurs_plain(rng, str(value)))
                if inner:
                    found.append(Link(name, False, Node(relation.object, (rng.choice(inner),))))
        return found

    def _blurs_plain(self, rng: random.Random, entity: str) -> Iterator[Constraint]:
        for name, values in sorted(self.graph.facts_of(entity).items()):
            if RELATIONS[name].kind in ("number", "year"):
                yield _range(rng, RELATIONS[name], float(values[0]))

    def _rank(self, relation: str, entity: str) -> Rank | None:
        """The smallest of a few rounded ranks in the entity's group."""
        group = self.graph.values(entity, RANKED[relation])
        members = self.graph.subjects.get(RANKED[relation], {}).get(group[0], ()) if group else ()
        if not 4 <= len(members) <= MOST_RANKED:
            return None
        ranks = (Rank(relation, RANKED[relation], most) for most in (1, 3, 5, 10) if most < len(members))
        return next((r for r in ranks if entity in self.evaluator.constraint(r, RELATIONS[relation].subject)), None)


def _put(node: Node, place: int, constraint: Constraint) -> Node:
    """The chain with one more constraint on the node at a place of the spine."""
    if place == 0:
        return replace(node, constraints=(*node.constraints, constraint))
    link = node.constraints[0]
    if not isinstance(link, Link):  # a union ends the spine
        return replace(node, constraints=(*node.constraints, constraint))
    return replace(
        node, constraints=(replace(link, child=_put(link.child, place - 1, constraint)), *node.constraints[1:])
    )


def _range(rng: random.Random, relation: Relation, value: float) -> Range:
    """A year's decade or a few years around it; of a number, round bounds on both sides of it."""
    if relation.kind == "year":
        if rng.random() < 0.6:
            start = int(value) // 10 * 10
            return Range(relation.name, start, start + 9)
        before = rng.randint(0, 6)
        return Range(relation.name, int(value) - before, int(value) + rng.randint(1, 6))
    spread = abs(value) * rng.choice((0.1, 0.25, 0.5, 1.0)) if value else 10.0
    step = 10.0 ** math.floor(math.log10(max(spread, 1e-30)))
    low = math.floor((value - spread * rng.random()) / step) * step
    high = math.ceil((value + spread * rng.random()) / step) * step
    if value.is_integer() and step < 1:
        low, high = math.floor(low), math.ceil(high)
    low = max(low, relation.low) if relation.low == 0 else low
    if low == high:
        high += max(step, 1.0 if value.is_integer() else 0.0)
    return Range(relation.name, float(f"{low:.6g}"), float(f"{high:.6g}"))
