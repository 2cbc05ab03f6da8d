"""Languages, currencies, countries and their subdivisions from Debian's iso-codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from glm5.tasks.search.records import Record, Ref, Source, plain_name
from glm5.tasks.search.sources.locate import of_system

KINDS = {"L": "living language", "E": "extinct language", "A": "ancient language", "H": "historical language",
         "C": "constructed language"}  # fmt: skip
TABLES = {"3166-1": "iso_3166-1", "3166-2": "iso_3166-2", "4217": "iso_4217", "639-3": "iso_639-3"}


def _read(paths: list[Path]) -> Iterator[Record]:
    rows = {name: json.loads(path.read_bytes())[name] for name, path in zip(TABLES, paths, strict=True)}
    for row in rows["3166-1"]:
        name = row.get("common_name", row["name"])
        others = tuple(o for o in (row["name"], row.get("official_name", "")) if o and o != name)
        record = Record("country", (f"iso:{row['alpha_2']}", f"name:{plain_name(name)}"), name, others)
        record.claim("numeric_code", row["numeric"])
        yield record
    for row in rows["3166-2"]:
        iso = row["code"].partition("-")[0]
        keys = (f"iso3166-2:{row['code']}", f"name:{plain_name(row['name'])}|{iso}")
        record = Record("subdivision", keys, row["name"])
        record.claim("subdivision_country", Ref("country", f"iso:{iso}"))
        record.claim("subdivision_kind", row["type"].lower())
        record.claim("subdivision_code", row["code"])
        yield record
    for row in rows["4217"]:
        yield Record(
            "currency", (f"iso4217:{row['alpha_3']}",), row["name"], claims=[("currency_code", row["alpha_3"])]
        )
    for row in rows["639-3"]:
        if row["type"] not in KINDS:
            continue
        codes = [f"iso639:{row['alpha_3']}", *([f"iso639:{row['alpha_2']}"] if "alpha_2" in row else [])]
        record = Record(
            "language", tuple(codes), row["name"], (row["inverted_name"],) if "inverted_name" in row else ()
        )
        record.claim("language_code", row["alpha_3"])
        record.claim("language_kind", KINDS[row["type"]])
        yield record


ISO_CODES = Source(
    "iso-codes", "LGPL-2.1+ (iso-codes)", "apt install iso-codes",
    lambda roots: of_system([f"usr/share/iso-codes/json/{name}.json" for name in TABLES.values()], roots), _read,
    apt="iso-codes",
)  # fmt: skip
