"""DSA adaptation: who learns from what, and that the indexer does learn."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from glm5.config.optim import OptimConfig
from glm5.config.recipe import DsaStage
from glm5.data.packing import Batch, pack_batch
from glm5.data.shards import Shard
from glm5.errors import ConfigError, DataError
from glm5.model.context import AllKeys, packed_context
from glm5.obs.metrics import read_metrics
from glm5.train import dsa_adapt
from glm5.train.losses import IndexerLoss, language_loss
from glm5.train.pretrain import batches


def stage(kind: str, steps: int, **options: Any) -> DsaStage:
    optim = OptimConfig(steps=steps, lr=5e-3, kind="adamw", weight_decay=0.0, clip=options.pop("clip", 1.0))
    values: dict[str, Any] = {"rows": 4, "row_length": 48, "mtp_depths": 1} | options
    return DsaStage(kind=kind, name="dsa", optim=optim, **values)  # type: ignore[arg-type]


def dense(small: Callable[..., Any], tokenizer: Any) -> Any:
    return small(vocab_size=tokenizer.vocab_size, use_dsa=False, index_topk=None, seed=5)


def changed(before: dict[str, torch.Tensor], after: Any) -> set[str]:
    return {name for name, tensor in after.state_dict().items() if not torch.equal(before[name], tensor)}


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_add_indexer_keeps_the_dense_weights(small: Any, tokenizer: Any) -> None:
    model = dense(small, tokenizer)
    adapted = dsa_adapt.add_indexer(model, 3, 4)
    assert adapted.config.use_dsa and adapted.config.index_topk == 4
    fresh = {name for name in adapted.state_dict() if name not in model.state_dict()}
    assert fresh and all(".indexer." in name for name in fresh)
    assert {name.split(".indexer.")[0] for name in fresh} == {
        "model.layers.0.self_attn", "model.layers.1.self_attn", "mtp.block.self_attn",
    }  # fmt: skip
    assert all(torch.equal(tensor, adapted.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_add_indexer_refuses_what_it_cannot_adapt(small: Any) -> None:
    with pytest.raises(ConfigError, match="already"):
        dsa_adapt.add_indexer(small(), 0, 4)
    with pytest.raises(ConfigError, match="at least 4"):
        dsa_adapt.add_indexer(small(use_dsa=False, index_topk=None), 0, 4, dim=2)
    gqa = {"attention_type": "gqa", "num_key_value_heads": 1, "head_dim": 8, "use_dsa": False, "index_topk": None}
    mla = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0)
    with pytest.raises(ConfigError, match="MLA"):
        dsa_adapt.add_indexer(small(**gqa, **mla), 0, 4)
    sized = dsa_adapt.add_indexer(small(use_dsa=False, index_topk=None), 0, 4, heads=3, dim=12)
    assert sized.model.layers[0].self_attn.indexer.wq_b.weight.shape == (36, 16)


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"micro_rows": 1}, {"recompute": True}],
    ids=["fp32", "bf16", "micro-batches", "recompute"],
)
def test_warmup_lowers_the_kl_and_moves_indexers_alone(
    small: Any, tokenizer: Any, shard: Any, stage_io: Any, options: dict[str, Any]
) -> None:
    model = dsa_adapt.add_indexer(dense(small, tokenizer), 3, 4)
    before = snapshot(model)
    io = stage_io()
    dsa_adapt.run(model, stage("dsa_warmup", 12, **options), shard, tokenizer, io, seed=0)
    moved = changed(before, model)
    assert moved == {name for name in before if ".indexer." in name}  # router biases stand still too
    rows = read_metrics(io.metrics.path)
    assert rows[-1]["indexer_kl"] < 0.7 * rows[0]["indexer_kl"]
    assert rows[-1]["indexer_recall"] > rows[0]["indexer_recall"] + 0.02
    assert all(0.0 <= row["indexer_recall"] <= 1.0 for row in rows)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", ["dsa_warmup", "dsa_sparse"])
@pytest.mark.parametrize("options", [{"micro_rows": 1}, {"micro_rows": 3}, {"recompute": True}], ids=str)
def test_parts_and_recomputation_add_up_to_the_whole_step(
    small: Any, tokenizer: Any, shard: Any, stage_io: Any, kind: str, options: dict[str, Any]
) -> None:
    """Gradients of the first step in float64, and all of its numbers."""
    found = []
    for index, some in enumerate(({}, options)):
        model = dsa_adapt.add_indexer(dense(small, tokenizer), 3, 4).cast(torch.float64)
        gradients: dict[str, torch.Tensor] = {}

        def keep(p: torch.Tensor, name: str, gradients: dict[str, torch.Tensor] = gradients) -> None:
            assert p.grad is not None
            gradients[name] = p.grad.clone()  # of all micro-batches so far

        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(functools.partial(keep, name=name))
        config = stage(kind, 1, mtp_depths=2, **some) if kind == "dsa_sparse" else stage(kind, 1, **some)
        numbers = dsa_adapt.run(model, config, shard, tokenizer, stage_io(f"r{index}"), seed=0)
        found.append((numbers, gradients))
    (numbers, gradients), (others, parts) = found
    assert gradients.keys() == parts.keys() and any(".indexer." in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-9, atol=1e-12)
    assert numbers.keys() == others.keys()
    for name, value in numbers.items():
        assert others[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("kind", ["dsa_warmup", "dsa_sparse"])
def test_layers_that_share_an_indexer_adapt(small: Any, tokenizer: Any, shard: Any, stage_io: Any, kind: str) -> None:
    sharing = {"num_hidden_layers": 4, "index_topk_freq": 2, "index_skip_topk_offset": 1}
    model = small(vocab_size=tokenizer.vocab_size, use_dsa=False, index_topk=None, **sharing)
    model = dsa_adapt.add_indexer(model, 3, 4)
    own = [layer for layer in range(5) if model.config.computes_topk(layer)]
    assert own == [0, 2, 4]  # layers 1 and 3 follow the one before them; 4 is the MTP layer
    before = snapshot(model)
    numbers = dsa_adapt.run(model, stage(kind, 2), shard, tokenizer, stage_io(), seed=0)
    assert math.isfinite(numbers["indexer_kl"]) and numbers["indexer_kl"] > 0
    if kind == "dsa_warmup":
        assert {name for name in numbers if "recall/" in name} == {f"indexer_recall/L{layer}" for layer in range(5)}
    assert any(".layers.2.self_attn.indexer." in name for name in changed(before, model))


def test_packed_documents_and_padding_count_as_documents_alone(small: Any) -> None:
    """The warm-up loss of packed rows is the mean over real tokens of what each document has by itself."""
    model = small(dtype=torch.float64, seed=2)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 40, (n,), generator=generator).tolist() for n in (17, 12, 9)]
    batch: Batch = pack_batch([(ids, [True] * len(ids)) for ids in documents], 24)[0]
    assert (batch.documents < 0).any() and (batch.documents == 1).any()

    def observe(rows: Batch) -> IndexerLoss:
        ctx = packed_context(rows.documents)
        ctx.observer, ctx.attend_dense = (watch := IndexerLoss(rows, 4)), True
        model.model(rows.ids, ctx)
        return watch

    whole = observe(batch)
    alone = [observe(pack_batch([(ids, [True] * len(ids))], len(ids))[0]) for ids in documents]
    tokens = [len(ids) for ids in documents]
    expected = sum(float(w.total().detach()) * n for w, n in zip(alone, tokens, strict=True)) / sum(tokens)
    assert float(whole.total().detach()) == pytest.approx(expected, rel=1e-12)
    crowded = [n - 4 for n in tokens]  # queries with more than 4 keys
    recall = sum(w.metrics.numbers()["indexer_recall"] * n for w, n in zip(alone, crowded, strict=True)) / sum(crowded)
    assert whole.metrics.numbers()["indexer_recall"] == pytest.approx(recall, rel=1e-6)


def test_sparse_stage_trains_everything(small: Any, tokenizer: Any, shard: Any, stage_io: Any) -> None:
    model = dsa_adapt.add_indexer(dense(small, tokenizer), 3, 4)
    before = snapshot(model)
    numbers = dsa_adapt.run(model, stage("dsa_sparse", 2), shard, tokenizer, stage_io(), seed=0)
    # Only k_norm's bias of an indexer may stand still: a constant added to every key changes no softmax by much.
    assert {name for name in before if not name.endswith("indexer.k_norm.bias")} <= changed(before, model)
    assert {"loss", "mtp1_loss", "indexer_kl", "load_max", "grad_norm"} <= numbers.keys()


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"micro_rows": 1, "mtp_depths": 3}, {"dtype": "bfloat16", "micro_rows": 3}],
    ids=["fp32", "bf16", "micro-batches and MTP", "bf16 micro-batches"],
)
def test_the_backbone_does_not_feel_the_indexer_loss(
    small: Any, tokenizer: Any, shard: Any, stage_io: Any, options: dict[str, Any]
) -> None:
    """One step with and without the KL: all but the indexers ends at the same bits."""
    ends = []
    for weight in (0.0, 1.0, 50.0):
        model = dsa_adapt.add_indexer(dense(small, tokenizer), 3, 4)
        config = stage("dsa_sparse", 1, indexer_weight=weight, **options)
        dsa_adapt.run(model, config, shard, tokenizer, stage_io(f"w{weight}"), seed=0)
        ends.append(snapshot(model))
    for name in ends[0]:
        if ".indexer." not in name:
            assert torch.equal(ends[0][name], ends[1][name]) and torch.equal(ends[0][name], ends[2][name]), name
    assert any(not torch.equal(ends[0][name], ends[1][name]) for name in ends[0] if ".indexer." in name)


def test_the_dense_baseline_takes_the_step_of_a_sparse_stage_that_drops_nothing(
    small: Any, tokenizer: Any, shard: Any, stage_io: Any
) -> None:
    """With index_topk over the whole row both attend to all keys, and so both backbones take the same steps."""
    model = dense(small, tokenizer)
    adapted = dsa_adapt.add_indexer(model, 3, 64)
    config = stage("dsa_sparse", 2)
    batch_at = batches(shard, tokenizer, config, 0)
    sparse = dsa_adapt.run_stage(adapted, config, batch_at, stage_io("sparse"))
    baseline = dsa_adapt.run_baseline(model, config, batch_at, stage_io("baseline"))
    assert baseline["loss"] == pytest.approx(sparse["loss"], abs=1e-5) and "indexer_kl" not in baseline
    ours = adapted.state_dict()
    for name, tensor in model.state_dict().items():
        assert (ours[name] - tensor).abs().mean() < 1e-5, name  # AdamW may flip the sign of a gradient near zero


def test_indexers_feel_nothing_but_their_own_loss(small: Any) -> None:
    model = small(dtype=torch.float64, seed=2)
    generator = torch.Generator().manual_seed(1)
    rows = [(torch.randint(0, 40, (n,), generator=generator).tolist(), [True] * n) for n in (17, 12, 9)]
    batch: Batch = pack_batch(rows, 24)[0]
    indexers = [p for n, p in model.named_parameters() if ".indexer." in n]
    backbone = [p for n, p in model.named_parameters() if ".indexer." not in n]

    def losses() -> tuple[torch.Tensor, torch.Tensor]:
        ctx = packed_context(batch.documents)
        ctx.observer = watch = IndexerLoss(batch, 4)
        language, _ = language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=2)
        assert len(watch.losses) == 2 + 2  # two trunk layers, and the MTP layer at two depths
        return language, watch.total()

    language, kl = losses()
    felt = torch.autograd.grad(language, indexers, allow_unused=True, retain_graph=True)
    assert all(g is None or not g.any() for g in felt)
    felt = torch.autograd.grad(kl, backbone, allow_unused=True, retain_graph=True)
    assert all(g is None or not g.any() for g in felt)
    ours = torch.autograd.grad(kl, indexers)
    # Finite differences of the KL alone, the selection held where it is by the tiny step.
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in indexers]
    slope = sum(float((g * d).sum()) for g, d in zip(ours, direction, strict=True))
    ends = []
    with torch.no_grad():
        for step in (1e-7, -2e-7):
            for p, d in zip(indexers, direction, strict=True):
                p += step * d
            ends.append(float(losses()[1]))
    assert abs((ends[0] - ends[1]) / 2e-7 - slope) < 1e-6 * max(1.0, abs(slope))
    assert abs(slope) > 1e-3


def text(*documents: list[int]) -> Shard:
    borders = np.cumsum([0, *map(len, documents)])
    return Shard(np.array([*itertools.chain(*documents)], np.uint16), borders, np.ones(len(documents), np.int64))


def test_held_out_rows_take_turns_over_long_documents() -> None:
    one, two, short = list(range(100, 110)), list(range(200, 207)), [1, 2]
    rows = dsa_adapt.held_out_rows(text(one, short, two), 3, 12)
    assert rows.ids.tolist() == [[100, 101, 102], [200, 201, 202], [103, 104, 105], [203, 204, 205]]
    assert rows.documents == 2
    assert dsa_adapt.held_out_rows(text(one, short, two), 8, 100).ids.tolist() == [one[:8]]
    line = dsa_adapt.held_out_rows(text([1, 2, 3], [4, 5], [6, 7]), 4, 100)
    assert line.documents == 0 and line.ids.tolist() == [[1, 2, 3, 4]]  # one line through documents that are too short
    with pytest.raises(DataError, match="7 tokens"):
        dsa_adapt.held_out_rows(text([1, 2, 3], [4, 5], [6, 7]), 8, 100)


def test_measures_equal_a_brute_force(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(dtype=torch.float64, seed=4)
    ids = torch.randint(0, 40, (3, 20), generator=torch.Generator().manual_seed(2))
    rows = dsa_adapt.HeldOut(ids, 3)
    logits = model(ids).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    monkeypatch.setattr(dsa_adapt, "FEW_TOKENS", 40)  # two forward passes
    losses = dsa_adapt.position_losses(model, rows)
    torch.testing.assert_close(losses.flatten(), expected.detach(), rtol=0, atol=1e-9)

    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    class Keep:
        def dense(self, layer: int, keys: AllKeys) -> None:
            logits = (keys.q @ keys.k.transpose(-1, -2) * keys.scale).masked_fill(~causal, -torch.inf)
            dots = torch.einsum("btjd,bsd->btjs", keys.index_q, keys.index_k) * keys.index_q.shape[-1] ** -0.5
            scores = torch.einsum("btj,btjs->bts", keys.index_w, dots.relu())
            seen[layer] = (logits.softmax(-1).mean(1), scores)

        def selected(self, *_: Any) -> None:
            raise AssertionError

        def noop(self) -> Keep:
            return self

    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    ctx = packed_context(torch.zeros_like(ids))
    ctx.observer, ctx.attend_dense = Keep(), True
    with torch.no_grad():
        model.mtp_hidden(ids.roll(-1, 1) * (torch.arange(20) < 19), model.model(ids, ctx), ctx)
    numbers = dsa_adapt.attention_mass(model, rows)
    for kind, index in (("oracle", 0), ("indexer", 1)):
        for k in (1, 2, 4, 8, 16):
            shares = []
            for pair in seen.values():
                for b in range(3):
                    for t in range(4, 20):  # queries that have more than 4 keys
                        by = sorted(range(t + 1), key=lambda s: (-float(pair[index][b, t, s]), s))[:k]
                        shares.append(float(pair[0][b, t, by].sum()))
            assert numbers[f"{kind}/{k}"] == pytest.approx(sum(shares) / len(shares), abs=1e-6), (kind, k)
    assert numbers["indexer_recall"] == pytest.approx(numbers["indexer/4"])
    kls = []
    for target, scores in seen.values():
        logq = scores.masked_fill(~causal, -torch.inf).log_softmax(-1)
        kls.append(torch.where(causal, target * (target.clamp_min(1e-300).log() - logq), 0.0).sum(-1).mean())
    assert numbers["indexer_kl"] == pytest.approx(float(sum(kls)) / len(kls), abs=1e-9)
    assert {key for key in numbers if "/L" in key} == {f"indexer_recall/L{layer}" for layer in (0, 1, 2)}
