"""Pages of the web: one per entity, from its facts and its source's own text, and list pages of entities with many
neighbours. A link stands as `name <url>`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from glm5.tasks.search.graph import Graph, Value
from glm5.tasks.search.records import Entity, Page, Ref
from glm5.tasks.search.schema import RELATIONS, TYPES, relations_of

MOST_LISTED = 30
"""Neighbours that a page lists; with more, it names list pages."""
LIST_PAGE = 100
"""Entries of a list page."""
_LINK = re.compile(r"\[\[([^|\]]*)\|([^|\]]*)\|([^\]]*)\]\]")


def render(graph: Graph, licences: Mapping[str, str], names: Mapping[Ref, str]) -> Iterator[Page]:
    """All pages, by entity. `licences` by source; `names` resolves the links in sources' own texts."""
    for id in sorted(graph.entities):
        entity = graph.entities[id]
        licence = "; ".join(licences[source] for source in entity.sources)
        lines, lists = _lines(graph, entity)
        bare = TYPES[entity.type].bare
        head = [f"{entity.name} is {TYPES[entity.type].noun}."] if bare else []
        if entity.aliases:
            head.append(f"Other names: {', '.join(entity.aliases)}")
        own = _LINK.sub(lambda match: _linked(match, graph, names), entity.text)
        text = "\n".join([*head, *lines, *(["", own] if own else [])])
        yield Page(entity.url, entity.name, text, licence, entity.sources)
        for url, title, rows in lists:
            yield Page(url, title, "\n".join(rows), licence, entity.sources)


def _lines(graph: Graph, entity: Entity) -> tuple[list[str], list[tuple[str, str, list[str]]]]:
    lines, lists = list[str](), list[tuple[str, str, list[str]]]()
    for relation, reverse in relations_of(entity.type):
        label = relation.listed if reverse else relation.label
        if not label:
            continue
        if relation.kind != "link":
            values = graph.values(entity.id, relation.name)
            if values:
                lines.append(f"{label}: {', '.join(shown(relation.name, value) for value in values)}")
            continue
        others = [graph.entities[i] for i in graph.related(entity.id, relation.name, reverse)]
        others.sort(key=lambda other: (other.name, other.id))
        if len(others) <= MOST_LISTED:
            if others:
                lines.append(f"{label}: {', '.join(link(other) for other in others)}")
            continue
        parts = [others[at : at + LIST_PAGE] for at in range(0, len(others), LIST_PAGE)]
        urls = [f"{entity.url}/{relation.name}-{number}" for number in range(1, len(parts) + 1)]
        lines.append(f"{label}: {len(others)}, in the lists " + ", ".join(f"{n} <{u}>" for n, u in enumerate(urls, 1)))
        for number, (url, part) in enumerate(zip(urls, parts), 1):
            title = f"{label} ({entity.name}), list {number} of {len(parts)}"
            lists.append((url, title, [link(other) for other in part]))
    return lines, lists


def link(entity: Entity) -> str:
    return f"{entity.name} <{entity.url}>"


def shown(relation: str, value: Value) -> str:
    """A literal as a page has it, with its unit."""
    found = RELATIONS[relation]
    if found.kind == "text":
        return str(value)
    if found.kind == "year":
        return str(int(value))
    text = f"{value:,}" if isinstance(value, int) else f"{value:g}" if abs(float(value)) >= 1e6 else f"{value:,}"
    return f"{text} {found.unit}".rstrip()


def read_number(text: str) -> float | None:
    """The number of a line that `shown` wrote."""
    match = re.match(r"[+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?", text)
    return float(match[0].replace(",", "")) if match else None


def _linked(match: re.Match[str], graph: Graph, names: Mapping[Ref, str]) -> str:
    found = names.get(Ref(match[2], match[3]))
    return f"{match[1]} <{graph.entities[found].url}>" if found in graph.entities else match[1]
