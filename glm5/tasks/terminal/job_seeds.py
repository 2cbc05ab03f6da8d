"""Seeds about jobs that cron would run."""

from __future__ import annotations

import random
from typing import Any

from glm5.tasks.terminal.harness import Tests
from glm5.tasks.terminal.seed import Draft, python, seed
from glm5.tasks.terminal.words import NOUNS


def _check_retention(t: Tests) -> None:
    t.equal(sorted(t.tree("/app/backups")), t.data, "/app/backups")


@seed("cron jobs", level=2)
def backup_retention(rng: random.Random) -> Draft:
    """Old backups are deleted by a rule of days, weeks and months."""
    import datetime

    today = datetime.date(2026, rng.randint(3, 11), rng.randint(1, 28))
    days, weeks, months = rng.randint(4, 9), rng.randint(3, 5), rng.randint(3, 6)
    dates = sorted({today - datetime.timedelta(days=rng.randint(0, 300)) for _ in range(90)} | {today})
    keep = set(sorted(dates)[-days:])
    for key, count in ((lambda d: d.isocalendar()[:2], weeks), (lambda d: (d.year, d.month), months)):
        newest = dict[Any, datetime.date]()
        for date in dates:
            newest[key(date)] = date
        keep |= set(sorted(newest.values())[-count:])
    return Draft(
        instruction=f"""
        /app/backups holds backups called backup-YYYY-MM-DD.tar.gz. Delete all but those that one of these rules keeps:

        - the {days} newest backups;
        - of each of the {weeks} newest ISO weeks (Monday to Sunday) that have a backup: its newest one;
        - of each of the {months} newest calendar months that have a backup: its newest one.

        Files with other names stay.
        """,
        files={f"/app/backups/backup-{date}.tar.gz": f"{date}\n" for date in dates}
        | {"/app/backups/README": "backups\n", "/app/backups/backup-latest.tar.gz": "no date\n"},
        solution=python(
            f"""
        import datetime, os, re
        found = {{}}
        for name in os.listdir("."):
            if re.fullmatch(r"backup-\\d{{4}}-\\d\\d-\\d\\d\\.tar\\.gz", name):
                found[datetime.date.fromisoformat(name[7:17])] = name
        dates = sorted(found)
        keep = set(dates[-{days}:])
        for key, count in ((lambda d: d.isocalendar()[:2], {weeks}), (lambda d: (d.year, d.month), {months})):
            keep |= set(sorted({{key(d): d for d in dates}}.values())[-count:])
        for date in dates:
            if date not in keep:
                os.remove(found[date])
        """,
            "/app/backups",
        ),
        check=_check_retention,
        data=sorted([f"backup-{date}.tar.gz" for date in keep] + ["README", "backup-latest.tar.gz"]),
    )


def _check_rotation(t: Tests) -> None:
    import gzip
    import os

    keep, word, mark = t.data["keep"], t.data["word"], t.data["mark"]
    os.makedirs("/tmp/logs dir")
    expected = list[str]()
    for number in range(keep + 3):
        with open(f"/tmp/logs dir/{word}.log", "w") as file:
            file.write(f"run {number} {word}\n")
        with open("/tmp/logs dir/other.log", "w") as file:
            file.write("other\n")
        done = t.run(["/app/rotate.sh", f"/tmp/logs dir/{word}.log"], cwd="/tmp")
        t.equal(done.code, 0, "the exit code of rotate.sh")
        expected = [f"run {number} {word}\n", *expected][:keep]
    found = t.tree("/tmp/logs dir")
    wanted = {f"{word}.log", "other.log", *(f"{word}.log{mark}{n}.gz" for n in range(1, keep + 1))}
    t.equal(set(found), wanted, "the files after rotations")
    t.equal(t.read(f"/tmp/logs dir/{word}.log"), b"", "the log after a rotation")
    for number, text in enumerate(expected, start=1):
        t.equal(
            gzip.decompress(t.read(f"/tmp/logs dir/{word}.log{mark}{number}.gz")).decode(),
            text,
            f"rotated log {number}",
        )
    before = t.tree("/tmp/logs dir")
    t.run(["/app/rotate.sh", f"/tmp/logs dir/{word}.log"], cwd="/tmp")
    t.equal(t.tree("/tmp/logs dir"), before, "the files after the rotation of an empty log")
    t.true(t.run(["/app/rotate.sh", "/tmp/logs dir/none.log"], cwd="/tmp").code != 0, "a missing log is no error")


