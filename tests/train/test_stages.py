"""Pre-training and SFT: what their batches hold, and that they learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.config.recipe import FamilyConfig, OptimConfig, PretrainStage, SftStage
from glm5.data.loader import StreamLoader
from glm5.errors import DataError
from glm5.obs.metrics import read_metrics
from glm5.seeds import derive_seed
from glm5.train import pretrain, sft

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


# ------------------------------------------------------------------------------------------------------------- SFT


def sft_stage(**options: Any) -> SftStage:
    return SftStage(kind="sft", name="sft", optim=OPTIM, rows=2, row_length=80, **options)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=30), st.integers(0, 2))
def test_every_conversation_comes_once_per_epoch(lengths: list[int], seed: int) -> None:
    rows = [([i] * n, [True] * n) for i, n in enumerate(lengths)]
    batch_of = sft.row_batches(rows, sft_stage(), seed)
    order: list[int] = []
    step = 0
    while len(order) < 3 * len(rows):
        batch = batch_of(step)
        step += 1
        names = [
            (row, number) for row in range(batch.ids.shape[0]) for number in range(int(batch.documents[row].max()) + 1)
        ]
        here = [int(batch.ids[r][batch.documents[r] == n][0]) for r, n in names]
        used = sum(lengths[i] for i in here)
        assert used <= 160
        for (r, n), i in zip(names, here, strict=True):
            assert batch.ids[r][batch.documents[r] == n].tolist() == [i] * lengths[i]
        order += here
    counts = [order.count(i) for i in range(len(rows))]
    assert max(counts) - min(counts) <= 2  # the last batches may reach into the next epoch
    direct = sft.row_batches(rows, sft_stage(), seed)(step - 1)
    assert torch.equal(direct.ids, batch_of(step - 1).ids)


def test_generated_conversations_follow_the_weights() -> None:
    families = [
        FamilyConfig(name="arithmetic", weight=3.0, options={"levels": [1], "thinking": True}),
        FamilyConfig(name="toolcall", weight=1.0, render_tools=False),
        FamilyConfig(name="toolcall", weight=1.0),
    ]
    found = sft.generated_conversations(sft_stage(families=families, conversations=50), seed=0)
    assert len(found) == 50
    assert [c.thinking for c in found] == [True] * 30 + [False] * 20
    assert [bool(c.tools) for c in found] == [False] * 40 + [True] * 10
    assert found == sft.generated_conversations(sft_stage(families=families, conversations=50), seed=0)


def test_sft_learns_leaves_indexers_alone_and_reuses_its_file(
    small: Any, tokenizer: Any, stage_io: Any, tmp_path: Path
) -> None:
    families = [FamilyConfig(name="arithmetic", options={"levels": [1], "thinking": False})]
    stage = sft_stage(families=families, conversations=40)
    model, io = small(vocab_size=tokenizer.vocab_size), stage_io()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    sft.run(model, stage, tokenizer, io, seed=0)
    rows = read_metrics(io.metrics.path)
    assert rows[-1]["loss"] < 0.6 * rows[0]["loss"]
    for name, tensor in model.state_dict().items():
        if ".indexer." in name:
            assert torch.equal(tensor, before[name]), name
    written = (io.folder / "conversations.jsonl").read_bytes()
    assert len(written.splitlines()) == 40 and json.loads(written.splitlines()[0])["thinking"] is False

    # The same file as `data` gives the same run.
    (tmp_path / "own.jsonl").write_bytes(written)
    other = small(vocab_size=tokenizer.vocab_size)
    sft.run(other, sft_stage(data=str(tmp_path / "own.jsonl")), tokenizer, stage_io("other"), seed=0)
    assert all(torch.equal(t, other.state_dict()[n]) for n, t in model.state_dict().items())
    with pytest.raises(DataError, match="does not exist"):
        sft.run(other, sft_stage(data=str(tmp_path / "no.jsonl")), tokenizer, stage_io("third"), seed=0)
