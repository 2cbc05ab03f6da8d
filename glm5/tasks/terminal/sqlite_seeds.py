"""Seeds about SQLite databases."""

from __future__ import annotations

import random
from typing import Any

from glm5.tasks.terminal.harness import Tests
from glm5.tasks.terminal.seed import Draft, python, seed
from glm5.tasks.terminal.words import NOUNS, PLACES, WORDS, person


def _sql(value: object) -> str:
    return (
        "NULL"
        if value is None
        else str(value)
        if isinstance(value, int | float)
        else "'" + str(value).replace("'", "''") + "'"
    )


def _database(path: str, statements: list[str]) -> str:
    """A setup that makes a database."""
    script = "\n".join(statements)
    return f"sqlite3 {path} <<'END'\nBEGIN;\n{script}\nCOMMIT;\nEND\n"


@seed("sqlite")
def sales_report(rng: random.Random) -> Draft:
    """A report over three tables of a database: joins, a left join, dates."""
    year = rng.randint(2021, 2025)
    customers = [(number, person(rng), rng.choice(PLACES)) for number in range(1, rng.randint(14, 20))]
    statements = ["CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);",
                  "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER, day TEXT, state TEXT);",
                  "CREATE TABLE items (order_id INTEGER, product TEXT, quantity INTEGER, cents INTEGER);"]  # fmt: skip
    statements += [f"INSERT INTO customers VALUES ({n}, {_sql(name)}, {_sql(city)});" for n, name, city in customers]
    sums = {city: 0 for _, _, city in customers}
    orders = {city: 0 for _, _, city in customers}
    for number in range(1, 120):
        customer = rng.choice(customers[: len(customers) - 3])
        state, day = (
            rng.choice(("paid", "paid", "open", "returned")),
            f"{rng.randint(year - 1, year + 1)}-{rng.randint(1, 12):02}-11",
        )
        statements.append(f"INSERT INTO orders VALUES ({number}, {customer[0]}, '{day}', '{state}');")
        counts = state == "paid" and day.startswith(str(year))
        orders[customer[2]] += counts
        for _ in range(rng.randint(0, 3)):
            quantity, cents = rng.randint(1, 5), rng.randint(99, 9999)
            statements.append(f"INSERT INTO items VALUES ({number}, '{rng.choice(NOUNS)}', {quantity}, {cents});")
            sums[customer[2]] += quantity * cents * counts
    ranked = sorted(sums, key=lambda city: (-sums[city], city))
    return Draft(
        instruction=f"""
        /app/shop.db is an SQLite database with the tables customers, orders and items (look at its schema; prices are
        cents for one piece). Write /app/report.csv with the header `city,orders,total` and one line per city that has
        customers, also those without orders: the number of its paid orders in {year}, and their value in EUR with two
        decimals. An order without items counts as an order. Highest total first, equal ones by city.
        """,
        setup=_database("/app/shop.db", statements),
        solution=f"""
        cd /app
        sqlite3 -csv -header shop.db "
            SELECT c.city AS city, count(DISTINCT o.id) AS orders,
                   printf('%.2f', coalesce(sum(i.quantity * i.cents), 0) / 100.0) AS total
            FROM customers c
            LEFT JOIN orders o ON o.customer = c.id AND o.state = 'paid' AND o.day LIKE '{year}-%'
            LEFT JOIN items i ON i.order_id = o.id
            GROUP BY c.city ORDER BY coalesce(sum(i.quantity * i.cents), 0) DESC, c.city" > report.csv
        """,
        data={
            "/app/report.csv": [["city", "orders", "total"]]
            + [[city, str(orders[city]), f"{sums[city] // 100}.{sums[city] % 100:02}"] for city in ranked]
        },
        packages=("sqlite3",),
    )


def _check_migration(t: Tests) -> None:
    import sqlite3

    t.read("/app/people.db")
    base = sqlite3.connect("file:/app/people.db?mode=ro", uri=True)
    try:
        rows = base.execute("SELECT id, first_name, last_name, email FROM people ORDER BY id").fetchall()
        t.equal([list(row) for row in rows], t.data["people"], "the table people")
        rows = base.execute("SELECT person, number FROM phones ORDER BY person, number").fetchall()
        t.equal([list(row) for row in rows], t.data["phones"], "the table phones")
        columns = {row[1]: row for row in base.execute("PRAGMA table_info(people)")}
        t.equal(set(columns), {"id", "first_name", "last_name", "email"}, "the columns of people")
        t.true(
            columns["id"][5] and columns["first_name"][3] and columns["last_name"][3], "keys or NOT NULL are missing"
        )
        unique = [row for row in base.execute("PRAGMA index_list(people)") if row[2]]
        names = [[c[2] for c in base.execute(f"PRAGMA index_info('{row[1]}')")] for row in unique]
        t.true(["email"] in names, "email is not unique")
        keys = base.execute("PRAGMA foreign_key_list(phones)").fetchall()
        t.true(any(key[2] == "people" and key[3] == "person" for key in keys), "phones has no foreign key")
        t.equal(base.execute("PRAGMA user_version").fetchone()[0], 2, "user_version")
    except sqlite3.Error as error:
        t.fail(f"/app/people.db: {error}")
    finally:
        base.close()


