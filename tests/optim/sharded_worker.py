"""The ranks of tests/optim/test_distributed.py: train a toy model under fully_shard and write what it became.

Every rank is a process of its own: `sharded_worker.py RANK WORLD FOLDER`. Rank 0 saves start, gradients and results of
every case as safetensors; the test compares them with its own reference.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from glm5.errors import ConfigError
from glm5.model.layers import declare_split, remember_splits, restore_splits
from glm5.optim import Muon, clip_gradients, global_norm, muon_groups, table

STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.2, "betas": (0.8, 0.9), "eps": 1e-6}
# Over 4 ranks: heads and experts stay whole, all others are cut; rank 3 holds no expert and no row of `small`.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "heads": ((20, 6), (5,) * 4),
    "latent": ((21, 5), (3, 4) * 3),
    "uneven": ((7, 9), (7,)),
    "small": ((3, 8), (3,)),
    "tall": ((18, 4), (9, 9)),
    "experts": ((6, 8, 5), (4, 4)),
    "embed_tokens.weight": ((10, 4), ()),
    "norm": ((6,), ()),
    "short_norm": ((2,), ()),
}


class Toy(nn.Module):
    """Parameters whose gradients are what forward is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed_tokens = nn.Module()
        for name, (shape, split) in SHAPES.items():
            parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
            if split:
                declare_split(parameter, split)
            owner = self.embed_tokens if "." in name else self
            owner.register_parameter(name.split(".")[-1], parameter)

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(p * gradients[name]).sum() for name, p in self.named_parameters()]).sum()


def gradients_of(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, (shape, _) in SHAPES.items()
    }


def full(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def train(mesh: DeviceMesh, dtype: torch.dtype, ns_dtype: torch.dtype, tensors: dict[str, Tensor], case: str) -> Any:
    """Several steps of a sharded model; results go to `tensors`, numbers are returned."""
    model = Toy(dtype)
    splits = remember_splits(model)
    for name, p in model.named_parameters():
        tensors[f"{case}/start/{name}"] = p.detach().clone()
    fully_shard(model, mesh=mesh)
    lost = message(lambda: muon_groups(model))
    restore_splits(model, splits)
    optimizer = Muon(muon_groups(model), ns_dtype=ns_dtype, **OPTIONS)
    sent = []
    for step in range(STEPS):
        gradients = gradients_of(step, dtype)
        for name, gradient in gradients.items():
            tensors[f"{case}/gradient{step}/{name}"] = gradient
        model(gradients).backward()
        optimizer.watch_updates = step == 0
        optimizer.step()
        if step == 0:
            text = table(optimizer.update_table())
        optimizer.zero_grad(set_to_none=True)
        total = torch.tensor(optimizer.bytes_communicated)
        dist.all_reduce(total)
        sent.append(int(total))
    for name, p in model.named_parameters():
        tensors[f"{case}/end/{name}"] = full(p)
        for key, value in optimizer.state[p].items():
            if key != "step":
                assert value.placements == p.placements, name
    return {"lost": lost, "sent": sent, "table": text}


def clip(mesh: DeviceMesh, grid: DeviceMesh, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Norm and clipping over different meshes at once, a plain tensor, a replicated one and one without gradient."""
    generator = torch.Generator().manual_seed(7)
    values = {name: torch.randn(5, 3, generator=generator) for name in ("rows", "grid", "copied", "plain", "none")}
    params = {name: nn.Parameter(torch.zeros(5, 3)) for name in ("plain", "none")}
    placed = {"rows": (mesh, [Shard(0)]), "grid": (grid, [Replicate(), Shard(0)]), "copied": (mesh, [Replicate()])}
    for name, (where, placements) in placed.items():
        params[name] = nn.Parameter(distribute_tensor(torch.zeros(5, 3), where, placements))
    for name, p in params.items():
        if name in placed:
            p.grad = distribute_tensor(values[name], *placed[name])
        elif name == "plain":
            p.grad = values[name].clone()
    for name in ("rows", "grid", "copied", "plain"):
        tensors[f"clip/before/{name}"] = values[name].clone()
    norm = clip_gradients(list(params.values()), 0.5)
    for name in ("rows", "grid", "copied", "plain"):
        tensors[f"clip/after/{name}"] = full(params[name].grad)
    return {"norm": float(norm), "after": float(global_norm(params.values()))}


def message(call: Any) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def columns(mesh: DeviceMesh) -> str:
    """What the optimizer says to a matrix whose columns are sharded."""
    p = nn.Parameter(distribute_tensor(torch.zeros(8, 8), mesh, [Shard(1)]))
    declare_split(p, (8,))
    p.grad = torch.zeros_like(p)
    return message(Muon([{"params": [p], "names": ["sideways"], "kind": "muon"}]).step)


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copy", "shard"))
    tensors: dict[str, Tensor] = {}
    numbers = {
        "float64": train(mesh, torch.float64, torch.float64, tensors, "float64"),
        "float32": train(mesh, torch.float32, torch.float32, tensors, "float32"),
        "bfloat16": train(mesh, torch.float32, torch.bfloat16, tensors, "bfloat16"),
        "replicas": train(grid, torch.float64, torch.float64, tensors, "replicas"),
        "clip": clip(mesh, grid, tensors),
        "columns": columns(mesh),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(numbers))
    if rank == 0:
        save_file({name: t.contiguous() for name, t in tensors.items()}, str(folder / "tensors.safetensors"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
