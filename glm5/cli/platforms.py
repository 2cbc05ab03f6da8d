"""Verbs about accelerators: the paper's seven families, and what holds on a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm5.cli.options import Json, app, show

if TYPE_CHECKING:
    from glm5.launch.conformance import Check

platform_app = typer.Typer(help="Accelerator families, and what holds on a device.")
app.add_typer(platform_app, name="platform")


@platform_app.command("list")
def list_platforms(as_json: Json = False) -> None:
    """The accelerator families of the paper, and whether one is on this machine."""
    from glm5.platforms import families

    found = families()
    if as_json:
        show({"platforms": found}, True)
        return
    for row in found:
        typer.echo(f"{row['name']:<15}{row['maker']:<16}{row['device']:<6}{row['package']:<28}{row['here']}")


@platform_app.command()
def check(
    name: Annotated[
        str, typer.Argument(help='A family of `platform list`, a device such as "cuda:0", or "simulated".')
    ],
    only: Annotated[list[str], typer.Option(help="How the names of the checks begin; repeatable.")] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Also write the result to this file, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Train, update and generate on a device beside the CPU; exits with 1 if a check fails."""
    from glm5.files import atomic_write
    from glm5.launch.conformance import conform

    def told(check: Check) -> None:
        if not as_json:
            typer.echo(f"{check.result:<9}{check.name:<40}{check.detail}")

    found = conform(name, only, told)
    if out is not None:
        atomic_write(out, json.dumps(found, indent=1) + "\n")
    if as_json:
        show(found, True)
    if not found["ok"]:
        raise typer.Exit(1)
