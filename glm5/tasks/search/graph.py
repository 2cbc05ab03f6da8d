"""The fact graph in memory: entities, and facts by relation in both directions, with exact look-ups."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from glm5.tasks.search.records import Entity, plain_name
from glm5.tasks.search.schema import RELATIONS

Value = str | int | float
Fact = tuple[str, str, Value]
"""Subject, relation, and an entity's id or a literal."""


class Graph:
    """Entities by id, and facts. Everything that depends on an order is sorted, so that equal facts give equal graphs.

    `objects[relation][subject]` and `subjects[relation][value]` are tuples; `numbers[relation]` is the sorted list of
    (value, subject) of a number or a year.
    """

    def __init__(self, entities: Iterable[Entity], facts: Iterable[Fact]) -> None:
        self.entities: dict[str, Entity] = {entity.id: entity for entity in entities}
        self.of_type: dict[str, tuple[str, ...]] = {}
        types = defaultdict(list)
        for entity in self.entities.values():
            types[entity.type].append(entity.id)
        self.of_type = {type: tuple(sorted(ids)) for type, ids in types.items()}
        forward: dict[str, dict[str, list[Value]]] = defaultdict(lambda: defaultdict(list))
        backward: dict[str, dict[Value, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.degree: Counter[str] = Counter()
        self.num_facts = 0
        for subject, relation, value in sorted(facts, key=lambda fact: (fact[0], fact[1], str(fact[2]))):
            forward[relation][subject].append(value)
            backward[relation][value].append(subject)
            self.degree[subject] += 1
            self.num_facts += 1
            if RELATIONS[relation].kind == "link":
                self.degree[str(value)] += 1
        self.objects = {r: {s: tuple(vs) for s, vs in by.items()} for r, by in forward.items()}
        self.subjects = {r: {v: tuple(ss) for v, ss in by.items()} for r, by in backward.items()}
        self.numbers: dict[str, list[tuple[float, str]]] = {
            name: sorted((float(value), s) for s, values in self.objects[name].items() for value in values)
            for name in self.objects
            if RELATIONS[name].kind in ("number", "year")
        }
        self._names: Counter[tuple[str, str]] = Counter()
        for entity in self.entities.values():
            self._names.update({(entity.type, name) for name in map(plain_name, (entity.name, *entity.aliases))})

    def values(self, subject: str, relation: str) -> tuple[Value, ...]:
        """The values of a relation, sorted; empty if there are none."""
        return self.objects.get(relation, {}).get(subject, ())

    def related(self, entity: str, relation: str, reverse: bool) -> tuple[str, ...]:
        """The entities at the other end of a link, from its subject or (`reverse`) from its object."""
        if reverse:
            return self.subjects.get(relation, {}).get(entity, ())
        return self.objects.get(relation, {}).get(entity, ())  # type: ignore[return-value]

    def within(self, relation: str, low: float, high: float) -> list[str]:
        """The subjects whose number is in [low, high]."""
        numbers = self.numbers.get(relation, [])
        first = bisect.bisect_left(numbers, (low, ""))
        last = bisect.bisect_right(numbers, (high, "\U0010ffff"))
        return [subject for _, subject in numbers[first:last]]

    def only_one_named(self, entity: str) -> bool:
        """Whether no other entity of its type bears its name, not even as an alias."""
        found = self.entities[entity]
        return self.bearers(found.type, found.name) == 1

    def bearers(self, type: str, name: str) -> int:
        """The number of entities of a type that bear a name or have it as an alias."""
        return self._names[(type, plain_name(name))]

    def facts_of(self, entity: str) -> Mapping[str, tuple[Value, ...]]:
        """All facts of which the entity is the subject, by relation."""
        return {name: by[entity] for name, by in self.objects.items() if entity in by}
