"""A table of every parameter's optimizer and the size of its update (printed at step 1 of a run)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from glm5.optim.blocks import Shape, block_heights

if TYPE_CHECKING:
    from glm5.optim.muon import Muon


@dataclass(frozen=True)
class GroupRow:
    """Parameters of one rule, one kind of name (layer numbers collapsed to *) and one block shape.

    `rule` is "muon split", "muon" or "adamw"; `block` is (0, 0) for AdamW, which has no blocks. `update_rms` is the
    root mean square of the last watched step's update divided by the learning rate, without weight decay; None before
    that step. Muon aims at 0.2, the usual value of AdamW after its averages have warmed up. AdamW's first step is 1.0
    for every nonzero gradient.
    """

    rule: str
    kind: str
    block: Shape
    parameters: int
    matrices: int
    blocks: int
    update_rms: float | None
    weight_decay: float
    lr: float


def block_shapes(parameter: Tensor, name: str, group: dict[str, Any]) -> dict[Shape, int]:
    """Number of blocks per shape in a parameter; {(0, 0): 1} for AdamW."""
    if group.get("kind", "adamw") != "muon":
        return {(0, 0): 1}
    found: dict[Shape, int] = {}
    matrices = parameter.numel() // (parameter.shape[-2] * parameter.shape[-1])
    for height in block_heights(parameter, name, group.get("split", True)):
        shape = (height, parameter.shape[-1])
        found[shape] = found.get(shape, 0) + matrices
    return found


def describe(optimizer: Muon) -> list[GroupRow]:
    """The rows for an optimizer, in parameter order; all parameters are counted, sharded ones in full."""
    rows: dict[tuple[str, str, Shape, float, float], dict[str, Any]] = {}
    for group in optimizer.param_groups:
        names = group.get("names") or [f"parameter {i}" for i in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            if hasattr(parameter, "tied_copy"):  # counted in the pipeline stage that owns it
                continue
            for shape, blocks in block_shapes(parameter, name, group).items():
                matrix = shape != (0, 0)
                rule = "adamw" if not matrix else "muon split" if is_part(parameter, shape) else "muon"
                decay = group["weight_decay"] if parameter.ndim >= 2 else 0.0
                key = (rule, re.sub(r"\.\d+(?=\.|$)", ".*", name), shape, decay, group["lr"])
                row = rows.setdefault(key, {"elements": 0, "matrices": 0, "blocks": 0, "measured": 0, "square": 0.0})
                elements = blocks * shape[0] * shape[1] if matrix else parameter.numel()
                row["elements"] += elements
                row["matrices"] += parameter.numel() // (parameter.shape[-2] * parameter.shape[-1]) if matrix else 1
                row["blocks"] += blocks
                square = optimizer.update_squares.get((id(parameter), shape))
                if square is not None:
                    row["measured"] += elements
                    row["square"] += float(square)
    return [
        GroupRow(
            *key[:3], row["elements"], row["matrices"], row["blocks"],
            (row["square"] / row["measured"]) ** 0.5 if row["measured"] else None, key[3], key[4],
        )
        for key, row in rows.items()
    ]  # fmt: skip


def merged(tables: Sequence[Sequence[GroupRow]]) -> list[GroupRow]:
    """One table of the parameters of several pipeline stages."""
    found: dict[tuple[Any, ...], GroupRow] = {}
    for row in (row for rows in tables for row in rows):
        key = (row.rule, row.kind, row.block, row.weight_decay, row.lr)
        old = found.get(key)
        if old is None:
            found[key] = row
            continue
        sizes, values = (old.parameters, row.parameters), (old.update_rms, row.update_rms)
        known = [(size, rms) for size, rms in zip(sizes, values) if rms is not None]
        square = sum(size * rms**2 for size, rms in known) / sum(size for size, _ in known) if known else None
        found[key] = replace(
            old,
            parameters=sum(sizes),
            matrices=old.matrices + row.matrices,
            blocks=old.blocks + row.blocks,
            update_rms=None if square is None else square**0.5,
        )
    return list(found.values())


def is_part(parameter: Tensor, shape: Shape) -> bool:
    """Whether a block of this shape is less than the whole matrix."""
    return shape[0] < parameter.shape[-2]


def table(rows: Sequence[GroupRow]) -> str:
    """The rows as aligned plain text with a heading."""
    heading = ["rule", "parameters of", "block", "elements", "matrices", "blocks", "update rms", "decay", "lr"]
    lines = [heading, *([*_cells(row)] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heading))]
    words = 3  # columns of text are left-aligned, numbers right-aligned
    padded = [[c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _cells(row: GroupRow) -> list[str]:
    return [
        row.rule,
        row.kind,
        "x".join(map(str, row.block)) if any(row.block) else "-",
        f"{row.parameters:,}",
        str(row.matrices),
        str(row.blocks) if any(row.block) else "-",
        "-" if row.update_rms is None else f"{row.update_rms:.3f}",
        f"{row.weight_decay:g}",
        f"{row.lr:.3g}",
    ]