@seed("cron jobs", level=2)
def log_rotation(rng: random.Random) -> Draft:
    """A script that rotates a log, as a nightly job would call it."""
    keep, word, mark = rng.randint(3, 12), rng.choice(NOUNS), rng.choice(".-_~")
    return Draft(
        instruction=f"""
        Write the executable script /app/rotate.sh. A nightly job calls it with the path of a log file. It

        - compresses the log's content with gzip into LOG{mark}1.gz beside it, after LOG{mark}1.gz has become
          LOG{mark}2.gz and so on;
        - keeps LOG{mark}1.gz to LOG{mark}{keep}.gz only;
        - leaves the log itself empty but in place;
        - does nothing if the log is empty, and ends with an exit code other than 0 if there is no such file;
        - touches no other files, works from any folder, and with spaces in the path.
        """,
        solution=f"""
        cat > /app/rotate.sh <<'END'
        #!/bin/bash
        set -eu
        log=$1
        [ -f "$log" ] || exit 1
        [ -s "$log" ] || exit 0
        rm -f "$log{mark}{keep}.gz"
        for ((i = {keep} - 1; i >= 1; i--)); do
            if [ -e "$log{mark}$i.gz" ]; then mv "$log{mark}$i.gz" "$log{mark}$((i + 1)).gz"; fi
        done
        gzip -c "$log" > "$log{mark}1.gz"
        : > "$log"
        END
        chmod +x /app/rotate.sh
        """,
        check=_check_rotation,
        data={"keep": keep, "word": word, "mark": mark},
        packages=("gzip",),
    )


def _check_schedule(t: Tests) -> None:
    for line, now, wanted in t.data:
        done = t.run(["/app/next-run", line, now], cwd="/tmp")
        t.equal((done.code, done.text.strip()), (0, wanted), f"the next run of {line!r} after {now}")


@seed("cron jobs", level=3)
def next_run(rng: random.Random) -> Draft:
    """A program that says when a crontab line runs next."""
    import datetime

    def field(low: int, high: int) -> tuple[str, set[int]]:
        kind = rng.randint(0, 4)
        if kind == 0:
            return "*", set(range(low, high + 1))
        if kind == 1:
            step = rng.randint(2, max(2, (high - low) // 2))
            return f"*/{step}", set(range(low, high + 1, step))
        if kind == 2:
            first = rng.randint(low, high - 1)
            last = rng.randint(first, high)
            return f"{first}-{last}", set(range(first, last + 1))
        chosen = sorted(rng.sample(range(low, high + 1), rng.randint(1, 3)))
        return ",".join(map(str, chosen)), set(chosen)

    cases = list[list[str]]()
    while len(cases) < 14:
        texts, sets = zip(*(field(*bounds) for bounds in ((0, 59), (0, 23), (1, 28), (1, 12), (0, 6))), strict=True)
        if texts[2] != "*" and texts[4] != "*":
            texts, sets = (*texts[:4], "*"), (*sets[:4], set(range(7)))
        start = datetime.datetime(2026, rng.randint(1, 12), rng.randint(1, 28), rng.randint(0, 23), rng.randint(0, 59))
        when = start + datetime.timedelta(minutes=1)
        while when.year < 2029:
            fits = when.month in sets[3] and when.day in (sets[2] if texts[2] != "*" else range(1, 32))
            if not fits or when.isoweekday() % 7 not in sets[4]:
                when = datetime.datetime.combine(when.date() + datetime.timedelta(days=1), datetime.time())
            elif when.hour in sets[1] and when.minute in sets[0]:
                cases.append([" ".join(texts), f"{start:%Y-%m-%d %H:%M}", f"{when:%Y-%m-%d %H:%M}"])
                break
            else:
                when += datetime.timedelta(minutes=1)
    shown = cases[:2]
    examples = "\n".join(f"        next-run '{line}' '{now}' prints {wanted}" for line, now, wanted in shown)
    return Draft(
        instruction=f"""
        Write the executable program /app/next-run, in a language of your choice. It takes the five time fields of a
        crontab line as one argument (minute, hour, day of month, month, day of week) and a time YYYY-MM-DD HH:MM as
        another, and prints the first time after it (never the same minute) at which the line runs, in the same form.

        A field is `*`, a number, a range `a-b`, a step `*/n` (counted from the lowest value of the field), or a list of
        numbers with commas. Days of the week are 0 (Sunday) to 6. No line restricts both kinds of days. For example:

{examples}
        """,
        solution="""
        cat > /app/next-run <<'END'
        #!/usr/bin/env python3
        import datetime, sys
        bounds = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
        def values(text, low, high):
            found = set()
            for part in text.split(","):
                part, _, step = part.partition("/")
                first, last = (low, high) if part == "*" else map(int, (part.split("-") * 2)[:2])
                found |= set(range(first, last + 1, int(step or 1)))
            return found
        minute, hour, day, month, week = (values(t, *b) for t, b in zip(sys.argv[1].split(), bounds))
        now = datetime.datetime.strptime(sys.argv[2], "%Y-%m-%d %H:%M") + datetime.timedelta(minutes=1)
        while True:
            if now.month not in month or now.day not in day or now.isoweekday() % 7 not in week:
                now = now.replace(hour=0, minute=0) + datetime.timedelta(days=1)
            elif now.hour not in hour:
                now = now.replace(minute=0) + datetime.timedelta(hours=1)
            elif now.minute not in minute:
                now += datetime.timedelta(minutes=1)
            else:
                break
        print(now.strftime("%Y-%m-%d %H:%M"))
        END
        chmod +x /app/next-run
        """,
        check=_check_schedule,
        data=cases,
    )
