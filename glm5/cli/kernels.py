"""The verb about GPU kernels: compile all of them without a GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from glm5.cli.options import Json, app, show


@app.command()
def kernels(
    preset: Annotated[str, typer.Option(help="Model whose shapes the kernels are compiled for.")] = "glm5",
    target: Annotated[list[str], typer.Option(help="sm_90, sm_100 or gfx942; repeatable; default: all.")] = [],  # noqa: B006
    only: Annotated[list[str], typer.Option(help="A kernel's name; repeatable; default: all.")] = [],  # noqa: B006
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile.")] = 1,
    as_json: Json = False,
) -> None:
    """Compile the GPU kernels for each target, no GPU needed: registers, spills, shared memory, predicted times."""
    from glm5.launch.kernels import survey, table

    found = survey(preset, target, only, jobs)
    if as_json:
        show(found, True)
    else:
        typer.echo(table(found))
    if any(row["problem"] for row in found["kernels"]):
        raise typer.Exit(1)
