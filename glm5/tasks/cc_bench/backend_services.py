"""The services of backend tasks: what they do, their unit tests, and the answers of the Python service."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SOURCES = Path(__file__).with_name("backend")
"""Folder with a correct service per language, and the program around it."""
Case = tuple[str, list[str]]
"""A unit test: its name and its commands."""

TEXTS = {
    "cache": """\
a cache with room for {CAPACITY} entries whose entries expire. Time is a number of ticks, 0 at first.
- `put KEY VALUE TTL`: stores the entry, which expires TTL ticks from now, and answers `ok`. A known key gets the new
  value and time. If another key finds the cache full, the entry that was used least recently is evicted, and the answer
  is `ok evicted KEY`. `put` and a `get` that finds something use an entry.
- `get KEY`: the value, or `missing`.
- `tick N`: N ticks pass; `expired COUNT` says how many entries that removed.
- `keys`: the keys from the least recently used on, with spaces between, or `empty`.
- anything else: `error`.""",
    "ledger": """\
a ledger of accounts in cents.
- `open NAME`: a new account with balance 0; `ok`, or `error exists`.
- `deposit NAME CENTS`: `ok BALANCE`.
- `transfer FROM TO CENTS`: FROM also pays a fee of {FEE} hundredths of a per cent of CENTS, rounded up to whole cents;
  `ok FEE`. FROM's balance may go down to {OVERDRAFT} cents below zero: `error funds` if it would go further.
- Both refuse, in this order: `error amount` for CENTS below 1, `error unknown` for an account that is not there,
  and a transfer `error same` if FROM is TO, before it looks at the funds.
- `balance NAME`: the balance, or `error unknown`.
- `undo`: takes back the newest deposit or transfer that is not yet taken back, with its fee, whatever the balances are
  then; `ok`, or `error nothing`. Openings are not undone.
- `total`: the sum of all balances, a space, and the sum of the fees kept.
- anything else: `error command`.""",
    "booking": """\
bookings of rooms on one day, in minutes since midnight; rooms are open from {OPEN} to {CLOSE} o'clock.
- `book ROOM START END`: `ok ID`; ids count from 1 on and are never given again. `error time` unless the booking lies
  within the opening hours and START is before END. Between two bookings of a room lie at least {GAP} minutes: otherwise
  `error taken ID` with the smallest id that is too close.
- `cancel ID`: `ok`, or `error unknown`.
- `move ID START END`: new times for a booking, in its room; `ok`, `error unknown`, or refused as by `book`, but it is
  not in its own way.
