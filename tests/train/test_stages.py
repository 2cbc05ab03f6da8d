"""Pre-training: what its batches hold, and that it learns."""

from __future__ import annotations

from typing import Any

import torch

from glm5.config.recipe import OptimConfig, PretrainStage
from glm5.data.loader import StreamLoader
from glm5.obs.metrics import read_metrics
from glm5.seeds import derive_seed
from glm5.train import pretrain

OPTIM = OptimConfig(steps=25, lr=1e-2, final_lr=2e-3, warmup=3, save_every=0)


def pretrain_stage(**options: Any) -> PretrainStage:
    return PretrainStage(kind="pretrain", name="pre", optim=OPTIM, rows=3, row_length=64, **options)


def test_needle_steps_take_their_share_and_cost_no_corpus(tokenizer: Any, shard: Any) -> None:
    stage = pretrain_stage(corpus={"needle_share": 0.4})
    batch_of = pretrain.batches(shard, tokenizer, stage, seed=3)
    corpus = StreamLoader(shard, rows=3, row_length=64, seed=derive_seed(3, "corpus", "pre"))
    needles, served = [], 0
    for step in range(25):
        batch = batch_of(step)
        if not bool(batch.loss_mask.all()):
            needles.append(step)
        else:
            assert torch.equal(batch.ids, corpus.batch(served).ids)
            served += 1
    assert len(needles) == 10
    again = pretrain.batches(shard, tokenizer, stage, seed=3)
    assert torch.equal(again(needles[4]).ids, batch_of(needles[4]).ids)
    assert not torch.equal(again(needles[4]).ids, again(needles[5]).ids)


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
                    name = line.split(" = ")[0]
                    assert asked[: len(name) + 3] == [False] * (len(name) + 3) and all(asked[len(name) + 3 :])
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


def test_the_balance_loss_reaches_the_gradient(small: Any, tokenizer: Any, shard: Any, stage_io: Any) -> None:
    ends = []
    for weight in (0.0, 1.0):
        model = small(vocab_size=tokenizer.vocab_size)
        stage = pretrain_stage(balance_weight=weight, mtp_depths=0, bias_rate=0.0)
        stage = stage.model_copy(update={"optim": OPTIM.model_copy(update={"steps": 1})})
        pretrain.run(model, stage, shard, tokenizer, stage_io(str(weight)), seed=0)
        ends.append(model.state_dict()["model.layers.1.mlp.gate.weight"])
    assert not torch.equal(*ends)
