"""Scales that move the range of activations into the weights that read them: Flex-AWQ and flexible smoothing (§5).

Where the output of one tensor is read by matrices and nothing non-linear lies between, channel j of the output may be
divided by s_j and column j of *all* matrices that read it multiplied. Such a place is a junction. Every candidate s is
judged by the error that the real quantisers leave in the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.model.disk_names import disk_rows
from glm5.model.mla import MLA
from glm5.model.moe import MoE
from glm5.ops.quantisers import quantise
from glm5.ops.wide import wide
from glm5.quant.rotation import feed_forward_readers, input_readers, query_readers, value_rows
from glm5.quant.schemes import Form, round_weight

ALPHAS = tuple(step / 20 for step in range(21))
"""Exponents of the mean magnitude of a channel that are tried; 0 leaves everything as it is."""
LEAST_MAGNITUDE = 1e-4
"""Smallest magnitude of a channel, as a share of their mean: a channel that was never active is not scaled away."""

JUDGED = 4
"""Experts of a layer whose errors count where all read the same channels."""

FormOf = Callable[[str], Form | None]


@dataclass(frozen=True)
class Junction:
    """One place in a layer: `rows` is the name of its observed activations [n, channels] (see `calibration.observe`),
    `step` the step of a scheme that it belongs to.

    `divided` are views of weights and the axis of the channels in them; `multiplied` are readers, by name in the layer,
    with the channels in their last axis.
    """

    rows: str
    step: str
    divided: tuple[tuple[Tensor, int], ...]
    multiplied: tuple[tuple[str, Tensor], ...]

    @torch.no_grad()
    def apply(self, scales: Tensor) -> None:
        """Divide and multiply in place."""
        for tensor, axis in self.divided:
            shape = [1] * tensor.ndim
            shape[axis] = -1
            kind = wide(tensor.dtype)
            tensor.copy_(tensor.to(kind) / scales.to(kind).view(shape))
        for _, weight in self.multiplied:
            weight.copy_(weight.to(wide(weight.dtype)) * scales.to(wide(weight.dtype)))


def junctions(block: Any, config: GLM5Config) -> Iterator[Junction]:
    """All junctions of a layer. Names of readers are those on disk, without the layer."""
    attention, mlp = block.self_attn, block.mlp
    inputs = input_readers(attention)
    yield Junction("input", "smooth", ((block.input_layernorm.weight, 0),), _named(block, config, inputs))
    if isinstance(attention, MLA):
        queries = _named(block, config, query_readers(attention))
        yield Junction("queries", "smooth", ((attention.q_a_layernorm.weight, 0),), queries)
        values = value_rows(attention)
        for head in range(attention.heads):
            columns = attention.o_proj.weight[:, head * attention.v_dim : (head + 1) * attention.v_dim]
            yield Junction(f"values.{head}", "smooth", ((values[head], 0),), (("self_attn.o_proj.weight", columns),))
    readers = _named(block, config, feed_forward_readers(mlp))
    yield Junction("feed_forward", "smooth", ((block.post_attention_layernorm.weight, 0),), readers)
    if isinstance(mlp, MoE):
        inner = mlp.experts.down_proj.shape[2]
        for number, (up, down) in enumerate(zip(mlp.experts.gate_up_proj, mlp.experts.down_proj, strict=True)):
            reader = (f"mlp.experts.{number}.down_proj.weight", down)
            yield Junction(f"experts.{number}", "awq", ((up[inner:], 0),), (reader,))
        prefix, plain = "mlp.shared_experts", mlp.shared_experts
    else:
        prefix, plain = "mlp", mlp
    up, down = plain.gate_up_proj.weight, plain.down_proj.weight
    yield Junction("down", "smooth", ((up[down.shape[1] :], 0),), ((f"{prefix}.down_proj.weight", down),))


def _named(block: Any, config: GLM5Config, tensors: list[Tensor]) -> tuple[tuple[str, Tensor], ...]:
    """Tensors of a layer with their names on disk; a stack has that of its first matrix."""
    names = {id(parameter): name for name, parameter in block.named_parameters()}
    return tuple((next(disk_rows(names[id(t)], config, t, 0, len(t)))[0], t) for t in tensors)


@torch.no_grad()
def search(rows: Tensor, readers: list[tuple[Tensor, Form]], *, ssz: bool) -> tuple[Tensor, float, float]:
    """The scales [channels] of the least error, that error, and the one without scales.

    rows [n, channels] are what the readers [outputs, channels] (or stacks of such) read. Errors are mean squares of
    output differences over those of the outputs, summed over readers. `ssz`: weights get scales by least squares.
    """
    rows = rows.to(wide(rows.dtype))
    magnitude = rows.abs().mean(0)
    magnitude = magnitude.clamp_min(max(LEAST_MAGNITUDE * float(magnitude.mean()), torch.finfo(rows.dtype).tiny))
    best = torch.ones_like(magnitude)
    least = without = _error(rows, best, readers, ssz)
    for alpha in ALPHAS[1:]:
        scales = magnitude**alpha
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = _error(rows, scales, readers, ssz)
        if error < least:
            best, least = scales, error
    return best, least, without


def _error(rows: Tensor, scales: Tensor, readers: list[tuple[Tensor, Form]], ssz: bool) -> float:
    total = 0.0
    for weight, form in readers:
        for matrix in weight[:: -(-len(weight) // JUDGED)] if weight.ndim == 3 else (weight,):
            matrix = matrix.to(rows.dtype)
            weights = round_weight(matrix * scales, form, ssz=ssz).dequantise(rows.dtype)
            seen = rows / scales
            if form.activation is not None:
                seen = quantise(seen, form.activation).dequantise(rows.dtype)
            exact = rows @ matrix.T
            size = float(exact.square().mean())
            total += float((seen @ weights.T - exact).square().mean()) / size if size else 0.0
    return total


@torch.no_grad()
def smooth(
    block: Any, config: GLM5Config, observed: dict[str, Tensor], form_of: FormOf, steps: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Search and apply the scales of every junction of a layer that `steps` name and something was observed at.
    `form_of` gives the form of a reader by its name in the layer. Returns the error of each with and without scales."""
    report = []
    for junction in junctions(block, config):
        rows = observed.get(junction.rows)
        forms = [(weight, form_of(name)) for name, weight in junction.multiplied]
        readers = [(weight, form) for weight, form in forms if form is not None]
        if junction.step not in steps or rows is None or not len(rows) or not readers:
            continue
        scales, error, without = search(rows, readers, ssz="ssz" in steps)
        junction.apply(scales)
        report.append({"junction": junction.rows, "error": error, "without": without})
    return report
