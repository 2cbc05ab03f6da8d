"""Elements, isotopes, discoverers and decays from mendeleev's database."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm5.errors import DataError
from glm5.tasks.search.records import Record, Ref, Source, plain_name
from glm5.tasks.search.sources.locate import of_module

SECONDS = {"ysec": 1e-24, "zsec": 1e-21, "asec": 1e-18, "psec": 1e-12, "nsec": 1e-9, "usec": 1e-6, "msec": 1e-3,
           "sec": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0, "year": 3.15576e7, "kyear": 3.15576e10,
           "Myear": 3.15576e13, "Gyear": 3.15576e16, "Tyear": 3.15576e19, "Pyear": 3.15576e22, "Eyear": 3.15576e25,
           "Zyear": 3.15576e28, "Yyear": 3.15576e31}  # fmt: skip
DECAYS = {"A": (-2, -4), "B-": (1, 0), "B+": (-1, 0), "EC": (-1, 0), "EC+B+": (-1, 0), "P": (-1, -1), "2P": (-2, -2),
          "N": (0, -1), "2N": (0, -2), "2B-": (2, 0), "2B+": (-2, 0), "B-N": (1, -1), "B+P": (-2, -1)}  # fmt: skip
"""Changes of atomic number and mass number of a decay."""
PLACES = {"england": "GB", "scotland": "GB", "usa": "US", "united states": "US", "russia": "RU", "ussr": "RU"}


def _read(paths: list[Path]) -> Iterator[Record]:
    try:
        with sqlite3.connect(f"file:{paths[0]}?mode=ro&immutable=1", uri=True) as db:
            db.row_factory = sqlite3.Row
            yield from _elements(db)
            yield from _isotopes(db)
    except sqlite3.Error as error:
        raise DataError(f"{paths[0]} is not the database of mendeleev: {error}.") from error


def _elements(db: sqlite3.Connection) -> Iterator[Record]:
    groups = {row["group_id"]: row["name"] or f"group {row['group_id']}" for row in db.execute("SELECT * FROM groups")}
    series = {row["id"]: row["name"] for row in db.execute("SELECT * FROM series")}
    points = {row["atomic_number"]: row for row in db.execute("SELECT * FROM phasetransitions ORDER BY id DESC")}
    for number, name in sorted(groups.items()):
        yield Record("group", (f"group:{number}",), name)
    for number, name in sorted(series.items()):
        yield Record("series", (f"series:{number}",), name)
    people: set[str] = set()
    for row in db.execute("SELECT * FROM elements ORDER BY atomic_number"):
        record = Record("element", (f"z:{row['atomic_number']}", f"name:{plain_name(row['name'])}"), row["name"])
        for relation, column in (
            ("symbol", "symbol"), ("atomic_number", "atomic_number"), ("period", "period"), ("density", "density"),
            ("element_year", "discovery_year"), ("lattice", "lattice_structure"), ("goldschmidt", "goldschmidt_class"),
        ):  # fmt: skip
            record.claim(relation, row[column])
        if row["group_id"] is not None:
            record.claim("group", Ref("group", f"group:{row['group_id']}"))
        if row["series_id"] is not None:
            record.claim("series", Ref("series", f"series:{row['series_id']}"))
        if (point := points.get(row["atomic_number"])) is not None:
            record.claim("melting_point", point["melting_point"])
            record.claim("boiling_point", point["boiling_point"])
        for person in _people(row["discoverers"]):
            record.claim("discovered_by", Ref("person", f"name:{plain_name(person)}"))
            if person not in people:
                people.add(person)
                yield Record("person", (f"name:{plain_name(person)}",), person)
        for place in re.split(r"[;,/&]| and ", row["discovery_location"] or ""):
            record.claim("discovered_in", _country(place))
        for relation, column in (("produced_in", "top_3_producers"), ("reserves_in", "top_3_reserve_holders")):
            for place in re.split(r"\d\)|;", row[column] or ""):
                record.claim(relation, _country(place))
        parts = [row["description"], f"Sources: {row['sources']}" if row["sources"] else "",
                 f"Uses: {row['uses']}" if row["uses"] else "",
                 f"Origin of the name: {row['name_origin']}" if row["name_origin"] else ""]  # fmt: skip
        record.text = "\n\n".join(part for part in parts if part)
        yield record


def _country(place: str) -> Ref | None:
    name = plain_name(place)
    return Ref("country", f"iso:{PLACES[name]}" if name in PLACES else f"name:{name}") if name else None


def _people(text: str | None) -> list[str]:
    if not text or "ancient" in text.lower() or "known" in text.lower():
        return []
    parts = re.split(r",|;|&| and |/", re.sub(r"\([^)]*\)", "", text))
    return [name for part in parts if len(name := part.strip(" .").removeprefix("Sir ")) > 5 and " " in name]


def _isotopes(db: sqlite3.Connection) -> Iterator[Record]:
    names = {row["atomic_number"]: row["name"] for row in db.execute("SELECT atomic_number, name FROM elements")}
    modes: dict[int, list[str]] = {}
    observed = "SELECT * FROM isotopedecaymodes WHERE is_allowed_not_observed IS NOT 1 ORDER BY id"
    for row in db.execute(observed):
        modes.setdefault(row["isotope_id"], []).append(row["mode"])
    rows: list[Any] = list(db.execute("SELECT * FROM isotopes ORDER BY id"))
    for row in rows:
        z, mass = row["atomic_number"], row["mass_number"]
        record = Record("isotope", (f"isotope:{z}-{mass}",), f"{names[z]}-{mass}")
        record.claim("isotope_of", Ref("element", f"z:{z}"))
        record.claim("mass_number", mass)
        record.claim("isotope_year", row["discovery_year"])
        unit = SECONDS.get(row["half_life_unit"] or "")
        record.claim("half_life", float(f"{row['half_life'] * unit:.6g}") if unit and row["half_life"] else None)
        record.claim("spin", f"{row['spin']}{row['parity'] or ''}" if row["spin"] else None)
        for mode in modes.get(row["id"], ()):
            if mode in DECAYS:
                dz, da = DECAYS[mode]
                record.claim("decays_to", Ref("isotope", f"isotope:{z + dz}-{mass + da}"))
        yield record


ELEMENTS = Source(
    "elements", "MIT (mendeleev)", "pip install mendeleev",
    lambda roots: of_module("mendeleev", ("elements.db",), roots), _read, pip="mendeleev",
)  # fmt: skip
