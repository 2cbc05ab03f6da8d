"""FSDP2: parameters are sharded over ranks, gathered block by block for use, and unsharded again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from glm5.errors import CheckpointError
from glm5.files import disk_errors, publish_dir
from glm5.model.context import ForwardContext
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.hf_weights import begin_checkpoint, write_rows
from glm5.model.weight_source import RowPart, WeightSource
from glm5.parallel.expert import expert_modules, whole_stack
from glm5.parallel.ranks import Ranks, ShardSlice

RUN = "run_unsharded"
"""Method of a sharded model that calls a function inside the model's own forward, as FSDP sees it."""


def shard_model(
    model: GLM5ForCausalLM,
    everyone: DeviceMesh,
    same_experts: DeviceMesh | None,
    dtype: torch.dtype,
    trainable: Callable[[str], bool],
) -> None:
    """Shard every parameter's rows over `everyone`. If experts are divided, shard expert stacks over `same_experts`,
    the ranks with the same experts (None: not divided).

    Every block is gathered separately and freed after use. Embedding, final norm and output head stay gathered until
    the end of backward, because the loss uses them outside their own modules. Gradients are summed in fp32, not
    averaged: losses are already divided by the counts of the whole step. The shards of a model on the meta device get
    uninitialised memory.
    """
    declared = {name: dict(p.__dict__) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable(name))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # If the embedding is frozen (indexer warm-up), no gradient reaches the output of a block, which is FSDP's signal to
    # gather the block again. The block must then stay gathered.
    free = trainable("model.embed_tokens.weight")
    for experts in expert_modules(model) if same_experts is not None else ():
        fully_shard(experts, mesh=same_experts, mp_policy=policy, reshard_after_forward=free)
    for block in [*model.model.layers, *([model.mtp] if model.mtp is not None else [])]:
        fully_shard(block, mesh=everyone, mp_policy=policy, reshard_after_forward=free)
        block.register_forward_pre_hook(_seal, prepend=True)
        block.register_forward_pre_hook(_unseal)
    if model.mtp is not None:
        # FSDP hooks the gradient of the output; with a view the hook is unreliable.
        model.mtp.register_forward_hook(lambda module, args, out: out.clone(), prepend=True)
    fully_shard(model, mesh=everyone, mp_policy=policy, reshard_after_forward=False)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo supports no other
    setattr(model, RUN, MethodType(_run, model))
    register_fsdp_forward_method(model, RUN)
    if next(model.parameters()).is_meta:
        model.to_empty(device=everyone.device_type)
    for name, parameter in model.named_parameters():
        for key, value in declared[name].items():
            setattr(parameter, key, value)


class _Sealed:
    """Hides a context from FSDP, which would copy dataclasses and the lists in them that layers write to."""

    def __init__(self, ctx: ForwardContext) -> None:
        self.ctx = ctx


def _seal(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_Sealed(arg) if isinstance(arg, ForwardContext) else arg for arg in args)


def _unseal(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.ctx if isinstance(arg, _Sealed) else arg for arg in args)


def _run(model: GLM5ForCausalLM, function: Callable[[GLM5ForCausalLM], Any]) -> Any:
    return function(model)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Modules that are FSDP units, the model itself first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def local_slice(tensor: Tensor) -> ShardSlice:
    """This rank's slice of a parameter; a plain tensor is its own whole slice."""
    if not isinstance(tensor, DTensor):
        sizes = tuple(tensor.shape)
        return ShardSlice(sizes, (0,) * len(sizes), sizes)
    (placement,) = tensor.placements
    if not isinstance(placement, Shard) or placement.dim != 0:
        raise ValueError(f"parameters are sharded by rows, not as {placement}")
    rows, rank, size = tensor.shape[0], tensor.device_mesh.get_local_rank(), tensor.device_mesh.size()
    each = -(-rows // size)
    start = min(rank * each, rows)
    sizes = (min(start + each, rows) - start, *tensor.shape[1:])
    first, total = getattr(tensor, "expert_part", (0, rows))
    return ShardSlice((total, *tensor.shape[1:]), (first + start, *(0 for _ in sizes[1:])), sizes)


def own_parts(model: GLM5ForCausalLM) -> dict[str, tuple[Tensor, ShardSlice]]:
    """This rank's part and slice of every tensor in the `state_dict`, by name. Parameters and buffers are taken
    themselves: the copies in `state_dict` lose their attributes."""
    for module in fsdp_modules(model):
        module.reshard()
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    rows = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in own.items()}
    return {name: (rows[name].detach(), local_slice(own[name])) for name in model.state_dict()}


def fill_shards(model: GLM5ForCausalLM, source: WeightSource) -> None:
    """Give every shard of this rank its values."""
    parts = own_parts(model).items()
    source.fill({n: RowPart(rows, at.offsets[0], at.shape[0]) for n, (rows, at) in parts if not at.empty})


def export_shards(model: GLM5ForCausalLM, path: Path, more: Callable[[Path], None], ranks: Ranks) -> None:
    """Publish the checkpoint `path` of a sharded model; all ranks call. Every rank writes its own rows to the common
    files, so nothing is gathered. Buffers are the same on all ranks; rank 0 writes them, and what `more` adds."""
    with ExitStack() as publishing:

        def begin() -> Path:
            folder = publishing.enter_context(publish_dir(path))
            with torch.device("meta"):
                whole = GLM5ForCausalLM(model.config)
            begin_checkpoint(whole.cast(model.dtype), folder)
            return folder

        folder = ranks.on_main(begin)

        def write() -> None:
            if not folder.is_dir():
                raise CheckpointError(f"{folder} is not visible to rank {ranks.rank}; all ranks need the same storage.")
            copies = {n for n, p in model.named_parameters() if hasattr(p, "tied_copy")}
            own = {n: part for n, part in own_parts(model).items() if n not in copies}
            parts = {n: (t, at) for n, (t, at) in own.items() if ranks.writes_whole or at.sizes != at.shape}
            with disk_errors(path):
                write_rows(
                    folder, model.config, ((n, RowPart(t, at.offsets[0], at.shape[0])) for n, (t, at) in parts.items())
                )

        ranks.together(write, patient=True)

        def finish() -> None:
            more(folder)
            publishing.close()

        ranks.on_main(finish)


@torch.no_grad()
def unshard_model(
    model: GLM5ForCausalLM, experts: torch.distributed.ProcessGroup | None, keep: bool
) -> GLM5ForCausalLM:
    """A plain model with the weights of a sharded one, gathered parameter by parameter; all ranks must call. Without
    `keep`, the model stays on the meta device."""
    for module in fsdp_modules(model):
        module.reshard()
    with torch.device("meta"):
        plain = GLM5ForCausalLM(model.config)
    plain.census = dict(model.census)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    for module, key, name in parameter_slots(plain):
        tensor = own[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
        if hasattr(tensor, "expert_part") and experts is not None:
            whole = whole_stack(whole, experts)
        if not keep:
            continue
        whole = whole.cpu()
        if isinstance(tensor, nn.Parameter):
            whole = nn.Parameter(whole)
            whole.__dict__.update(getattr(module, key).__dict__)
        setattr(module, key, whole)
    return plain


def parameter_slots(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, attribute, full name) of every parameter and buffer."""
    for prefix, module in model.named_modules():
        for key, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            yield module, key, f"{prefix}.{key}" if prefix else key
