"""The model on an accelerator that this machine does not have, in a process of its own: autograd learns of a device
only before its first backward pass. Prints what `test_device_walk.py` checks, as JSON."""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from glm5.config.model import GLM5Config
from glm5.data.packing import Batch, StepCounts
from glm5.model.context import ForwardContext, LatentCache, packed_context, paged_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.offload import Offload
from glm5.ops import operators
from glm5.ops.dense import range_mask
from glm5.ops.operators import TORCH_FORMS
from glm5.ops.pages import Pages
from glm5.optim import Muon, muon_groups
from glm5.parallel.tensor import OwnExperts, divide_model
from glm5.platforms.simulated import DEVICE, Pretender, Pretending
from glm5.train.losses import IndexerLoss, language_loss, summed_logprobs
from glm5.train.router_balance import balance_loss, expert_loads, update_router_bias

LAYERS = dict(num_hidden_layers=2, first_k_dense_replace=1)
LONG = 202_752
FAKE = FakeTensorMode()

aten = torch.ops.aten
ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
NO_LAUNCHES = ALLOCATIONS | {aten._unsafe_view, aten.promote_types, torch.ops.prim.device}


def is_launch(func: Any) -> bool:
    """Whether an operator computes; one that returns views of its arguments or empty memory does not."""
    returns = func._schema.returns
    views = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return not views and func.overloadpacket not in NO_LAUNCHES


PLAIN = {"weight_form": None, "activation": None, "integers": None, "weight_queue": None}  # of experts


