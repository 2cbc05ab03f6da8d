"""The verbs that predict memory and time: of a recipe, and of serving a model."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.core import TyperGroup

from glm5.cli.options import Json, Overrides, Recipe, app, show

Devices = Annotated[str, typer.Option(help="a100, h100, h800, h200, b200, mi300x, ascend-910b or ascend-910c.")]
MOST = 1 << 20
"""Devices."""

PricePerHour = Annotated[float | None, typer.Option(min=0.0, help="Of one device; adds the cost.")]


class _RecipeByDefault(TyperGroup):
    """`glm5 plan RECIPE` is `glm5 plan recipe RECIPE`."""

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["recipe", *args]
        return super().parse_args(ctx, args)


plan_app = typer.Typer(cls=_RecipeByDefault, help="Predict memory and time of a recipe, or of serving; needs no GPU.")
app.add_typer(plan_app, name="plan")


@plan_app.command()
def recipe(
    recipe: Recipe,
    gpus: Annotated[int, typer.Option(min=1, max=MOST, help="Processes, each with a device of its own.")] = 1,
    device: Devices = "h100",
    mfu: Annotated[float, typer.Option(help="Assumed share of the peak rate.")] = 0.15,
    layouts: Annotated[
        int, typer.Option(min=0, help="Also the best N layouts of each stage; 0: the recipe's own.")
    ] = 0,
    price_per_hour: PricePerHour = None,
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Predict whether a recipe's stages fit into the memory of a job, how long they take, and which devices of an RL
    stage should learn and which sample; needs no GPU."""
    from glm5.launch.layout_report import layout_table
    from glm5.launch.plan import load_and_plan, recipe_layouts, table

    found = load_and_plan(recipe, overrides, gpus, device, mfu)
    others = recipe_layouts(recipe, overrides, gpus, device, layouts, price_per_hour) if layouts else {}
    if as_json:
        show(found | ({"layouts": others} if layouts else {}), True)
    else:
        typer.echo(table(found))
        for number, (name, report) in enumerate(others.items()):
            typer.echo(f"\n{name}: {layout_table(report, assumed=number == 0)}")
    if not found["fits"]:
        raise typer.Exit(1)


@plan_app.command()
def layouts(
    model: Annotated[str, typer.Argument(help="A preset such as glm5, or a checkpoint's folder.")] = "glm5",
    gpus: Annotated[int, typer.Option(min=1, max=MOST, help="Devices in all.")] = 256,
    device: Devices = "h100",
    rows: Annotated[int, typer.Option(min=1, help="Rows of an optimizer step.")] = 16_384,
    row_length: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 4096,
    depths: Annotated[int, typer.Option(min=0, help="Depths of multi-token prediction.")] = 3,
    sparse: Annotated[bool, typer.Option("--sparse", help="Sparse attention, with the indexers' loss.")] = False,
    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon",
    products: Annotated[float, typer.Option(help="Assumed share of the peak rate while computing.")] = 0.4,
    best: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 3,
    price_per_hour: PricePerHour = None,
    as_json: Json = False,
) -> None:
    """The fastest layouts (pp, dp, cp, ep, rows, recomputation, offload) for training a model in bf16; needs no GPU."""
    from glm5.launch.layout_report import layout_table
    from glm5.launch.plan import model_layouts

    found = model_layouts(
        model, gpus, device, rows, row_length, depths, sparse, optimizer, products, best, price_per_hour
    )
    if as_json:
        show(found, True)
    else:
        typer.echo(layout_table(found))
    if not found["best"]:
        raise typer.Exit(1)


@plan_app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder, or a preset such as glm5.")],
    gpus: Annotated[int, typer.Option(min=1, max=MOST, help="Devices in all.")] = 1,
    device: Devices = "h100",
    tp: Annotated[int, typer.Option(min=1, help="Devices that share the weights of an engine.")] = 1,
    quantize: Annotated[str | None, typer.Option(help="As for `glm5 serve`: int8, int4, fp8, or a scheme.")] = None,
    cache_dtype: Annotated[str, typer.Option(help="auto, which is bf16, or int8.")] = "auto",
    context: Annotated[list[int], typer.Option(help="Tokens of a sequence; repeatable.")] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """How many sequences the cache holds, and how fast decoding can be at most; needs no GPU."""
    from glm5.launch.plan_serve import CONTEXTS, plan_serve, table

    found = plan_serve(model, device, gpus, tp, quantize, cache_dtype, context or CONTEXTS)
    if as_json:
        show(found, True)
    else:
        typer.echo(table(found))
    if not found["fits"]:
        raise typer.Exit(1)