- `list ROOM`: its bookings as `ID:START-END`, by START, with spaces between, or `none`.
- `free ROOM MINUTES`: the earliest START at which a booking of this length is possible, or `none`.
- anything else: `error command`.""",
}


def _cache(rng: random.Random, capacity: int) -> list[Case]:
    keys = rng.sample("apple brick cloud drum eagle flute grape honey iron".split(), capacity + 2)
    puts = [f"put {key} {rng.randint(10, 99)} {rng.randint(50, 90)}" for key in keys[:capacity]]
    more, most = f"put {keys[capacity]} new 60", f"put {keys[capacity + 1]} newer 60"
    return [
        ("stores", [*puts, *(f"get {key}" for key in keys)]),
        ("empty", ["keys", "get nothing", "tick 3", "keys"]),
        ("evicts the oldest", [*puts, more, f"get {keys[0]}", most, "keys"]),
        ("a get counts as use", [*puts, f"get {keys[0]}", more, f"get {keys[0]}", "keys"]),
        ("a put counts as use", [*puts, f"put {keys[0]} again 70", more, f"get {keys[0]}", "keys"]),
        (
            "expires",
            [f"put {keys[0]} a 2", f"put {keys[1]} b 3", "tick 1", f"get {keys[0]}", "tick 1", "keys", "tick 5"],
        ),
        (
            "a new time to live",
            [f"put {keys[0]} a 2", "tick 1", f"put {keys[0]} b 4", "tick 2", f"get {keys[0]}", "tick 2"],
        ),
        ("expired entries make room", [f"put {keys[-1]} x 1", *puts[1:], "tick 1", more, "keys"]),
        ("refuses", ["", "get", f"put {keys[0]} 1", "keys now", "drop all", "tick"]),
    ]


def _ledger(rng: random.Random, fee: int, overdraft: int) -> list[Case]:
    one, two, three = rng.sample("ada ben carla dmitri elena farid".split(), 3)
    start, part = rng.randint(9000, 20000), rng.randint(1001, 4999)
    opened = [f"open {one}", f"open {two}", f"deposit {one} {start}"]
    edge = next(a for a in range(start + overdraft, 0, -1) if a + (a * fee + 9999) // 10_000 <= start + overdraft)
    return [
        ("opens", [f"open {one}", f"open {one}", f"balance {one}", f"balance {two}"]),
        ("deposits", [*opened, f"deposit {one} 5", f"deposit {one} 0", f"deposit {three} 7", f"deposit {three} -1"]),
        (
            "transfers with a fee",
            [*opened, f"transfer {one} {two} {part}", f"balance {one}", f"balance {two}", "total"],
        ),
        ("rounds fees up", [*opened, f"transfer {one} {two} 1", f"transfer {one} {two} 10000", "total"]),
        (
            "allows the overdraft and no more",
            [
                *opened,
                f"transfer {one} {two} {edge + 1}",
                f"transfer {one} {two} {edge}",
                f"balance {one}",
                f"transfer {one} {two} {overdraft + 1}",
            ],
        ),
        (
            "refuses in order",
            [
                *opened,
                f"transfer {one} {one} 0",
                f"transfer {one} {three} -3",
                f"transfer {three} {three} 5",
                f"transfer {one} {one} 5",
                f"transfer {one} {one} 99999999",
            ],
        ),
        (
            "undoes",
            [
                *opened,
                f"transfer {one} {two} {part}",
                f"transfer {one} {three} 1",
                "undo",
                f"balance {one}",
                f"balance {two}",
                "total",
                "undo",
                "undo",
                f"balance {one}",
            ],
        ),
        (
            "undoes below the limit",
            [
                *opened,
                f"transfer {one} {two} {part}",
                f"transfer {two} {one} {part // 2}",
                "undo",
                "undo",
                "undo",
                "total",
            ],
        ),
        ("refuses other commands", ["", "close it", f"open {one} {two}", "undo all", "total"]),
    ]


def _booking(rng: random.Random, opening: int, closing: int, gap: int) -> list[Case]:
    red, blue = rng.sample("red blue green amber".split(), 2)
    first, last = opening * 60, closing * 60
    mid = first + 60 * rng.randint(2, 3)
    base = [f"book {red} {mid} {mid + 60}"]
    return [
        ("books", [*base, f"book {blue} {mid} {mid + 60}", f"list {red}", f"list {blue}", "list none"]),
        (
            "keeps the hours",
            [
                f"book {red} {first - 1} {first + 30}",
                f"book {red} {first} {last}",
                f"book {blue} {last} {last}",
                f"book {blue} {last - 30} {last + 1}",
                f"book {blue} {mid + 5} {mid}",
            ],
        ),
        (
            "keeps the gap",
            [
                *base,
                f"book {red} {mid + 60 + gap - 1} {mid + 90 + gap}",
                f"book {red} {mid + 60 + gap} {mid + 90 + gap}",
                f"book {red} {mid - 30} {mid - gap + 1}",
                f"book {red} {mid - 30 - gap} {mid - gap}",
                f"list {red}",
            ],
        ),
        (
            "names the smallest id",
            [
                f"book {red} {mid + 120} {mid + 150}",
                *base,
                f"book {red} {mid + 30} {mid + 140}",
                f"book {red} {mid + 30} {mid + 31}",
            ],
        ),
        ("cancels", [*base, "cancel 2", "cancel 1", "cancel 1", *base, f"list {red}"]),
        (
            "moves",
            [
                *base,
                f"move 1 {mid + 5} {mid + 65}",
                f"list {red}",
                "move 7 1 2",
                f"move 1 {mid + 9} {mid + 9}",
                f"book {red} {mid + 65 + gap} {mid + 125 + gap}",
                f"move 1 {mid + 70} {mid + 90}",
                f"list {red}",
            ],
        ),
        (
            "finds the first free time",
            [
                f"free {red} 30",
                f"book {red} {first} {first + 40}",
                f"free {red} 30",
                *base,
                f"free {red} {mid - first - 40 - 2 * gap}",
                f"free {red} {mid - first - 39 - 2 * gap}",
            ],
        ),
        (
            "finds no free time",
            [
                f"free {red} {last - first}",
                f"free {red} {last - first + 1}",
                f"book {red} {first + 30} {last - 30}",
                f"free {red} 31",
            ],
        ),
        ("refuses other commands", ["", "book it", "list", f"free {red}", "open up 1 2"]),
    ]


SERVICES: dict[str, tuple[Callable[..., list[Case]], Callable[[random.Random], dict[str, int]]]] = {
    "cache": (_cache, lambda rng: {"CAPACITY": rng.randint(2, 5)}),
    "ledger": (_ledger, lambda rng: {"FEE": rng.choice((25, 75, 150, 230)), "OVERDRAFT": rng.choice((0, 500, 2000))}),
    "booking": (
        _booking,
        lambda rng: {"OPEN": rng.randint(6, 9), "CLOSE": rng.randint(17, 21), "GAP": rng.choice((5, 10, 15))},
    ),
}


def source(service: str, name: str, values: dict[str, int]) -> str:
    """A source file with its constants set."""
    path = SOURCES / service / name
    text = (path if path.is_file() else path.with_name(f"{name}.txt")).read_text(
        encoding="utf-8"
    )  # Python's is no module
    for constant, value in values.items():
        text = re.sub(rf"(\b{constant}(?:: \w+)? = )\d+", rf"\g<1>{value}", text)
    return text


ANSWERS = """

import json, sys
told = []
for commands in json.load(sys.stdin):
    service = Service()
    told.append([service.answer(command.split()) for command in commands])
print(json.dumps(told))
"""


def cases_of(service: str, rng: random.Random, values: dict[str, int]) -> list[tuple[str, list[str], list[str]]]:
    """The unit tests with the answers of the Python service."""
    cases = SERVICES[service][0](rng, *values.values())
    text = source(service, "service.py", values) + ANSWERS
    order = json.dumps([commands for _, commands in cases])
    done = subprocess.run([sys.executable, "-I", "-c", text], input=order, capture_output=True, text=True, check=True)
    return [(name, commands, told) for (name, commands), told in zip(cases, json.loads(done.stdout), strict=True)]
