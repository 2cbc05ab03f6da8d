"""Pre-training: what its batches hold, and that it learns."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest
import torch

from glm5.config.optim import OptimConfig
from glm5.config.recipe import CorpusStage, DsaStage, PretrainStage
from glm5.data.packing import Batch
from glm5.model.context import packed_context
from glm5.obs.metrics import read_metrics
from glm5.train import dsa_adapt, pretrain
from glm5.train.loop import TIMES
from glm5.train.losses import language_loss

OPTIM = OptimConfig(steps=25, lr=1e-2, final_lr=2e-3, warmup=3, save_every=0)


def pretrain_stage(**options: Any) -> PretrainStage:
    return PretrainStage(kind="pretrain", name="pre", optim=OPTIM, rows=3, row_length=64, **options)


def test_the_loss_has_no_saw(small: Any, tokenizer: Any, shard: Any, stage_io: Any) -> None:
    """Rows of all kinds share every step, so neighbouring steps have like losses although the kinds have not."""
    model, io = small(vocab_size=tokenizer.vocab_size, use_dsa=False, index_topk=None), stage_io()
    stage = pretrain_stage(corpus={"needle_share": 0.5}).model_copy(update={"rows": 4})
    pretrain.run(model, stage, shard, tokenizer, io, seed=3)
    losses = [row["loss"] for row in read_metrics(io.metrics.path)][10:]
    jumps = [abs(after - before) for before, after in pairwise(losses)]
    batch = pretrain.batches(shard, tokenizer, stage, seed=3)(99)
    kinds = [batch.loss_mask.all(1), ~batch.loss_mask.all(1)]
    parts = [Batch(batch.ids[rows], batch.documents[rows], batch.loss_mask[rows]) for rows in kinds]
    text, needles = (float(language_loss(model, part, model.context(part.ids))[0].detach()) for part in parts)
    assert max(jumps) < 0.5 * abs(text - needles), (max(jumps), text, needles)


def test_needle_rows_ask_only_for_what_the_document_has_said(tokenizer: Any, shard: Any) -> None:
    batch = pretrain.batches(shard, tokenizer, pretrain_stage(corpus={"needle_share": 1.0}), seed=0)(0)
    assert (batch.documents >= 0).all()
    found = 0
    for row in range(batch.ids.shape[0]):
        for number in range(int(batch.documents[row].max()) + 1):
            span = batch.documents[row] == number
            text = tokenizer.decode(batch.ids[row, span].tolist())
            mask = batch.loss_mask[row, span].tolist()
            assert len(text) == len(mask)  # one byte a token
            lines, at = text.split("\n"), 0
            for i, line in enumerate(lines):
                asked = mask[at : at + len(line) + 1]
                if any(asked):
                    assert all(asked)
                    assert any(earlier.startswith(line) for earlier in lines[:i])
                    found += 1
                at += len(line) + 1
    assert found > 3


def test_pretraining_lowers_the_loss(small: Any, tokenizer: Any, shard: Any, stage_io: Any) -> None:
    model = small(vocab_size=tokenizer.vocab_size, use_dsa=False, index_topk=None)
    io = stage_io()
    pretrain.run(model, pretrain_stage(mtp_depths=2, balance_weight=1e-3), shard, tokenizer, io, seed=0)
    rows = read_metrics(io.metrics.path)
    for key in ("loss", "mtp1_loss", "mtp2_loss"):
        assert rows[-1][key] < 0.6 * rows[0][key], key


def naive_balance(stats: list[Any], documents: torch.Tensor, experts: int) -> torch.Tensor:
    """Sum over experts of f_e P_e per row, as §2.4 of the GLM-4.5 report writes it; mean over rows and layers."""
    rows, length = documents.shape
    terms = []
    for layer in stats:
        for row in range(rows):
            tokens = [row * length + i for i in range(length) if documents[row, i] >= 0]
            shares = layer.scores[tokens] / layer.scores[tokens].sum(-1, keepdim=True)
            chosen = layer.experts[tokens]
            for e in range(experts):
                f = experts / (chosen.shape[1] * len(tokens)) * float((chosen == e).sum())
                terms.append(f * shares[:, e].mean())
    return torch.stack(terms).sum() / rows / len(stats)


@pytest.mark.parametrize("kind", ["pretrain", "dsa_sparse", "baseline"])
def test_the_balance_loss_reaches_the_gradient(
    small: Any, tokenizer: Any, shard: Any, stage_io: Any, kind: str
) -> None:
    """The gradient that a step ends with, less that without the loss, is that of the formula, for every parameter."""
    optim = OptimConfig(steps=1, lr=1e-3, kind="adamw", clip=1e9, save_every=0)
    options: dict[str, Any] = dict(name="pre", optim=optim, rows=2, row_length=32, mtp_depths=2)
    found: list[dict[str, torch.Tensor | None]] = []
    dense: dict[str, Any] = {} if kind == "dsa_sparse" else {"use_dsa": False, "index_topk": None}
    for weight in (0.0, 0.5):
        model = small(dtype=torch.float64, vocab_size=tokenizer.vocab_size, **dense)
        if kind == "pretrain":
            stage: CorpusStage = PretrainStage(kind="pretrain", balance_weight=weight, **options)
            pretrain.run(model, stage, shard, tokenizer, stage_io(str(weight)), seed=0)  # type: ignore[arg-type]
        else:
            stage = DsaStage(kind="dsa_sparse", balance_weight=weight, **options)
            of = dsa_adapt.run_stage if kind == "dsa_sparse" else dsa_adapt.run_baseline
            of(model, stage, pretrain.batches(shard, tokenizer, stage, 0), stage_io(str(weight)))
        found.append({name: p.grad for name, p in model.named_parameters()})
    model = small(dtype=torch.float64, vocab_size=tokenizer.vocab_size, **dense)
    batch = pretrain.batches(shard, tokenizer, stage, 0)(0)
    ctx = packed_context(batch.documents, exact=False)
    ctx.router_stats = []
    language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=2)
    assert len(ctx.router_stats) == 3  # the MoE layer, and the MTP layer at two depths
    (0.5 * naive_balance(ctx.router_stats, batch.documents, 4)).backward()
    gates = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None or ".indexer." in name:
            continue
        without, having = (gradients[name] for gradients in found)
        assert without is not None and having is not None
        assert torch.allclose(having - without, parameter.grad, rtol=1e-6, atol=1e-12), name
        gates += name.endswith("gate.weight") and float(parameter.grad.abs().max()) > 1e-6
    assert gates == 2


# --- what changes with the tokens

CHANGING: dict[str, Any] = dict(
    mtp_depths=1, mtp_weight=[[0, 0.3], [400, 0.0]], bias_rate=[[0, 0.01], [700, 0.0]], ramp={"rows": 1, "tokens": 600},
)  # fmt: skip


def test_the_batch_grows_and_leaves_out_no_row(tokenizer: Any, shard: Any) -> None:
    stage = pretrain_stage(ramp={"rows": 1, "tokens": 640})
    rows = pretrain.batches(shard, tokenizer, stage, seed=3)
    found = [rows(step) for step in range(12)]
    sizes = [batch.ids.shape[0] for batch in found]
    assert sizes == sorted(sizes) and set(sizes) == {1, 2, 3}
    assert [batch.before for batch in found] == [64 * sum(sizes[:step]) for step in range(12)]
    constant = pretrain.batches(shard, tokenizer, pretrain_stage(), seed=3)
    plain = torch.cat([constant(step).ids for step in range(12)])
    assert torch.equal(torch.cat([batch.ids for batch in found]), plain[: sum(sizes)])
    assert constant(7).before == 7 * 3 * 64
    # Once the batch is as large as it gets, it stays so.
    assert sum(sizes[: sizes.index(3)]) * 64 == pytest.approx(640, rel=0.2) and rows(10**6).ids.shape[0] == 3


def test_weights_and_rates_change_at_their_tokens_and_resume_exactly(
    small: Any, tokenizer: Any, shard: Any, stage_io: Any
) -> None:
    optim = OPTIM.model_copy(update={"steps": 10, "save_every": 1})
    stage = PretrainStage(kind="pretrain", name="pre", optim=optim, rows=3, row_length=64, **CHANGING)
    fresh = functools.partial(small, vocab_size=tokenizer.vocab_size, use_dsa=False, index_topk=None)
    whole, io = fresh(), stage_io("whole")
    pretrain.run(whole, stage, shard, tokenizer, io, seed=0)
    expected = [{k: v for k, v in row.items() if k not in (*TIMES, "time")} for row in read_metrics(io.metrics.path)]
    before = [0, *(int(row["tokens_seen"]) for row in expected)]
    assert before[1] == 64 and before[-1] - before[-2] == 3 * 64
    assert [("mtp1_loss" in row) for row in expected] == [tokens < 400 for tokens in before[:-1]]
    # A bias moves by the rate or not at all: a multiple of it, and no further than the steps before 700 tokens.
    moved = whole.routers()[0][1].e_score_correction_bias.abs() / 0.01
    steps = sum(tokens < 700 for tokens in before[:-1])
    assert 0 < moved.max() <= steps + 1e-4 < 10 and torch.allclose(moved, moved.round(), atol=1e-4)
    for stop in (2, 4, 5, 7, 9):  # within the ramp, and on both sides of every change
        with pytest.raises(KeyboardInterrupt):
            pretrain.run(fresh(), stage, shard, tokenizer, stage_io("cut", stop), seed=0)
    model, io = fresh(), stage_io("cut")
    pretrain.run(model, stage, shard, tokenizer, io, seed=0)
    rows = [{k: v for k, v in row.items() if k not in (*TIMES, "time")} for row in read_metrics(io.metrics.path)]
    assert rows == expected
    for name, tensor in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
