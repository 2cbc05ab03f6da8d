"""`glm5 task build swe` and `glm5 task audit`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from glm5.cli.options import DialectName, Json, Out, show, told
from glm5.cli.task import build_app, task_app
from glm5.errors import UsageError

Only = Annotated[list[str], typer.Option("--only", help="Package of the list to use; may be repeated.")]
Kinds = Annotated[
    list[str], typer.Option("--source", help="versions, patches, commits, mutate or featadd; default: all but featadd.")
]
Modules = Annotated[list[str], typer.Option("--stdlib", help="Module of Python's library to use instead of packages.")]
Repos = Annotated[list[Path], typer.Option("--repo", help="Local git repository to use instead of packages.")]
Requires = Annotated[list[str], typer.Option("--requires", help="Package that the tests of --repo need.")]


@build_app.command("swe")
def build_swe(
    out: Out,
    packages: Annotated[Path | None, typer.Option(help="TOML list of packages; default: the one of glm5.")] = None,
    language: Annotated[
        str, typer.Option(help="python, javascript, typescript, go, php, ruby, c, cpp, rust or java.")
    ] = "python",
    only: Only = [],  # noqa: B006
    source: Kinds = [],  # noqa: B006
    stdlib: Modules = [],  # noqa: B006
    repo: Repos = [],  # noqa: B006
    requires: Requires = [],  # noqa: B006
    per_package: Annotated[int, typer.Option(min=1, help="Tasks per source and version of a package.")] = 20,
    count: Annotated[int | None, typer.Option(min=1, help="Tasks in all; default: no limit.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of candidates.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Packages to build at a time.")] = 2,
    derived: Annotated[bool, typer.Option(help="Also make tasks to write the test and to pick the patch.")] = False,
    manifest: Annotated[Path | None, typer.Option(help="Build only the tasks of this manifest.jsonl.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Of featadd and --text model: URL of a server, or a checkpoint directory.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the model; default: the server's first.")] = "",
    dialect: DialectName = "openai",
    api_key_file: Annotated[Path | None, typer.Option(help="File with the server's API key; or GLM5_API_KEY.")] = None,
    text: Annotated[str, typer.Option(help="Who writes the tasks' text: template or model.")] = "template",
    features_per_package: Annotated[
        int, typer.Option(min=1, help="Of featadd: features that the model adds to a package, each in a session.")
    ] = 3,
    work: Annotated[
        Path | None, typer.Option(help="Folder for downloads; default: OUT/work, which otherwise becomes a link.")
    ] = None,
    audit: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the new tasks to audit too, as `glm5 task audit` does.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Make SWE tasks (Harbor folders) from packages' own tests. A build that was stopped goes on. With --model, a model
    adds features to packages, and what it breaks is a task (--source featadd), or it writes the tasks' text."""
    from glm5.tasks.harbor.swe import audit_row
    from glm5.tasks.swe.featadd import FeatAdd
    from glm5.tasks.swe.make import DEFAULT, make

    beside = out / "work"  # where tasks find their dependencies
    if work is not None and not os.path.lexists(beside) and work.resolve() != beside.resolve():
        out.mkdir(parents=True, exist_ok=True)
        beside.symlink_to(work.resolve())
    if text not in ("template", "model"):
        raise UsageError(f"--text is template or model, not {text!r:.40}.")
    by_model, adds = text == "model", "featadd" in source
    if (model is not None) != (by_model or adds):
        raise UsageError("--model is for --source featadd and --text model, and they need it.")
    with contextlib.ExitStack() as stack:
        featadd, ask = None, None
        if model is not None:
            from glm5.cli.task_model import open_task_model

            opened = stack.enter_context(open_task_model(model, name, dialect, api_key_file))
            ask = opened.ask if by_model else None
            who = f"{model} {name}".strip()
            featadd = FeatAdd(opened.play, beside / "featadd", features_per_package, who, told) if adds else None
        result = make(
            out, work=work or beside, listed=packages, only=only, sources=source or DEFAULT, modules=stdlib,
            repos=repo, requires=requires, per_package=per_package, count=count, seed=seed, at_once=jobs,
            derived=derived, language=language, manifest=manifest, told=told, featadd=featadd, ask=ask,
            audit=audit_row, audited=audit,
        )  # fmt: skip
    show(result, as_json)


@task_app.command("audit")
def audit_swe(
    out: Annotated[Path, typer.Argument(help="Folder of a build of SWE tasks.")],
    sample: Annotated[int | None, typer.Option(min=1, help="Number of random tasks; default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Trials of the solution and of doing nothing.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Tasks to audit at a time.")] = 2,
    as_json: Json = False,
) -> None:
    """Check SWE tasks: the solution scores 1, doing nothing and every cheat 0. Rows go to OUT/audit.jsonl."""
    from glm5.tasks.harbor.swe import audit_sample

    found = audit_sample(out, sample, seed, repeats=repeats, at_once=jobs, told=told)
    show(found, as_json)
    raise typer.Exit(0 if found["ok"] == found["audited"] else 1)
