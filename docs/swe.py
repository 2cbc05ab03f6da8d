"""Make the tables of `docs/results/swe/README.md` from the lists beside it.

.venv/bin/python docs/swe.py
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from glm5.files import read_rows

HERE = Path(__file__).parent / "results" / "swe"
SOURCES = {"versions": "releases", "patches": "patches", "commits": "commits", "mutate": "mutations"}
MARK = "<!-- tables -->\n"
Row = dict[str, Any]


def table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def tables() -> str:
    """Tasks by language and source, how many of them were audited, and why candidates fell."""
    lists: dict[str, dict[str, list[Row]]] = {
        folder.name: {kind: list(read_rows(folder / f"{kind}.jsonl")) for kind in ("manifest", "rejects", "audit")}
        for folder in HERE.iterdir()
        if folder.is_dir()
    }
    languages = sorted(lists, key=lambda name: (-len(lists[name]["manifest"]), name))
    tasks, yields = [], []
    for language in languages:
        manifest, rejects, audit = lists[language].values()
        counts = Counter(row["source"] for row in manifest)
        packages = len({row["package"] for row in manifest})
        held = f"{sum(row['ok'] for row in audit)} of {len(audit)}"
        tasks.append([language, len(manifest), *(counts[source] for source in SOURCES), packages, held])
        for source, name in SOURCES.items():
            reasons = Counter(row["reason"] for row in rejects if row["source"] == source)
            if tried := counts[source] + reasons.total():
                share = f"{100 * counts[source] / tried:.0f} %"
                told = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items(), key=_most_first))
                yields.append([language, name, tried, counts[source], share, told])
    return (
        table(["language", "tasks", *SOURCES.values(), "packages", "audited, hold"], tasks)
        + "\nCandidates that were tried, what became tasks, and why the others fell:\n\n"
        + table(["language", "source", "tried", "tasks", "yield", "fell"], yields)
    )


def _most_first(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


def page() -> str:
    before, _, after = (HERE / "README.md").read_text(encoding="utf-8").split(MARK)
    return f"{before}{MARK}{tables()}{MARK}{after}"


if __name__ == "__main__":
    (HERE / "README.md").write_text(page(), encoding="utf-8")
