"""`glm5 task build backend` and `glm5 task build chained`: the tasks of CC-Bench-V2 that lie in folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from glm5.cli.options import Json, Out, show
from glm5.cli.task import build_app
from glm5.errors import DataError, UsageError


@build_app.command("backend")
def build_backend(
    out: Out,
    language: Annotated[
        list[str], typer.Option(help="python, go, cpp, rust, java or typescript; may be repeated; default: all.")
    ] = [],  # noqa: B006
    everything: Annotated[
        bool, typer.Option("--all", help="Also languages whose compiler this machine lacks.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make services in six languages with hidden unit tests, as Harbor folders. A language whose compiler is missing is
    left out and named."""
    from glm5.files import atomic_write
    from glm5.tasks.cc_bench.backend_tasks import LANGUAGES, backend_tasks
    from glm5.tasks.harbor.trial import plan_of
    from glm5.tasks.terminal.build import digest

    if unknown := [name for name in language if name not in LANGUAGES]:
        raise UsageError(f"there is no language {unknown[0]!r:.40}; there are {', '.join(LANGUAGES)}.")
    rows, missing = list[dict[str, Any]](), dict[str, str]()
    for name, task in backend_tasks(language):
        spoken = name.split("-")[1]
        blockers = plan_of(task).blockers
        if blockers and not everything:
            missing[spoken] = f"this machine cannot build it: {blockers[0].message} ({blockers[0].kind})"
            continue
        task.write(out / name)
        rows.append({"name": name, "language": spoken, "sha256": digest(task)})
    if rows:
        atomic_write(out / "manifest.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    show({"tasks": len(rows), "left_out": missing}, as_json)
    raise typer.Exit(0 if rows else 1)


@build_app.command("chained")
def build_chained(
    out: Out,
    repo: Annotated[list[Path], typer.Option(help="Local git repository; its last changes.")] = [],  # noqa: B006
    only: Annotated[list[str], typer.Option(help="Package whose releases make a chain; may be repeated.")] = [],  # noqa: B006
    requires: Annotated[list[str], typer.Option(help="Package that the tests of --repo need.")] = [],  # noqa: B006
    licence: Annotated[str, typer.Option(help="Of --repo.")] = "unknown",
    most: Annotated[int, typer.Option(min=3, help="Changes of a history, the newest.")] = 15,
    neutral: Annotated[
        float, typer.Option(min=0, max=1, help="Relatedness above which changes belong to one task.")
    ] = 0.6,
    as_json: Json = False,
) -> None:
    """Make chains of tasks from consecutive changes of Python repositories or releases of packages. A chain is kept if
    its own changes solve every task and doing nothing solves none."""
    from glm5.files import atomic_write
    from glm5.tasks.cc_bench.chain_build import Origin, build_chains, history_of, releases_of
    from glm5.tasks.cc_bench.chained import ChainedFamily, replay
    from glm5.tasks.swe.repositories import install, packages

    if not repo and not only:
        raise UsageError("name a git repository with --repo or a package with --only.")
    work, rows, failed = out / "work", list[dict[str, Any]](), dict[str, str]()
    sources: list[Path | str] = [*repo, *only]
    for source in sources:
        try:
            if isinstance(source, Path):
                needed = tuple(sorted({*packages()[1], *requires}))
                origin = Origin(source.resolve().name, licence, install(needed, work / "bases"), needed)
                states = history_of(source, work, most)
            else:
                origin, states = releases_of(source, work, most)
            made = build_chains(origin, states, out / "chains", neutral, lambda line: typer.echo(line, err=True))
            for row in made:
                folder = out / "chains" / row["name"]
                problem = ChainedFamily(folder=str(folder)).problem("heldout", 0)
                oracle, no_op = replay(problem, True), replay(problem, False)
                if all(oracle) and not any(no_op):
                    rows.append(row)
                else:
                    failed[row["name"]] = f"its own changes solve {sum(oracle)} tasks, and doing nothing {sum(no_op)}"
                    shutil.rmtree(folder)
        except DataError as error:
            failed[str(source)] = str(error)
    if rows:
        atomic_write(out / "manifest.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    show({"chains": len(rows), "tasks": sum(row["tasks"] for row in rows), "failed": failed}, as_json)
    raise typer.Exit(0 if rows else 1)
