"""Seeds about data: tables, cleaning, binary records."""

from __future__ import annotations

import csv
import io
import json
import random
import struct
from typing import Any

from glm5.tasks.terminal.seed import Draft, python, seed
from glm5.tasks.terminal.words import NOUNS, PLACES, WORDS, sentence


def _csv(rows: list[list[Any]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()


@seed("data cleaning", level=2)
def mixed_dates(rng: random.Random) -> Draft:
    """Dates in many notations, amounts in two, duplicates and impossible rows."""
    rows, wanted, months = (
        list[list[Any]](),
        dict[str, list[str]](),
        "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(),
    )
    for number in range(rng.randint(60, 90)):
        name = f"{rng.choice(NOUNS)}-{rng.randint(1, 30):02}"
        year, month, day = rng.randint(2019, 2026), rng.randint(1, 12), rng.randint(1, 31)
        valid = day <= [31, 29 if year % 4 == 0 else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][month - 1]
        named = months[month - 1]
        notations = (f"{year}-{month:02}-{day:02}", f"{day:02}.{month:02}.{year}", f"{day} {named} {year}")
        date = rng.choice((*notations, f"{year}/{month}/{day}", f"{named} {day}, {year}"))
        cents = rng.randint(1, 500_000)
        plain = f"{cents // 100}.{cents % 100:02}"
        amount = rng.choice((plain, plain.replace(".", ","), f"{cents // 100:,}.{cents % 100:02}", f"EUR {plain}"))
        if rng.random() < 0.08:
            amount, valid = rng.choice(("n/a", "", "-")), False
        rows.append([rng.choice((name, name.upper(), f" {name} ")), date, amount])
        if valid:
            wanted[name] = [name, f"{year}-{month:02}-{day:02}", plain]  # the last valid row of a name counts
        del number
    return Draft(
        instruction="""
        Clean the table /app/raw.csv (columns name, date, amount) into /app/clean.csv with the same header:

        - names are lower case without spaces around them;
        - dates are written YYYY-MM-DD; the input has 2024-03-09, 09.03.2024 (day first), 9 Mar 2024, 2024/3/9 and
          Mar 9, 2024. Rows with dates that do not exist are dropped;
        - amounts are plain numbers with a point and two decimals. The input also has a decimal comma (1234,50),
          thousands separators (1,234.50) and a currency in front (EUR 1234.50). Rows without an amount are dropped;
        - of several valid rows of a name, only the last one in the file stays; the result is sorted by name.
        """,
        files={"/app/raw.csv": _csv([["name", "date", "amount"], *rows])},
        solution=python("""
        import csv, datetime, re
        kept = {}
        for row in csv.DictReader(open("raw.csv", newline="")):
            name, text = row["name"].strip().lower(), row["amount"].replace("EUR", "").strip()
            if re.fullmatch(r"\\d+,\\d\\d", text):
                text = text.replace(",", ".")
            text = text.replace(",", "")
            when = None
            for form in ("%Y-%m-%d", "%d.%m.%Y", "%d %b %Y", "%Y/%m/%d", "%b %d, %Y"):
                try:
                    when = datetime.datetime.strptime(row["date"], form).date()
                except ValueError:
                    pass
            if when and re.fullmatch(r"\\d+\\.\\d\\d", text):
                kept[name] = [name, when.isoformat(), text]
        with open("clean.csv", "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\\n")
            writer.writerow(["name", "date", "amount"])
            writer.writerows(kept[name] for name in sorted(kept))
        """),
        data={"/app/clean.csv": [["name", "date", "amount"], *(wanted[name] for name in sorted(wanted))]},
    )


@seed("data cleaning")
def flatten_json(rng: random.Random) -> Draft:
    """Nested JSON lines become a table with the union of all columns."""
    records, flat, columns = list[dict[str, Any]](), list[dict[str, str]](), set[str]()
    keys = rng.sample(WORDS, 6)
    for number in range(rng.randint(20, 40)):
        record: dict[str, Any] = {"id": number}
        for key in rng.sample(keys[:3], rng.randint(1, 3)):
            record[key] = rng.choice((rng.randint(1, 99), sentence(rng, 4), True, None))
        for key in rng.sample(keys[3:], rng.randint(0, 2)):
            record[key] = {inner: rng.randint(1, 999) for inner in rng.sample(NOUNS[:4], rng.randint(1, 3))}
        if rng.random() < 0.4:
            record["tags"] = rng.sample(WORDS, rng.randint(0, 3))
        row = dict[str, str]()
        for key, value in record.items():
            if isinstance(value, dict):
                row.update({f"{key}.{inner}": str(one) for inner, one in value.items()})
            elif isinstance(value, list):
                row[key] = ";".join(value)
            else:
                row[key] = "" if value is None else "true" if value is True else str(value)
        columns |= row.keys()
        records.append(record)
        flat.append(row)
    header = ["id", *sorted(columns - {"id"})]
    return Draft(
        instruction="""
        Turn /app/records.jsonl (one JSON object a line) into the table /app/flat.csv. Columns are `id` first, then
        all other keys that occur anywhere, in the order of their bytes. Keys of nested objects are joined with a dot
        (`a.b`); a list becomes its values joined with semicolons. A missing key and null are empty fields, true is
        `true`. The rows keep their order.
        """,
        files={"/app/records.jsonl": "".join(json.dumps(record) + "\n" for record in records)},
        solution=python("""
        import csv, json
        rows = []
        for line in open("records.jsonl"):
            row = {}
            for key, value in json.loads(line).items():
                if isinstance(value, dict):
                    row.update({f"{key}.{k}": v for k, v in value.items()})
                elif isinstance(value, list):
                    row[key] = ";".join(value)
                else:
                    row[key] = "" if value is None else "true" if value is True else value
            rows.append(row)
        header = ["id", *sorted({key for row in rows for key in row} - {"id"})]
        with open("flat.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, header, restval="", lineterminator="\\n")
            writer.writeheader()
            writer.writerows(rows)
        """),
        data={"/app/flat.csv": [header, *([row.get(column, "") for column in header] for row in flat)]},
    )


@seed("data cleaning", level=2)
def untidy_join(rng: random.Random) -> Draft:
    """Two tables whose keys are written differently are joined and summed."""
    sites = {f"S{number:03}": rng.choice(PLACES) for number in range(1, rng.randint(12, 20))}
    table = [["code", "place"], *([f"{code[0].lower()}-{int(code[1:])}", place] for code, place in sites.items())]
    readings, totals = [["site", "unit", "value"]], dict[str, int]()
    for _ in range(rng.randint(120, 180)):
        code = rng.choice([*sites, "S900"])
        grams, unit = rng.randint(1, 9000), rng.choice(("g", "kg", "t"))
        if unit == "kg":
            grams *= 1000
            value = str(grams // 1000)
        elif unit == "t":
            grams *= 1_000_000
            value = str(grams // 1_000_000)
        else:
            value = str(grams)
        readings.append([rng.choice((code, code.lower(), f"{code[0]} {code[1:]}", f" {code}")), unit, value])
        place = sites.get(code, "unknown")
        totals[place] = totals.get(place, 0) + grams
    return Draft(
        instruction="""
        /app/readings.csv has weights measured at sites, /app/sites.csv the places of the sites. The codes of sites are
        written in different ways: `S007`, `s007`, `S 007`, `s-7` mean the same site. Units are g, kg and t (1000 kg).

        Write /app/totals.json: an object from place to the total weight in grams, an integer. Readings of sites that
        are not in sites.csv are summed under "unknown". Leave out places without readings.
        """,
        files={"/app/readings.csv": _csv(readings), "/app/sites.csv": _csv(table)},
        solution=python("""
        import csv, json, re
        def code(text):
            return int(re.sub(r"\\D", "", text))
        places = {code(row["code"]): row["place"] for row in csv.DictReader(open("sites.csv"))}
        totals = {}
        for row in csv.DictReader(open("readings.csv")):
            place = places.get(code(row["site"]), "unknown")
            grams = int(row["value"]) * {"g": 1, "kg": 1000, "t": 1000000}[row["unit"]]
            totals[place] = totals.get(place, 0) + grams
        json.dump(totals, open("totals.json", "w"))
        """),
        data={"/app/totals.json": totals},
    )


@seed("data cleaning", level=3)
def binary_records(rng: random.Random) -> Draft:
    """A binary log with damaged records is decoded by its description."""
    stream, lines = bytearray(b"SLOG\x01"), list[str]()
    for number in range(rng.randint(60, 100)):
        name = rng.choice(NOUNS).encode()
        value, sensor = rng.randint(-30_000, 30_000), rng.randint(0, 255)
        body = struct.pack(">IBh", 1_700_000_000 + number * 60, sensor, value) + bytes([len(name)]) + name
        check = sum(body) % 256
        damaged = rng.random() < 0.15
        if damaged:
            check = (check + rng.randint(1, 255)) % 256
        else:
            lines.append(f"{1_700_000_000 + number * 60} {sensor} {value / 100:.2f} {name.decode()}")
        stream += struct.pack(">H", len(body)) + body + bytes([check])
    return Draft(
        instruction="""
        /app/sensor.log is a binary log: the four bytes SLOG, a version byte 1, then records. A record is

        - a length L (2 bytes), then a body of L bytes, then one byte: the sum of the body's bytes modulo 256;
        - the body: time in seconds (4 bytes, unsigned), sensor (1 byte), value in hundredths (2 bytes, signed),
          length of the name (1 byte), name (ASCII).

        Numbers are big-endian. Skip records with a wrong sum. Write the others to /app/readings.txt in their order, one
        line each: `TIME SENSOR VALUE NAME`, the value with two decimals.
        """,
        files={"/app/sensor.log": bytes(stream)},
        solution=python("""
        import struct
        data, at = open("sensor.log", "rb").read(), 5
        with open("readings.txt", "w") as out:
            while at < len(data):
                (length,) = struct.unpack_from(">H", data, at)
                body, check = data[at + 2 : at + 2 + length], data[at + 2 + length]
                at += length + 3
                if sum(body) % 256 == check:
                    when, sensor, value = struct.unpack_from(">IBh", body)
                    print(when, sensor, f"{value / 100:.2f}", body[8 : 8 + body[7]].decode(), file=out)
        """),
        data={"/app/readings.txt": lines},
    )