@seed("sqlite", level=2)
def schema_migration(rng: random.Random) -> Draft:
    """A database is moved to a normalised schema without losing a row."""
    people, phones, statements = (
        list[list[Any]](),
        list[list[Any]](),
        ["CREATE TABLE contacts (id INTEGER, name TEXT, mail TEXT, phones TEXT);"],
    )
    for number in range(1, rng.randint(24, 36)):
        name = person(rng)
        if rng.random() < 0.3:
            first, last = name.split()
            name = f"{first} {rng.choice(WORDS).capitalize()} {last}"
        first, _, last = name.rpartition(" ")
        mail = f"{last.lower()}{number}@example.org" if rng.random() < 0.8 else None
        numbers = sorted({f"+49 {rng.randint(30, 99)} {rng.randint(10000, 99999)}" for _ in range(rng.randint(0, 3))})
        people.append([number, first, last, mail])
        phones += [[number, one.replace(" ", "")] for one in numbers]
        shown = (mail or "").upper() if number % 4 == 0 else mail or ""
        values = (number, "  " * (number % 5 == 0) + name, shown, "; ".join(numbers))
        statements.append(f"INSERT INTO contacts VALUES ({', '.join(map(_sql, values))});")
    return Draft(
        instruction="""
        Migrate the SQLite database /app/people.db. It has one table, contacts (id, name, mail, phones). Afterwards it
        has

        - people (id INTEGER PRIMARY KEY, first_name TEXT NOT NULL, last_name TEXT NOT NULL, email TEXT UNIQUE): the
          last name is the last word of the name, the first name all before it, without white space around them.
          Addresses are lower case, and NULL if the contact has none;
        - phones (person INTEGER, a foreign key to people(id), number TEXT): one row per number of the list, which is
          separated by semicolons, without any spaces in the numbers;
        - no table contacts, and PRAGMA user_version is 2.
        """,
        setup=_database("/app/people.db", statements),
        solution=python("""
        import sqlite3
        base = sqlite3.connect("people.db")
        base.executescript(
            "CREATE TABLE people (id INTEGER PRIMARY KEY, first_name TEXT NOT NULL, last_name TEXT NOT NULL,"
            " email TEXT UNIQUE); CREATE TABLE phones (person INTEGER REFERENCES people(id), number TEXT);")
        for number, name, mail, phones in base.execute("SELECT id, name, mail, phones FROM contacts").fetchall():
            first, _, last = name.strip().rpartition(" ")
            base.execute("INSERT INTO people VALUES (?, ?, ?, ?)", (number, first, last, mail.lower() or None))
            for one in filter(None, (p.replace(" ", "") for p in phones.split(";"))):
                base.execute("INSERT INTO phones VALUES (?, ?)", (number, one))
        base.execute("DROP TABLE contacts")
        base.execute("PRAGMA user_version = 2")
        base.commit()
        """),
        check=_check_migration,
        data={"people": people, "phones": sorted(phones)},
        packages=("sqlite3",),
    )


def _check_duplicates(t: Tests) -> None:
    import sqlite3

    t.read("/app/events.db")
    base = sqlite3.connect("file:/app/events.db?mode=ro", uri=True)
    try:
        rows = [list(row) for row in base.execute("SELECT device, kind, at, value FROM events ORDER BY 1, 2, 3, 4")]
        t.equal(rows, t.data, "the table events")
        indexes = [row[1] for row in base.execute("PRAGMA index_list(events)") if row[2]]
        columns = [{c[2] for c in base.execute(f"PRAGMA index_info('{name}')")} for name in indexes]
        t.true({"device", "kind", "at"} in columns, "there is no unique index on device, kind and at")
    except sqlite3.Error as error:
        t.fail(f"/app/events.db: {error}")
    finally:
        base.close()


@seed("sqlite")
def duplicate_events(rng: random.Random) -> Draft:
    """Duplicates go, the latest of each stays, and an index keeps new ones out."""
    latest, statements = (
        dict[tuple[str, str, str], int](),
        ["CREATE TABLE events (device TEXT, kind TEXT, at TEXT, value INTEGER);"],
    )
    devices, kinds = rng.sample(NOUNS, 5), rng.sample(WORDS, 3)
    for _ in range(rng.randint(150, 220)):
        key = (rng.choice(devices), rng.choice(kinds), f"2026-03-{rng.randint(1, 9):02}T0{rng.randint(0, 3)}:00")
        latest[key] = rng.randint(1, 10_000)
        statements.append(f"INSERT INTO events VALUES ({', '.join(map(_sql, key))}, {latest[key]});")
    return Draft(
        instruction="""
        The table events of the SQLite database /app/events.db has several rows for some combinations of device, kind
        and at. Of each combination keep only the row that was inserted last, and make the database refuse such
        duplicates from now on with a unique index over these three columns.
        """,
        setup=_database("/app/events.db", statements),
        solution="""
        sqlite3 /app/events.db "
            DELETE FROM events WHERE rowid NOT IN (SELECT max(rowid) FROM events GROUP BY device, kind, at);
            CREATE UNIQUE INDEX one_event ON events (device, kind, at);"
        """,
        check=_check_duplicates,
        data=sorted([*key, value] for key, value in latest.items()),
        packages=("sqlite3",),
    )
