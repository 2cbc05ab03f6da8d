"""From records to a graph: entity alignment, attribute normalisation, relation consolidation, consistency repair.

These are the steps that keep the paper's Web Knowledge Graph fresh (§4.2.3). Each is a function from plain data to
plain data that counts what it did; the same records give the same graph.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glm5.tasks.search.graph import Fact, Graph, Value
from glm5.tasks.search.records import Entity, Raw, Record, Ref, plain_name
from glm5.tasks.search.schema import RELATIONS, TYPES

MOST_NAME = 120
MOST_VALUE = 200
_NUMBER = re.compile(r"^\s*([+-]?\d+(?:[ ,]\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(?:m|ft|km2|kB|KiB|K)?\s*$")

Claim = tuple[str, str, Raw, int]
"""Subject's id, relation, value, and the place of the source in the order of trust."""


@dataclass(frozen=True)
class Consolidated:
    """The graph, and counts by step."""

    graph: Graph
    counts: dict[str, dict[str, int]]


def consolidate(sources: Mapping[str, Sequence[Record]]) -> Consolidated:
    """Make one graph of the records of all sources, given in the order of trust."""
    counts: dict[str, dict[str, int]] = {}
    entities, claims, resolve = align(sources, counts)
    facts = repair(normalise(claims, entities, resolve, counts), counts)
    return Consolidated(Graph(entities.values(), facts), counts)


