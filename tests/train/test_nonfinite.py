"""A step that is not finite names its culprit: weight, module or gradient; every rank skips it together."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from glm5.config.model import GLM5Config
from glm5.config.optim import OptimConfig
from glm5.config.parallel import Layout
from glm5.config.recipe import GradientStage
from glm5.data.packing import Batch
from glm5.errors import DataError
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import read_metrics
from glm5.optim import Muon
from glm5.parallel.ranks import Ranks
from glm5.train.loop import Trainer, train
from glm5.train.losses import language_loss
from glm5.train.nonfinite import bad_gradient, bad_module, bad_weight

T = TypeVar("T")
DENSE = dict(use_dsa=False, index_topk=None)


def batch_at(step: int, rows: int = 2) -> Batch:
    ids = torch.randint(0, 40, (rows, 12), generator=torch.Generator().manual_seed(1000 + step))
    documents = torch.tensor([[0] * 7 + [1] * 3 + [-1] * 2] * rows)
    return Batch(ids, documents, torch.ones_like(ids, dtype=torch.bool))


def loss_of(model: Any, batch: Batch, ctx: Any) -> Any:
    return language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=1)


def stage(steps: int = 4, micro_rows: int | None = None, **options: Any) -> GradientStage:
    optim = OptimConfig(**{"steps": steps, "lr": 1e-2, "save_every": 1, **options})
    return GradientStage(kind="pretrain", name="stage", optim=optim, micro_rows=micro_rows)


GROUPED = dict(attention_type="gqa", num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=40)
GROUPED |= dict(hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, n_routed_experts=4)
GROUPED |= dict(num_experts_per_tok=2, first_k_dense_replace=1, num_nextn_predict_layers=1, rope_theta=1e4)
GROUPED |= dict(max_position_embeddings=64)
HYBRID = dict(attention_pattern="SF", efficient_attention="gdn", **GROUPED)


@pytest.mark.parametrize("options", [{}, DENSE, GROUPED, HYBRID], ids=["dsa", "dense", "gqa", "gdn"])
def test_a_sound_model_has_no_culprit(small: Any, options: dict[str, Any]) -> None:
    """Whatever its attention masks and pads, outputs of modules are finite."""
    grouped = "attention_type" in options
    model = GLM5ForCausalLM(GLM5Config.build(options, where="test")) if grouped else small(**options)
    batch = batch_at(0)
    for exact in (True, False):
        ctx = packed_context(batch.documents, exact=exact)
        ctx.router_stats = []
        assert bad_module(model, lambda ctx=ctx: loss_of(model, batch, ctx)) is None  # type: ignore[misc]
    loss_of(model, batch, packed_context(batch.documents))[0].backward()
    assert bad_weight(model) is None and bad_gradient(model) is None
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens",
        "model.layers.0.self_attn.kv_a_proj_with_mqa",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.input_layernorm",
        "model.layers.1.mlp.experts",
        "model.layers.1.mlp.shared_experts.down_proj",
        "mtp.eh_proj",
    ],
)
def test_the_first_module_is_named(small: Any, name: str) -> None:
    """Each module in turn overflows although all weights are finite."""
    model, batch = small(), batch_at(0)

    def overflow(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.where(torch.arange(output.shape[-1]) == 3, float("inf"), 1.0)

    names = dict(model.named_modules())
    handle = names[name].register_forward_hook(overflow)
    assert bad_module(model, lambda: loss_of(model, batch, packed_context(batch.documents))) == name
    handle.remove()
    assert bad_module(model, lambda: loss_of(model, batch, packed_context(batch.documents))) is None


def test_code_between_modules_is_told_apart(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = small(**DENSE), batch_at(0)
    attend = model.model.layers[1].self_attn.o_proj.forward
    monkeypatch.setattr(model.model.layers[1].self_attn.o_proj, "forward", lambda x: attend(x))
    handle = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda module, inputs: inputs[0] / 0)
    found = bad_module(model, lambda: loss_of(model, batch, packed_context(batch.documents)))
    handle.remove()
    assert found == "model.layers.1.self_attn.o_proj (already its input)"


def test_weights_buffers_and_gradients_by_name(small: Any) -> None:
    model = small()
    with torch.no_grad():
        model.model.layers[1].mlp.gate.e_score_correction_bias[2] = float("nan")
    assert bad_weight(model) == "model.layers.1.mlp.gate.e_score_correction_bias"
    with torch.no_grad():
        model.lm_head.weight[3, 4] = float("inf")
    assert bad_weight(model) == "lm_head.weight"
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert bad_gradient(model) is None
    model.model.layers[1].mlp.experts.down_proj.grad[0, 1, 2] = -float("inf")
    model.lm_head.weight.grad[0, 0] = float("nan")
    assert bad_gradient(model) == "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize("micro_rows", [None, 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_report_of_a_step(
    small: Any, stage_io: Any, caplog: pytest.LogCaptureFixture, where: str, micro_rows: int | None
) -> None:
    """On one step, in the last row alone, a module overflows forward or backward."""
    model, name = small(), "model.layers.1.self_attn.o_proj"
    module, marked = model.get_submodule(name), batch_at(2).ids[1]
    seen = []

    def watched(model: Any, batch: Batch, ctx: Any) -> Any:
        seen.append(bool((batch.ids == marked).all(1).any()))
        return loss_of(model, batch, ctx)

    def spoil(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not seen[-1]:
            return output
        if where == "forward":
            return output * float("inf")
        if output.requires_grad:  # finite values, but a gradient of infinity on the way back
            output.register_hook(lambda grad: grad * float("inf"))
        return output

    module.register_forward_hook(spoil)
    io = stage_io()
    train(model, stage(micro_rows=micro_rows), io, batch_at, watched)
    rows = read_metrics(io.metrics.path)
    # Backward runs from the end, so the gradients before the module in the model's order are all spoilt.
    culprit = name if where == "forward" else "model.embed_tokens.weight"
    assert [row.get(f"non_finite/{culprit}") for row in rows] == [None, None, 1, None]
    sort = "output" if where == "forward" else "gradient"
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        f"stage: step 3 is skipped because of a non-finite value: the {sort} of {culprit}."
    ]
    assert bad_weight(model) is None


def test_an_error_that_does_not_come_back_is_called_one(small: Any, stage_io: Any) -> None:
    """As a machine makes them: the gradient is broken once, and whole when it is computed again."""
    model, broken = small(), []

    def once(grad: torch.Tensor) -> torch.Tensor:
        broken.append(len(broken))
        return grad * float("nan") if len(broken) == 2 else grad

    model.lm_head.weight.register_hook(once)
    io = stage_io()
    train(model, stage(), io, batch_at, loss_of)
    rows = read_metrics(io.metrics.path)
    assert [row.get("non_finite/gradient") for row in rows] == [None, 1, None, None]


@pytest.mark.parametrize(("broken", "save_every"), [(3, 1), (3, 0), (5, 0)], ids=["saved", "next", "last"])
def test_a_broken_weight_ends_the_stage_by_name(
    small: Any, stage_io: Any, monkeypatch: pytest.MonkeyPatch, broken: int, save_every: int
) -> None:
    """An update overflows. It is found before it can be saved, or by the next step, or at the end of the stage."""
    model, io, config = small(), stage_io(), stage(steps=5, save_every=save_every)
    name = "model.layers.0.mlp.down_proj.weight"
    update, updates = Muon.step, []

    def overflow(optimizer: Muon) -> None:
        update(optimizer)
        updates.append(1)
        if len(updates) == broken:
            with torch.no_grad():
                model.get_parameter(name)[1] *= 1e30
                model.get_parameter(name)[1] *= 1e30

    monkeypatch.setattr(Muon, "step", overflow)
    sentence = f"stage: the weight {re.escape(name)} is not finite after the update of step {broken}; .* optim.lr"
    with pytest.raises(DataError, match=sentence):
        train(model, config, io, batch_at, loss_of)
    assert len(read_metrics(io.metrics.path)) == broken
    if save_every:
        fresh = small(seed=9)
        assert Trainer(fresh, config, io, loss_of, lambda name: True, 0.0).resume() == broken - 1
        assert bad_weight(fresh) is None


class Pair(Ranks):
    """Two ranks in two threads that exchange values in turn, so not also in the background."""

    world, layout = 2, Layout(async_save=False)

    def __init__(self, rank: int, barrier: threading.Barrier, shelf: dict[int, Any]) -> None:
        self.rank, self._barrier, self._shelf = rank, barrier, shelf

    def gather(self, value: T) -> list[T]:
        self._shelf[self.rank] = value
        self._barrier.wait(60)
        found = [self._shelf[0], self._shelf[1]]
        self._barrier.wait(60)
        return found

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = torch.stack(self.gather(tensor.clone())).sum(0)
        return tensor.copy_(total)


def on_two_ranks(run: Callable[[Ranks], None]) -> None:
    """Call `run` in two threads that form a `Pair`; an error of either is raised here."""
    barrier, shelf = threading.Barrier(2), {}
    errors: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            run(Pair(rank, barrier, shelf))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=call, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_all_ranks_skip_together(small: Any, stage_io: Any) -> None:
    """Only the second rank's row overflows; the first rank's weights do not move either, and it knows the name."""
    ios = [stage_io(f"rank{rank}") for rank in (0, 1)]
    models = [small(), small()]
    before: list[list[dict[str, torch.Tensor]]] = [[], []]
    marked = batch_at(1).ids[1]

    def run(ranks: Ranks) -> None:
        model, io = models[ranks.rank], ios[ranks.rank]
        object.__setattr__(io, "ranks", ranks)

        def watched(step: int) -> Batch:
            before[ranks.rank].append({name: t.clone() for name, t in model.state_dict().items()})
            return batch_at(step)

        def spoilt(model: Any, batch: Batch, ctx: Any) -> Any:
            bad = bool((batch.ids == marked).all(1).any())
            spoil = (lambda module, inputs, output: output * float("nan")) if bad else (lambda *_: None)
            handle = model.model.norm.register_forward_hook(spoil, prepend=True)
            try:
                return loss_of(model, batch, ctx)
            finally:
                handle.remove()

        train(model, stage(steps=3), io, watched, spoilt)

    on_two_ranks(run)
    for rank in (0, 1):
        rows = read_metrics(ios[rank].metrics.path)
        assert [row.get("non_finite/model.norm") for row in rows] == [None, 1, None]
        assert [row["skipped"] for row in rows] == [0, 1, 1]
        stood = [all(torch.equal(a[n], b[n]) for n in a) for a, b in zip(before[rank], before[rank][1:])]
        assert stood == [False, True]