class Walk(TorchDispatchMode):
    """Counts the launches of an operator by its name, and passes every result to `look`. With `apart`, the torch forms
    of our operators run instead of counting as one."""

    def __init__(self, look: Callable[[str, Tensor], None] | None = None, *, apart: bool = False) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.look, self.apart = look, apart

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if self.apart and name.startswith("glm5."):
            with self:
                return TORCH_FORMS[name.removeprefix("glm5.")](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if is_launch(func):
            # The backward of a slice fills a whole gradient with zeros and copies a part into it.
            self.launches[name] += 2 if func.overloadpacket is aten.slice_backward else 1
        for tensor in tree_leaves(out) if self.look is not None else ():
            if isinstance(tensor, Tensor):
                self.look(name, tensor)
        return out


def move(model: nn.Module, tensor_like: Callable[[Tensor], Tensor]) -> nn.Module:
    """Replace all parameters and buffers by those that `tensor_like` makes of them; attributes of parameters stay."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = nn.Parameter(
                    tensor_like(parameter.data if parameter.device.type == "cpu" else parameter),
                    parameter.requires_grad,
                )
                moved.__dict__.update(parameter.__dict__)
                module._parameters[name] = moved
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = tensor_like(buffer)
    return model


# -------------------------------------------------------------------------------------------------- fake tensors


def fake_model(config: GLM5Config, dtype: torch.dtype) -> GLM5ForCausalLM:
    """A model of fake tensors on the device; no memory is used."""
    with torch.device("meta"):
        model = GLM5ForCausalLM(config).cast(dtype)
    with FAKE:
        move(model, lambda t: torch.empty(t.shape, dtype=t.dtype, device=DEVICE))
    return model


def fake_batch(rows: int, length: int) -> Batch:
    ids = torch.zeros(rows, length, dtype=torch.long, device=DEVICE)
    return Batch(ids, ids, ids == 0, step=StepCounts(rows, rows * length, (rows * length,) * 9))


def train(
    model: GLM5ForCausalLM, batch: Batch, *, watch: str = "", recompute: Any = False, offload: Offload | None = None
) -> ForwardContext:
    """Forward and backward of a training stage as in `Trainer`, with every loss that it can have."""
    ctx = packed_context(batch.documents, exact=False)
    ctx.router_stats, ctx.recompute, ctx.offload = [], recompute, offload
    ctx.max_logits = None if recompute == "selective" else {}
    observer = IndexerLoss(batch, model.config.index_topk or 0)
    if watch:
        ctx.observer, ctx.attend_dense = observer, watch == "dense"
    loss, _ = language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=1)
    loss = loss + 0.1 * balance_loss(ctx.router_stats, batch, model.config.n_routed_experts)
    (loss + observer.total() if watch else loss).backward()
    return ctx


def train_and_update(model: GLM5ForCausalLM, batch: Batch) -> None:
    ctx = train(model, batch)
    Muon(muon_groups(model)).step()
    loads = expert_loads(ctx.router_stats or [], batch.documents, model.config.n_routed_experts)
    update_router_bias(model, loads, 1e-3)


@torch.no_grad()
def score(model: GLM5ForCausalLM, batch: Batch) -> None:
    model(batch.ids)


def cached(model: GLM5ForCausalLM, ids: Tensor, *, exact: bool = False) -> ForwardContext:
    """The tokens `ids` [B, T] of new sequences, in pages."""
    (rows, length), device = ids.shape, ids.device
    cache = LatentCache(model.config, 8 * rows, 64, model.dtype, device=device)
    table = torch.arange(8 * rows, device=device).view(rows, 8)
    owners = torch.arange(rows, device=device).repeat_interleave(length)
    positions = torch.arange(length, device=device).expand(rows, -1)
    return paged_context(cache, Pages(table, owners, 64, 6), positions, longest=512, exact=exact)


@torch.no_grad()
def decode(model: GLM5ForCausalLM, batch: Batch) -> None:
    model.model(batch.ids, cached(model, batch.ids))


@torch.no_grad()
def decode_part(model: GLM5ForCausalLM, batch: Batch) -> None:
    """On one of two ranks of tensor parallelism."""
    divide_model(model, 1, 2, lambda share, exact: share)
    decode(model, batch)


GROUPED = dict(name="glm4.5", num_experts_per_tok=4, **LAYERS)
SMALL_GROUPED = dict(attention_type="gqa", num_key_value_heads=2, head_dim=32, use_dsa=False, index_topk=None)
SMALL_GROUPED |= dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0)
PARTS: dict[str, tuple[dict[str, Any], Callable[[GLM5ForCausalLM, Batch], object]]] = {
    "pretraining and Muon": ({}, train_and_update),
    "sparse stage, recomputed": ({}, lambda m, b: train(m, b, watch="sparse", recompute=True)),
    "warm-up": ({}, lambda m, b: train(m, b, watch="dense")),
    "dense MLA": (dict(use_dsa=False), train),
    "GQA": (GROUPED, train),
    "Gated DeltaNet": (GROUPED | dict(attention_pattern="FS", efficient_attention="gdn"), train),
    "SimpleGDN": (GROUPED | dict(attention_pattern="FS", efficient_attention="simple_gdn"), train),
    "scoring": ({}, score),
    "decoding": ({}, decode),
    "decoding, one of two ranks": ({}, decode_part),
}


def walk(dtype: torch.dtype) -> dict[str, str]:
    """What went wrong in each part, "" if nothing did: in bf16 in the torch forms of our operators, in fp32 with the
    operators as they are. The last two parts must go wrong."""
    parts = PARTS | {
        "a wait": ({}, lambda _, batch: batch.ids.sum().item()),
        "another device": ({}, lambda _, batch: batch.ids + torch.ones(1)),
    }
    found = {}
    for name, (changes, run) in parts.items():
        config = GLM5Config.preset(**{"name": "nano", "n_routed_experts": 16, **LAYERS, **changes})
        model = fake_model(config, dtype)
        try:
            with FAKE, Walk(on_device, apart=dtype == torch.bfloat16) as walked:
                run(model, fake_batch(2, 96))
            found[name] = "" if walked.launches else "nothing was launched"
        except Exception as error:
            where = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
            found[name] = f"{type(error).__name__}: {error} at {[w for w in where if '/glm5/' in w][-3:]}"
    return found


def on_device(name: str, tensor: Tensor) -> None:
    """A number may come from the CPU, a tensor may not (torch 2.11 makes an empty one when it recomputes)."""
    if tensor.device.type != DEVICE and tensor.ndim and tensor.numel():
        raise RuntimeError(f"{name} returns {list(tensor.shape)} on {tensor.device}")


def layer(length: int, which: int, look: Callable[[str, Tensor], None] | None, apart: bool, watch: str) -> Any:
    """Launches of forward and backward of one layer of GLM-5 in bf16, by operator. Positions and ranges of keys are
    computed before: all layers share them."""
    config = GLM5Config.preset("glm5", **LAYERS)
    model = fake_model(config, torch.bfloat16)
    with FAKE:
        batch = fake_batch(1, length)
        ctx = packed_context(batch.documents, exact=False)
        block: Any = model.model.layers[which]
        ctx.rope(block.self_attn.rope_dim, block.self_attn.theta), ctx.key_range()
        observer = IndexerLoss(batch, config.index_topk or 0)
        if watch:
            ctx.observer, ctx.attend_dense = observer, watch == "dense"
        x = torch.randn(length, config.hidden_size, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        before, forward, backward = x * 1, Walk(look, apart=apart), Walk(look, apart=apart)
        with forward:
            out, _ = block(before, ctx, None)
        loss = (out * out).sum() + (observer.total() if watch else 0.0)
        with backward:
            loss.backward()
    return {"forward": forward.launches, "backward": backward.launches}


@torch.no_grad()
def decoding() -> Counter[str]:
    """Launches of the attention of one layer of GLM-5 in bf16, for a new token of each of 64 sequences."""
    model = fake_model(GLM5Config.preset("glm5", **LAYERS), torch.bfloat16)
    with FAKE, Walk() as walked:
        ctx, attention = cached(model, fake_batch(64, 1).ids), model.model.layers[1].self_attn
        ctx.rope(attention.rope_dim, attention.theta), ctx.key_range()
        x = torch.zeros(64, model.config.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        walked.launches.clear()
        attention(x, ctx, None)
    return walked.launches


def sizes(apart: bool) -> dict[str, list[str]]:
    """Tensors that are too large at `LONG` tokens, in one layer at a time, in the loss, and in what must be found. The
    warm-up takes minutes, even if our operators are not taken apart."""
    operators.DEVICE_ELEMENTS = LONG * 8 * 6144  # few blocks, as large as they may be
    parts = [("dense feed-forward", 0, ""), ("experts", 1, ""), ("sparse stage", 1, "sparse")]
    found: dict[str, list[str]] = {}
    for name, which, watch in [*parts, ("warm-up", 0, "dense")] if apart else parts:
        found[name] = []
        layer(LONG, which, functools.partial(too_large, found[name]), apart, watch)
    model = fake_model(GLM5Config.preset("glm5", **LAYERS), torch.bfloat16)
    found["loss"], found["mask"] = [], []
    with FAKE:
        batch = fake_batch(1, LONG)
        with Walk(functools.partial(too_large, found["loss"]), apart=apart):
            hidden = torch.randn(LONG, 6144, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
            summed_logprobs(model, hidden, *batch.targets()).backward()
        with Walk(functools.partial(too_large, found["mask"])):
            range_mask(packed_context(batch.documents).key_range(), LONG)
    return found


def too_large(bad: list[str], name: str, tensor: Tensor) -> None:
    growing = [size for size in tensor.shape if size >= LONG // 4 and size != 154_880]
    if len(growing) > 1 or tensor.numel() > LONG * 8 * 6144:
        bad.append(f"{name} {list(tensor.shape)}")


# -------------------------------------------------------------------------------------------------- real numbers


def equal(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """How far the device's path is from the CPU's, for nano: the loss, and the gradients against their norm."""
    found = {}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(512, (2, 60), generator=generator)
    documents = torch.zeros_like(ids)
    documents[0, 20:], documents[0, 21:], documents[1, 50:] = 1, 2, -1  # one of a single token; padding
    batch = Batch(ids, documents, torch.rand(ids.shape, generator=generator) < 0.8)
    batch = replace(batch, step=batch.counts())
    for name, changes, watch in (
        ("sparse stage", dict(index_topk=5), "sparse"),
        ("warm-up", {}, "dense"),
        ("dense MLA", dict(use_dsa=False), ""),
        ("GQA", SMALL_GROUPED, ""),
    ):
        config = GLM5Config.preset("nano", n_routed_experts=16, **LAYERS, **changes)
        ours, theirs = (GLM5ForCausalLM(config, seed=3).cast(dtype) for _ in range(2))
        move(theirs, Pretender)
        numbers = measured(ours, batch, watch)
        with Pretending():
            moved = replace(batch, **{n: Pretender(getattr(batch, n)) for n in ("ids", "documents", "loss_mask")})
            others = tree_map_only(Pretender, lambda t: t.held, measured(theirs, moved, watch))
        norm = sum(float(t.double().square().sum()) for n, t in numbers.items() if n.startswith("grad")) ** 0.5
        assert numbers.keys() == others.keys()
        found[name] = {"norm": norm, "loads": float(torch.equal(numbers.pop("loads"), others.pop("loads")))} | {
            n: float((t.double() - others[n].double()).norm()) for n, t in numbers.items()
        }
    return found


def measured(model: GLM5ForCausalLM, batch: Batch, watch: str) -> dict[str, Tensor]:
    with torch.no_grad():
        numbers = {"logits": model(batch.ids).logits}
        for exact in (False, True) if model.config.selects_keys else (False,):
            ctx = cached(model, batch.ids, exact=exact)
            numbers[f"cached, exact={exact}"] = ctx.rows(model.model(batch.ids, ctx))
        moe: Any = model.model.layers[1].mlp
        x = model.model.embed_tokens(batch.ids.flatten())
        weights, experts, _ = moe.gate(x)
        for rank in range(2):
            stacks = {n: p.chunk(2)[rank] for n, p in moe.experts.named_parameters()}
            share: Any = OwnExperts(len(stacks["down_proj"]) * rank)
            numbers[f"experts of rank {rank}"] = share(
                SimpleNamespace(**stacks, **PLAIN), x, weights, experts, lambda: x
            )
    ctx = train(model, batch, watch=watch)
    loads = expert_loads(ctx.router_stats or [], batch.documents, model.config.n_routed_experts)
    numbers |= {f"grad of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    numbers |= {f"logits of layer {n}": t for n, t in (ctx.max_logits or {}).items()}
    numbers["loads"] = torch.stack([*loads.values()])
    Muon(muon_groups(model), lr=1e-2).step()
    return numbers | {f"weight {n}": p.detach() for n, p in model.named_parameters()}


if __name__ == "__main__":
    job, argument = sys.argv[1:]
    if job == "launches":
        found = {name: layer(4096, 1, None, False, watch) for name, watch in (("plain", ""), ("sparse", "sparse"))}
        print(json.dumps(found | {"decoding": decoding()}))
    elif job == "sizes":
        print(json.dumps(sizes(argument == "apart")))
    else:
        print(json.dumps({"walk": walk, "equal": equal}[job](getattr(torch, argument))))
