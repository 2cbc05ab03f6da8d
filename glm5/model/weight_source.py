"""Where the weights of a model on the meta device come from, so that a process can get only the rows that it needs.

A source fills rows of tensors by their names in memory: drawn from a seed, read from a checkpoint folder
(`load_plan.FolderWeights`), or those of another model under a changed configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from glm5.model.gdn import initialise_gate
from glm5.seeds import derive_seed

DRAWN = 1 << 24
"""Numbers drawn at a time for a larger tensor; a multiple of 16."""


@dataclass(frozen=True)
class RowPart:
    """`rows` are rows [first, first + len(rows)) of a parameter or buffer with `total` rows."""

    rows: Tensor
    first: int
    total: int


class WeightSource(Protocol):
    """Gives any rows of any parameter or buffer; the same values in every process."""

    def fill(self, parts: Mapping[str, RowPart]) -> None:
        """Write the values of parts, by names in memory, to their `rows`, in the dtype and on the device of each."""
        ...


@dataclass(frozen=True)
class RandomWeights:
    """The random initialisation of `GLM5ForCausalLM(config, seed=seed)`, with the same bits for any rows."""

    seed: int
    std: float

    @torch.no_grad()
    def fill(self, parts: Mapping[str, RowPart]) -> None:
        for name, part in parts.items():
            part.rows.copy_(self._rows(name, part))

    def _rows(self, name: str, part: RowPart) -> Tensor:
        """Values in fp32 on the CPU, which are then the same for every dtype and device."""
        shape = (part.total, *part.rows.shape[1:])
        if len(shape) > 1 and math.prod(shape) > DRAWN:
            return _normal_rows(part, self.std, _generator(self.seed, name))
        whole = torch.empty(shape, dtype=torch.float32, device="cpu")
        initialise_tensor(name, whole, self.std, self.seed)
        return whole[part.first : part.first + part.rows.shape[0]]


def initialise_tensor(name: str, tensor: Tensor, std: float, seed: int) -> None:
    """Matrices: Normal(0, std); norms: 1; biases: 0; Gated DeltaNet gates: `initialise_gate`; rotations: none."""
    if name.endswith("norm.rotation"):
        tensor.zero_().fill_diagonal_(1.0)
        return
    generator = _generator(seed, name)
    if initialise_gate(name, tensor, std, generator):
        return
    if tensor.ndim >= 2:
        tensor.normal_(0.0, std, generator=generator)
    else:
        tensor.fill_(0.0 if name.endswith("bias") else 1.0)


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, "init", name))


def _normal_rows(part: RowPart, std: float, generator: torch.Generator) -> Tensor:
    """The part's rows of `normal_` on the whole tensor, without the whole tensor: torch draws in groups of 16 numbers,
    so pieces of a multiple of 16 continue each other. Only the last may have another length, of at least 16."""
    row, total = math.prod(part.rows.shape[1:]), part.total * math.prod(part.rows.shape[1:])
    begin, end = part.first * row, (part.first + part.rows.shape[0]) * row
    out = torch.empty(end - begin, dtype=torch.float32)
    at = 0
    while at < end:
        size = DRAWN if total - at >= DRAWN + 16 else total - at
        drawn = torch.empty(size, dtype=torch.float32).normal_(0.0, std, generator=generator)
        low, high = max(at, begin), min(at + size, end)
        if low < high:
            out[low - begin : high - begin] = drawn[low - at : high - at]
        at += size
    return out.view(part.rows.shape)


@dataclass(frozen=True)
class ChangedModel:
    """The weights of `base` for the names in `kept`; all others are drawn from `new`."""

    base: WeightSource
    kept: frozenset[str]
    new: RandomWeights

    def fill(self, parts: Mapping[str, RowPart]) -> None:
        self.base.fill({name: part for name, part in parts.items() if name in self.kept})
        self.new.fill({name: part for name, part in parts.items() if name not in self.kept})


def whole(tensor: Tensor) -> RowPart:
    """A tensor as its own only part."""
    return RowPart(tensor, 0, tensor.shape[0])


def whole_parts(
    model: nn.Module, source: WeightSource | None, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, RowPart]]:
    """Every wanted tensor of a model's `state_dict` by name, one after the other; tensors on the meta device come from
    `source`, into new CPU memory that the caller should drop before the next."""
    for name, tensor in model.state_dict(keep_vars=False).items():
        if not wanted(name):
            continue
        if tensor.is_meta and source is not None:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            source.fill({name: whole(tensor)})
        yield name, whole(tensor)
        del tensor


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give tensors on the meta device uninitialised memory on `device`.

    `Module.to_empty` does not work: it drops attributes of parameters, such as Muon Split's blocks. Nor `empty_like` of
    a tensor without storage: it loads sympy (0.6 s, 30 MB). Weights whose layer holds integers stay without.
    """
    holding = [m for m in model.modules() if getattr(m, "integers", None)]
    held = {id(p) for m in holding for name, p in m.named_parameters(recurse=False) if name != "bias"}

    def placed(tensor: Tensor) -> Tensor:
        fresh = tensor.is_meta and id(tensor) not in held
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if fresh else tensor

    replace_tensors(model, placed)


def replace_tensors(model: nn.Module, made: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer that `made` changes; parameters keep their attributes."""
    for module in model.modules():
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            fresh = made(tensor)
            if fresh is tensor:
                continue
            if isinstance(tensor, nn.Parameter):
                fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
                fresh.__dict__.update(tensor.__dict__)
            setattr(module, key, fresh)
