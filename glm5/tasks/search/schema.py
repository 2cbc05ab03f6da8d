"""Types of entities and relations of the search web, with the words for them on pages and in questions.

A relation has one kind: "link" (its value is an entity), "number", "year" or "text". `label` begins its line on the
subject's page, `listed` the list on the object's page. `forward` is what a question says of the subject, `reverse` of
the object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["link", "number", "year", "text"]


@dataclass(frozen=True)
class Relation:
    """`functional`: at most one value per subject. `broad`: its objects are wide classes, which a question may name but
    never use as a step of its chain (InfoSeek's rule). `low` and `high` bound believable numbers and years; `unit` is
    the unit of numbers. `anchor`: a text that names its subject well enough to begin a search with it."""

    name: str
    kind: Kind
    subject: str
    object: str = ""
    label: str = ""
    listed: str = ""
    forward: str = ""
    reverse: str = ""
    functional: bool = True
    broad: bool = False
    symmetric: bool = False
    unit: str = ""
    low: float = float("-inf")
    high: float = float("inf")
    anchor: bool = False


@dataclass(frozen=True)
class EntityType:
    """`noun` with its article; an `answer` may be asked for."""

    noun: str
    answer: bool = True

    @property
    def bare(self) -> str:
        return self.noun.partition(" ")[2]


TYPES: dict[str, EntityType] = {
    "airport": EntityType("an airport"),
    "city": EntityType("a city"),
    "continent": EntityType("a continent", False),
    "country": EntityType("a country"),
    "currency": EntityType("a currency"),
    "element": EntityType("a chemical element"),
    "group": EntityType("a group", False),
    "isotope": EntityType("an isotope"),
    "language": EntityType("a language"),
    "maintainer": EntityType("a maintainer"),
    "manpage": EntityType("a manual page"),
    "module": EntityType("a Python module"),
    "package": EntityType("a Debian package"),
    "person": EntityType("a discoverer"),
    "section": EntityType("a Debian section", False),
    "series": EntityType("a series", False),
    "source": EntityType("a Debian source package"),
    "subdivision": EntityType("a subdivision"),
    "subject": EntityType("a subject", False),
    "term": EntityType("a computing term"),
    "timezone": EntityType("a time zone", False),
}


def _link(
    name: str, subject: str, object: str, label: str, listed: str, forward: str, reverse: str,
    functional: bool = True, broad: bool = False, symmetric: bool = False,
) -> Relation:  # fmt: skip
    return Relation(name, "link", subject, object, label, listed, forward, reverse, functional, broad, symmetric)


def _number(
    name: str, subject: str, label: str, forward: str, unit: str = "", low: float = 0, high: float = 1e12
) -> Relation:
    return Relation(name, "number", subject, label=label, forward=forward, unit=unit, low=low, high=high)


def _text(name: str, subject: str, label: str, forward: str, anchor: bool = False) -> Relation:
    return Relation(name, "text", subject, label=label, forward=forward, anchor=anchor)


def _year(name: str, subject: str, label: str, forward: str) -> Relation:
    return Relation(name, "year", subject, label=label, forward=forward, low=1500, high=2035)


_ALL = (
    _link(
        "in_continent",
        "country",
        "continent",
        "Continent",
        "Countries",
        "lies on {}",
        "is the continent of {}",
        broad=True,
    ),
    _link("capital", "country", "city", "Capital", "Capital of", "has {} as its capital", "is the capital of {}"),
    _link("currency", "country", "currency", "Currency", "Used in", "uses {}", "is the currency of {}"),
    _link(
        "speaks",
        "country",
        "language",
        "Languages",
        "Spoken in",
        "has {} among its languages",
        "is spoken in {}",
        functional=False,
    ),
    _link(
        "borders", "country", "country", "Neighbours", "", "borders {}", "borders {}", functional=False, symmetric=True
    ),
    _number("population", "country", "Population", "has a population {}"),
    _number("area", "country", "Area", "has an area {}", "square kilometres"),
    _text("calling_code", "country", "Calling code", "has the telephone calling code {}"),
    _text("domain", "country", "Internet domain", "has the internet domain {}", True),
    _text("numeric_code", "country", "ISO 3166 number", "has the ISO 3166 number {}"),
    _link("city_country", "city", "country", "Country", "Cities", "lies in {}", "contains {}"),
    _link("city_subdivision", "city", "subdivision", "Subdivision", "Cities", "belongs to {}", "contains {}"),
    _link(
        "city_zone",
        "city",
        "timezone",
        "Time zone",
        "Cities",
        "keeps the time of {}",
        "is the time zone of {}",
        broad=True,
    ),
    _number("city_population", "city", "Population", "has a population {}"),
    _number("city_latitude", "city", "Latitude", "has a latitude {}", "degrees", -90, 90),
    _number("city_longitude", "city", "Longitude", "has a longitude {}", "degrees", -180, 180),
    _link(
        "subdivision_country", "subdivision", "country", "Country", "Subdivisions", "is part of {}", "has {} as a part"
    ),
    _text("subdivision_kind", "subdivision", "Kind", "is of the kind {}"),
    _text("subdivision_code", "subdivision", "ISO 3166-2 code", "has the ISO 3166-2 code {}", True),
    _link("airport_country", "airport", "country", "Country", "Airports", "lies in {}", "contains {}"),
    _link("serves", "airport", "city", "City", "Airports", "serves {}", "is served by {}"),
    _link(
        "airport_subdivision",
        "airport",
        "subdivision",
        "Subdivision",
        "Airports",
        "lies within {}",
        "has {} on its territory",
    ),
    _link(
        "airport_zone",
        "airport",
        "timezone",
        "Time zone",
        "Airports",
        "keeps the time of {}",
        "is the time zone of {}",
        broad=True,
    ),
    _number("elevation", "airport", "Elevation", "has an elevation {}", "feet", -1500, 16000),
    _number("airport_latitude", "airport", "Latitude", "has a latitude {}", "degrees", -90, 90),
    _number("airport_longitude", "airport", "Longitude", "has a longitude {}", "degrees", -180, 180),
    _text("iata", "airport", "IATA code", "has the IATA code {}", True),
    _text("icao", "airport", "ICAO code", "has the ICAO code {}", True),
    _text("language_code", "language", "ISO 639-3 code", "has the ISO 639-3 code {}", True),
    _text("language_kind", "language", "Kind", "is of the kind {}"),
    _text("currency_code", "currency", "ISO 4217 code", "has the ISO 4217 code {}", True),
    _text("symbol", "element", "Symbol", "has the symbol {}"),
    _number("atomic_number", "element", "Atomic number", "has an atomic number {}", high=130),
    _link("group", "element", "group", "Group", "Elements", "is in {}", "contains {}", broad=True),
    _link("series", "element", "series", "Series", "Elements", "is one of {}", "contains {}", broad=True),
    _number("period", "element", "Period", "is in a period {}", high=9),
    _link(
        "discovered_by",
        "element",
        "person",
        "Discovered by",
        "Discovered",
        "was discovered by {}",
        "discovered {}",
        functional=False,
    ),
    _year("element_year", "element", "Year of discovery", "was discovered {}"),
    _link(
        "discovered_in",
        "element",
        "country",
        "Place of discovery",
        "Elements discovered there",
        "was discovered in {}",
        "is where {} was discovered",
        functional=False,
    ),
    _link(
        "produced_in",
        "element",
        "country",
        "Largest producers",
        "Leading producer of",
        "has {} among its largest producers",
        "is among the largest producers of {}",
        functional=False,
    ),
    _link(
        "reserves_in",
        "element",
        "country",
        "Largest reserves",
        "Large reserves of",
        "has large reserves in {}",
        "has large reserves of {}",
        functional=False,
    ),
    _number("melting_point", "element", "Melting point", "has a melting point {}", "kelvin", high=6000),
    _number("boiling_point", "element", "Boiling point", "has a boiling point {}", "kelvin", high=7000),
    _number("density", "element", "Density", "has a density {}", "grams per cubic centimetre", high=50),
    _text("lattice", "element", "Crystal lattice", "has the crystal lattice {}"),
    _text("goldschmidt", "element", "Goldschmidt class", "is of the Goldschmidt class {}"),
    _link(
        "isotope_of", "isotope", "element", "Element", "Isotopes", "is an isotope of {}", "has {} among its isotopes"
    ),
    _number("mass_number", "isotope", "Mass number", "has a mass number {}", high=400),
    _year("isotope_year", "isotope", "Year of discovery", "was discovered {}"),
    _number("half_life", "isotope", "Half-life", "has a half-life {}", "seconds", high=1e40),
    _text("spin", "isotope", "Nuclear spin", "has the nuclear spin {}"),
    _link(
        "decays_to",
        "isotope",
        "isotope",
        "Decays to",
        "Product of the decay of",
        "decays to {}",
        "is a decay product of {}",
        functional=False,
    ),
    _link(
        "subject",
        "term",
        "subject",
        "Subject",
        "Terms",
        "belongs to {}",
        "is the subject of {}",
        functional=False,
        broad=True,
    ),
    _link(
        "refers_to",
        "term",
        "term",
        "Refers to",
        "Referred to by",
        "refers to {}",
        "is referred to by {}",
        functional=False,
    ),
    _year("term_year", "term", "First year in the text", "has an entry whose first year lies {}"),
    _year("term_updated", "term", "Entry updated", "has an entry last updated {}"),
    _link("section", "package", "section", "Section", "Packages", "is in {}", "contains {}", broad=True),
    _link("maintained_by", "package", "maintainer", "Maintainer", "Packages", "is maintained by {}", "maintains {}"),
    _link(
        "depends",
        "package",
        "package",
        "Depends",
        "Required by",
        "depends on {}",
        "is required by {}",
        functional=False,
    ),
    _link(
        "recommends",
        "package",
        "package",
        "Recommends",
        "Recommended by",
        "recommends {}",
        "is recommended by {}",
        functional=False,
    ),
    _link(
        "suggests",
        "package",
        "package",
        "Suggests",
        "Suggested by",
        "suggests {}",
        "is suggested by {}",
        functional=False,
    ),
    _link("built_from", "package", "source", "Source", "Packages", "is built from {}", "is the source of {}"),
    _link(
        "written_in",
        "package",
        "term",
        "Implemented in",
        "Debian packages in it",
        "is implemented in {}",
        "is what {} is implemented in",
        functional=False,
        broad=True,
    ),
    _number("installed_size", "package", "Installed size", "has an installed size {}", "kibibytes"),
    _text("homepage", "package", "Homepage", "has a homepage at {}"),
    _link("shipped_in", "manpage", "package", "Package", "Manual pages", "is shipped in {}", "ships {}"),
    _link(
        "man_refers",
        "manpage",
        "manpage",
        "See also",
        "Named in",
        "points to {}",
        "is pointed to by {}",
        functional=False,
    ),
    _text("man_section", "manpage", "Section", "is in section {} of the manual"),
    _link(
        "module_refers",
        "module",
        "module",
        "Names the modules",
        "Named by the modules",
        "names {} in its documentation",
        "is named in the documentation of {}",
        functional=False,
    ),
    _text("module_source", "module", "Source code", "has its source code in {}"),
    _text("module_since", "module", "New in Python", "is new in Python {}"),
)
RELATIONS: dict[str, Relation] = {relation.name: relation for relation in _ALL}
"""All relations by name."""


def relations_of(type: str) -> list[tuple[Relation, bool]]:
    """The relations of a type, and whether it is their object."""
    forward = [(relation, False) for relation in _ALL if relation.subject == type]
    return forward + [(r, True) for r in _ALL if r.kind == "link" and r.object == type and not r.symmetric]
