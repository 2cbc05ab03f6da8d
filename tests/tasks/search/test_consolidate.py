"""The four steps from records to a graph, each on a case that it is there for."""

from __future__ import annotations

from glm5.tasks.search.consolidate import consolidate
from glm5.tasks.search.records import Record, Ref


def country(iso: str, name: str, **claims: object) -> Record:
    record = Record("country", (f"iso:{iso}", f"name:{name.lower()}"), name)
    for relation, value in claims.items():
        record.claim(relation, value)  # type: ignore[arg-type]
    return record


def city(number: int, name: str, iso: str, **claims: object) -> Record:
    record = Record("city", (f"geonames:{number}", f"name:{name.lower()}|{iso}"), name)
    record.claim("city_country", Ref("country", f"iso:{iso}"))
    return record


def test_records_of_two_sources_become_one_entity() -> None:
    made = consolidate({"a": [country("XX", "Xland", population="1,000")], "b": [country("XX", "Republic of X")]})
    [entity] = made.graph.entities.values()
    assert (entity.name, entity.aliases, entity.sources) == ("Xland", ("Republic of X",), ("a", "b"))
    assert made.graph.values(entity.id, "population") == (1000,)
    assert made.counts["alignment"]["merged"] == 1


def test_a_name_of_two_cities_joins_nothing() -> None:
    airport = Record("airport", ("icao:A",), "A", claims=[("serves", Ref("city", "name:same|XX"))])
    made = consolidate({"a": [country("XX", "X"), city(1, "Same", "XX"), city(2, "Same", "XX")], "b": [airport]})
    assert len(made.graph.of_type["city"]) == 2 and len({made.graph.entities[e].url for e in made.graph.entities}) == 4
    assert made.graph.values("airport/a", "serves") == ()
    assert made.counts["alignment"]["ambiguous names"] == 1
    assert made.counts["normalisation"]["unresolved mention"] == 1


def test_values_are_read_or_dropped() -> None:
    bad = country("XX", "X", population="many", area="12 km2", unknown="y", capital="not a mention", elevation=5)
    made = consolidate({"a": [bad]})
    assert made.graph.facts_of("country/x") == {"area": (12,)}
    assert made.counts["normalisation"]["not a number"] == 1 and made.counts["normalisation"]["unknown relation"] == 2


def test_contradictions_bounds_and_symmetry() -> None:
    first = [country("XX", "X", population=5, area=-3, borders=Ref("country", "iso:YY")), country("YY", "Y")]
    first[1].claim("area", 7)
    first[1].claim("area", 8)
    first[1].claim("borders", Ref("country", "iso:YY"))
    made = consolidate({"a": first, "b": [country("XX", "X", population=6)]})
    assert made.graph.values("country/x", "population") == (5,)  # the more trusted source
    assert made.graph.values("country/x", "area") == ()  # out of bounds
    assert made.graph.values("country/y", "area") == ()  # one source with two values
    assert made.graph.values("country/y", "borders") == ("country/x",)  # the other direction, and no loop
    assert made.counts["repair"] == {
        "out of bounds": 1,
        "links to itself": 1,
        "contradictions": 2,
        "values dropped": 3,
        "facts": 3,
    }
    assert made.counts["consolidation"]["added by symmetry"] == 1
