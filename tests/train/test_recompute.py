"""Layers that are computed again in the backward pass: the same numbers in every place, and less memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glm5.config.layout_rules import recompute_problems, refuse
from glm5.config.optim import OptimConfig
from glm5.config.recipe import GradientStage
from glm5.data.packing import Batch
from glm5.errors import ConfigError
from glm5.model.context import packed_context
from glm5.model.layer_call import KEPT
from glm5.train.losses import IndexerLoss, language_loss
from glm5.train.router_balance import balance_loss

IDS = torch.randint(0, 40, (3, 24), generator=torch.Generator().manual_seed(5))
DOCUMENTS = torch.tensor([[0] * 14 + [1] * 10, [0] * 24, [0] * 20 + [-1] * 4])


VARIANTS = pytest.mark.parametrize(
    ("changes", "warmup"),
    [
        ({}, False),
        ({}, True),
        ({"use_dsa": False, "index_topk": None}, False),
        ({"num_hidden_layers": 4, "index_topk_freq": 2}, False),
    ],
    ids=["sparse", "warm-up", "dense", "shared indices"],
)


def everything(model: Any, recompute: Any, exact: bool, warmup: bool, monitored: bool = True) -> dict[str, Any]:
    """Loss, gradients and all that a step leaves with its context."""
    batch = Batch(IDS, DOCUMENTS, DOCUMENTS >= 0)
    ctx = packed_context(DOCUMENTS, exact=exact)
    ctx.router_stats, ctx.max_logits, ctx.recompute = [], {} if monitored else None, recompute
    watch = None
    if model.config.use_dsa:
        ctx.observer = watch = IndexerLoss(batch, 4)
        ctx.attend_dense = warmup
    model.zero_grad(set_to_none=True)
    loss, metrics = language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=3)
    loss = loss + 0.01 * balance_loss(ctx.router_stats, batch, model.config.n_routed_experts)
    if watch is not None:
        loss = loss + watch.total()
    loss.backward()
    stats = [t.detach() for layer in ctx.router_stats for t in (layer.scores, layer.experts)]
    numbers = metrics.numbers() | (watch.metrics.numbers() if watch else {})
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), "numbers": numbers, "stats": stats, "max": ctx.max_logits, "gradients": gradients}


@pytest.mark.parametrize("exact", [True, False])
@VARIANTS
def test_the_same_loss_gradients_and_statistics(
    small: Callable[..., Any], changes: dict[str, Any], warmup: bool, exact: bool
) -> None:
    kept, again = (everything(small(seed=2, **changes), recompute, exact, warmup) for recompute in (False, True))
    same(kept, again)
    assert kept["max"].keys() == again["max"].keys() and len(kept["max"]) > 2
    assert all(torch.equal(value, again["max"][layer]) for layer, value in kept["max"].items())


def test_layers_have_settings_of_their_own(small: Callable[..., Any]) -> None:
    """The same numbers, and attention runs twice exactly in the layers that are computed again."""
    with Operators() as kept_calls:
        kept = everything(small(seed=2), False, False, False)
    layers = small(seed=2).config.num_hidden_layers + 1
    with Operators() as calls:
        mixed = everything(small(seed=2), (True, "selective", *[False] * (layers - 2)), False, False)
    same(kept, mixed)
    more = calls.calls["aten::mm"] - kept_calls.calls["aten::mm"]
    with Operators() as every:
        everything(small(seed=2), True, False, False)
    assert 0 < more < every.calls["aten::mm"] - kept_calls.calls["aten::mm"]


def test_too_few_settings_are_refused(small: Callable[..., Any]) -> None:
    optim = OptimConfig(steps=1, lr=1e-3)
    stage = GradientStage(kind="pretrain", name="pretrain", optim=optim, recompute=(True, False))
    with pytest.raises(ConfigError, match="pretrain: recompute has 2 settings, and the model has"):
        refuse(recompute_problems(stage, small(seed=2).config))


class Operators(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.long
@VARIANTS
def test_selective_recomputation_repeats_nothing_expensive(
    small: Callable[..., Any], changes: dict[str, Any], warmup: bool
) -> None:
    """The same numbers; in forward and backward together, each kept operator runs as often as without recomputation."""
    found, calls = {}, {}
    for recompute in (False, "selective", True):
        with Operators() as operators:
            found[recompute] = everything(small(seed=2, **changes), recompute, False, warmup, monitored=False)  # type: ignore[arg-type]
        calls[recompute] = {name: operators.calls[name] for name in KEPT if operators.calls[name]}
    same(found[False], found["selective"])
    assert calls[False] == calls["selective"] and len(calls[False]) >= 3
    assert sum(calls[True].values()) > sum(calls[False].values())


def test_monitored_steps_recompute_whole_layers(small: Callable[..., Any]) -> None:
    kept, again = (everything(small(seed=2), recompute, False, False) for recompute in (False, "selective"))  # type: ignore[arg-type]
    same(kept, again)
    assert all(torch.equal(value, again["max"][layer]) for layer, value in kept["max"].items())


def same(kept: dict[str, Any], again: dict[str, Any]) -> None:
    assert torch.equal(kept["loss"], again["loss"])
    assert kept["numbers"] == again["numbers"]
    assert len(kept["stats"]) == len(again["stats"]) > 0
    assert all(torch.equal(a, b) for a, b in zip(kept["stats"], again["stats"], strict=True))
    assert sum(g is not None for g in kept["gradients"].values()) > 20
    for name, gradient in kept["gradients"].items():
        other = again["gradients"][name]
        assert (gradient is None and other is None) or torch.equal(gradient, other), name


def test_without_gradients_nothing_is_kept_or_repeated(small: Callable[..., Any]) -> None:
    model = small(seed=2)
    ctx = packed_context(DOCUMENTS)
    ctx.recompute = True
    plain = model.model(IDS, packed_context(DOCUMENTS))
    with torch.no_grad():
        assert torch.equal(model.model(IDS, ctx), plain)


PEAK = """
import sys, torch
from pathlib import Path
from glm5.config.model import GLM5Config
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))

ids = torch.zeros(8, 128, dtype=torch.long)

def run(layers):
    model = GLM5ForCausalLM(
        GLM5Config.preset("nano", num_hidden_layers=layers, num_nextn_predict_layers=0, index_topk=8)
    )
    ctx = packed_context(torch.zeros_like(ids))
    ctx.recompute = sys.argv[1] == "recompute"
    model.model(ids, ctx).sum().backward()
    return 8 * sum(p.numel() for p in model.parameters())

run(2)  # what one layer needs for itself stays with the process
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
grown = run(20)  # bytes of weights and gradients
print(memory("VmHWM") - before, grown)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured through /proc")
def test_peak_memory_is_lower(forks: Any) -> None:
    peaks = {}
    for mode in ("keep", "recompute"):
        peak, weights = map(int, forks.run(PEAK, mode).split())
        peaks[mode] = peak - weights
    assert peaks["keep"] > 50e6
    assert peaks["recompute"] < 0.75 * peaks["keep"], peaks  # a third, give or take what malloc keeps