def align(
    sources: Mapping[str, Sequence[Record]], counts: dict[str, dict[str, int]]
) -> tuple[dict[str, Entity], list[Claim], dict[Ref, str]]:
    """Records of one type that share a key are one entity. A key that begins with "name:" joins records of different
    sources only, and none if two records of one source have it: a name that two things bear says nothing.

    Returns entities by id, their claims, and the entity of each key."""
    records = [(place, name, record) for place, (name, rows) in enumerate(sources.items()) for record in rows]
    records = [(place, name, r) for place, name, r in records if r.type in TYPES and r.name.strip() and r.keys]
    owners: dict[Ref, list[int]] = defaultdict(list)
    for number, (_, _, record) in enumerate(records):
        for key in dict.fromkeys(record.keys):
            owners[Ref(record.type, key)].append(number)
    parent = list(range(len(records)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    ambiguous: set[Ref] = set()
    for mention, numbers in owners.items():
        named = mention.key.startswith("name:")
        by_source = Counter(records[i][0] for i in numbers)
        if named and max(by_source.values()) > 1:
            ambiguous.add(mention)
            continue
        for other in numbers[1:]:
            a, b = sorted((root(numbers[0]), root(other)))
            parent[b] = a
    members: dict[int, list[int]] = defaultdict(list)
    for i in range(len(records)):
        members[root(i)].append(i)
    entities, claims, ids = dict[str, Entity](), list[Claim](), dict[int, str]()
    slugs = Counter[str]()
    for head in sorted(members, key=lambda i: (records[i][2].type, records[i][2].keys[0], i)):
        rows = [records[i] for i in members[head]]
        first = rows[0][2]
        slug = _slug(first.name) or "x"
        slugs[f"{first.type}/{slug}"] += 1
        if (again := slugs[f"{first.type}/{slug}"]) > 1:
            slug += "-" + hashlib.sha256(first.keys[0].encode()).hexdigest()[:6] + (f"-{again}" if again > 99 else "")
        id = f"{first.type}/{slug}"
        names = list(dict.fromkeys(name.strip()[:MOST_NAME] for _, _, r in rows for name in (r.name, *r.aliases)))
        texts = list(dict.fromkeys(r.text for _, _, r in rows if r.text))
        told = tuple(dict.fromkeys(source for _, source, _ in rows))
        others = tuple(name for name in names[1:] if name)
        entities[id] = Entity(id, first.type, names[0], others, id, told, "\n\n".join(texts))
        ids[head] = id
        claims += [(id, name, value, place) for place, _, r in rows for name, value in r.claims]
    resolve = {key: ids[root(numbers[0])] for key, numbers in owners.items() if key not in ambiguous}
    counts["alignment"] = {
        "records": len(records), "entities": len(entities), "merged": len(records) - len(entities),
        "of several sources": sum(len(e.sources) > 1 for e in entities.values()), "ambiguous names": len(ambiguous),
    }  # fmt: skip
    return entities, claims, resolve


def normalise(
    claims: Sequence[Claim], entities: Mapping[str, Entity], resolve: Mapping[Ref, str],
    counts: dict[str, dict[str, int]],
) -> list[tuple[str, str, Value, int]]:  # fmt: skip
    """Values in the form of their relation: mentions become ids, numbers floats or ints, texts one line of limited
    length. What cannot be read is dropped; so are claims of unknown relations or of the wrong type of subject."""
    found, count = list[tuple[str, str, Value, int]](), Counter[str]()
    for subject, name, raw, place in claims:
        relation = RELATIONS.get(name)
        if relation is None or entities[subject].type != relation.subject:
            count["unknown relation"] += 1
            continue
        value: Value | None
        if relation.kind == "link":
            value = resolve.get(raw) if isinstance(raw, Ref) else None
            reason = "unresolved mention"
            if value is not None and entities[str(value)].type != relation.object:
                value, reason = None, "wrong type of object"
        elif isinstance(raw, Ref):
            value, reason = None, "wrong type of object"
        elif relation.kind == "text":
            value, reason = " ".join(str(raw).split())[:MOST_VALUE] or None, "empty text"
        else:
            value, reason = _number(raw), "not a number"
            if value is not None:
                count["numbers"] += 1
        if value is None:
            count[reason] += 1
        else:
            found.append((subject, name, value, place))
    counts["normalisation"] = {"claims": len(claims), "kept": len(found), **dict(sorted(count.items()))}
    return found


def repair(claims: Sequence[tuple[str, str, Value, int]], counts: dict[str, dict[str, int]]) -> list[Fact]:
    """Consolidate relations, then repair what contradicts itself.

    Equal claims become one fact, and symmetric relations get their other direction. Numbers out of bounds and links of
    an entity to itself go; of several values of a functional relation the one of the most trusted source stays, and
    none if that source itself has two."""
    merged: dict[Fact, int] = {}
    added = dropped = 0
    for subject, name, value, place in claims:
        fact = (subject, name, value)
        merged[fact] = min(place, merged.get(fact, place))
    equal = len(claims) - len(merged)
    for (subject, name, value), place in list(merged.items()):
        if RELATIONS[name].symmetric and (str(value), name, subject) not in merged:
            merged[(str(value), name, subject)] = place
            added += 1
    good: dict[tuple[str, str], list[tuple[int, Value]]] = defaultdict(list)
    bounds = loops = 0
    for (subject, name, value), place in merged.items():
        relation = RELATIONS[name]
        if relation.kind in ("number", "year") and not relation.low <= float(value) <= relation.high:
            bounds += 1
        elif relation.kind == "link" and value == subject:
            loops += 1
        else:
            good[(subject, name)].append((place, value))
    facts, contradictions = list[Fact](), 0
    for (subject, name), values in good.items():
        if RELATIONS[name].functional and len(values) > 1:
            contradictions += 1
            best = min(place for place, _ in values)
            trusted = [(place, value) for place, value in values if place == best]
            dropped += len(values) - (len(trusted) == 1)
            values = trusted if len(trusted) == 1 else []
        facts += [(subject, name, value) for _, value in values]
    counts["consolidation"] = {"claims": len(claims), "equal claims": equal, "added by symmetry": added}
    counts["repair"] = {"out of bounds": bounds, "links to itself": loops, "contradictions": contradictions,
                        "values dropped": dropped, "facts": len(facts)}  # fmt: skip
    return facts


def _number(raw: str | int | float) -> Value | None:
    if isinstance(raw, str):
        match = _NUMBER.match(raw)
        if match is None:
            return None
        raw = float(match[1].replace(",", "").replace(" ", ""))
    if isinstance(raw, bool) or not math.isfinite(raw):
        return None
    return int(raw) if float(raw).is_integer() and abs(raw) < 1e15 else float(f"{raw:.6g}")


def _slug(name: str) -> str:
    plain = plain_name(name).encode("ascii", "ignore").decode()
    return "-".join(re.findall(r"[a-z0-9]+", plain))[:60].strip("-")
