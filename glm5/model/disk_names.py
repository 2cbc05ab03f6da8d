"""Names of tensors on disk.

In memory, experts are stacked, and so are gate and up projections. On disk each is a matrix of its own, the layout that
every other tool reads. The MTP layer is stored as layer `num_hidden_layers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.model.glm5 import GLM5ForCausalLM


def disk_tensors(model: GLM5ForCausalLM, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Every tensor by its name on disk, as a view of the model's own memory: writing to it changes the model. `state`
    has other memory than the model's `state_dict`, by the same names."""
    found: dict[str, Tensor] = {}
    for name, tensor in (model.state_dict(keep_vars=False) if state is None else state).items():
        found |= {disk: view for disk, view, _ in disk_rows(name, model.config, tensor, 0, tensor.shape[0])}
    return found


def disk_rows(name: str, config: GLM5Config, part: Tensor, first: int, total: int) -> Iterator[tuple[str, Tensor, int]]:
    """Where rows [first, first + len(part)) of an in-memory tensor with `total` rows are on disk: (name there, view of
    `part`, first row there) for each tensor on disk. The rows of a stack of experts are whole experts."""
    name = disk_name(name, config)
    if ".mlp.experts." not in name:
        yield from _gate_and_up(name, part, first, total)
        return
    prefix, stacked = name.rsplit(".", 1)
    for number in range(part.shape[0]):
        yield from _gate_and_up(f"{prefix}.{first + number}.{stacked}.weight", part[number], 0, part.shape[1])


def _gate_and_up(name: str, part: Tensor, first: int, total: int) -> Iterator[tuple[str, Tensor, int]]:
    if not name.endswith(".gate_up_proj.weight"):
        yield name, part, first
        return
    prefix, half, end = name.removesuffix("gate_up_proj.weight"), total // 2, first + part.shape[0]
    border = min(max(half, first), end)
    if first < border:
        yield f"{prefix}gate_proj.weight", part[: border - first], first
    if border < end:
        yield f"{prefix}up_proj.weight", part[border - first :], border - half


def disk_name(name: str, config: GLM5Config) -> str:
    """The disk name of an in-memory tensor, stacked or not."""
    if not name.startswith("mtp."):
        return name
    return f"model.layers.{config.num_hidden_layers}.{name.removeprefix('mtp.').removeprefix('block.')}"


def disk_parts(name: str, config: GLM5Config, tensor: Tensor) -> list[str]:
    """Disk names of the parts of one in-memory tensor."""
    return [part for part, _, _ in disk_rows(name, config, tensor, 0, tensor.shape[0])]


def expert_stacks(model: GLM5ForCausalLM) -> Iterator[tuple[str, str, Tensor]]:
    """(name in memory, name in files that keep them stacked, tensor) of the expert stacks; such files are read but
    never written."""
    for name, tensor in model.state_dict(keep_vars=False).items():
        if ".mlp.experts." in name:
            yield name, disk_name(name, model.config), tensor


def ignorable(name: str, config: GLM5Config) -> bool:
    """Whether this model does not need a tensor that other tools write: an indexer of a shared or dense layer, an MTP
    layer that the configuration does not have, or the MTP layer's copies of embedding and output matrix."""
    match = re.match(r"model\.layers\.(\d{1,9})\.", name)
    if not match:
        return False
    layer = int(match.group(1))
    if ".self_attn.indexer." in name and (not config.use_dsa or not config.computes_topk(layer)):
        return True
    if layer == config.num_hidden_layers:
        copies = (f"{match.group()}embed_tokens.weight", f"{match.group()}shared_head.head.weight")
        return not config.num_nextn_predict_layers or name in copies
    return False
