"""`glm5 task build terminal`: task folders from the seeds, with a manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, nearest
from glm5.files import atomic_write
from glm5.tasks.harbor.check import check
from glm5.tasks.harbor.folder import TaskFolder
from glm5.tasks.terminal import (
    archive_seeds,
    build_seeds,
    data_seeds,
    debug_seeds,
    file_seeds,
    git_seeds,
    job_seeds,
    service_seeds,
    sqlite_seeds,
    text_seeds,
)
from glm5.tasks.terminal.seed import SEEDS, Seed

MANIFEST = "manifest.jsonl"
MODULES = (
    text_seeds, git_seeds, sqlite_seeds, data_seeds, archive_seeds, file_seeds, job_seeds, build_seeds, debug_seeds,
    service_seeds,
)  # fmt: skip
"""Their import registers the seeds."""


def chosen(names: Sequence[str]) -> list[Seed]:
    """The seeds of these names, or all. Raises ConfigError for an unknown name."""
    for name in names:
        if name not in SEEDS:
            raise ConfigError(
                f'there is no terminal seed "{name}"{nearest(name, SEEDS)}; known: {", ".join(sorted(SEEDS))}.'
            )
    return [SEEDS[name] for name in names or sorted(SEEDS)]


def build(
    out: Path,
    count: int,
    first: int = 0,
    names: Sequence[str] = (),
    verify: bool = False,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> dict[str, Any]:
    """Write `count` tasks to folders of `out`, from the seeds in turn with the numbers `first`, `first` + 1, ..., and a
    line of `manifest.jsonl` per task. A folder that is complete is kept, and the digest is of what it holds. With
    `verify`, tasks that do not pass their check are listed and not in the manifest. Returns counts and the reasons of
    tasks that fell."""
    kinds = chosen(names)
    rows, fallen = list[dict[str, Any]](), dict[str, list[str]]()
    for number in range(count):
        kind, seed = kinds[number % len(kinds)], first + number // len(kinds)
        name = f"{kind.name.replace('_', '-')}-{seed}"
        progress(number, count, name)
        folder = out / name
        if not (folder / "manifest.json").exists():
            kind.task(seed).write(folder)
        if verify:
            report = check(folder)
            if not report.ok:
                fallen[name] = report.reasons
                continue
        row = {"name": name, "seed": kind.name, "number": seed, "field": kind.field, "level": kind.level}
        rows.append({**row, "sha256": digest(TaskFolder.read(folder)), "license": "Apache-2.0"})
    atomic_write(out / MANIFEST, "".join(json.dumps(row) + "\n" for row in rows))
    return {"tasks": len(rows), "seeds": len({row["seed"] for row in rows}), "fallen": fallen}


def digest(task: TaskFolder) -> str:
    """SHA-256 of a task's instruction, environment, tests and solution."""
    found = hashlib.sha256(task.instruction.encode())
    for part in (task.environment, task.tests, task.solution):
        for name in sorted(part):
            found.update(f"\0{name}\0{part[name].executable}\0{len(part[name].data)}\0".encode() + part[name].data)
    return found.hexdigest()
