"""The training loop: an interrupted run ends like an uninterrupted one, and bad steps and bad disks are survived."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.config.optim import OptimConfig
from glm5.config.recipe import GradientStage
from glm5.data.packing import Batch
from glm5.errors import DataError
from glm5.obs.metrics import read_metrics
from glm5.train.loop import MAX_SKIPPED, TIMES, clip_gradients, train
from glm5.train.losses import language_loss

NOT_NUMBERS = ("time", *TIMES)


def batch_at(step: int) -> Batch:
    ids = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1000 + step))
    documents = torch.tensor([[0] * 7 + [1] * 5, [0] * 12])
    return Batch(ids, documents, torch.ones_like(ids, dtype=torch.bool))


def loss_for(bad_steps: tuple[int, ...] = (), bad: str = "loss") -> Callable[..., Any]:
    bad_ids = [batch_at(step).ids for step in bad_steps]

    def loss_of(model: Any, batch: Batch, ctx: Any) -> Any:
        loss, metrics = language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=1)
        if any(torch.equal(batch.ids, ids) for ids in bad_ids):
            if bad == "loss":
                return loss * float("nan"), metrics
            # A finite loss whose gradient is not: sqrt at 0.
            return loss + (model.lm_head.weight * 0).sum().abs().sqrt(), metrics
        return loss, metrics

    return loss_of


def optim(steps: int = 7, save_every: int = 2, kind: str = "muon", **options: Any) -> OptimConfig:
    return OptimConfig(steps=steps, lr=1e-2, warmup=2, save_every=save_every, kind=kind, **options)  # type: ignore[arg-type]


def config(micro_rows: int | None = None, dtype: str = "float32", **options: Any) -> GradientStage:
    return GradientStage(kind="pretrain", name="stage", optim=optim(**options), micro_rows=micro_rows, dtype=dtype)  # type: ignore[arg-type]


def numbers_of(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in NOT_NUMBERS} for row in read_metrics(path)]


def assert_same(a: Any, b: Any) -> None:
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name]), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("stops", "kind"),
    [(stops, "muon") for stops in ([1], [3], [4, 5], [7], [2, 2, 5])]
    + [([4, 5], "adamw")]
    + [pytest.param(stops, "adamw", marks=pytest.mark.slow) for stops in ([1], [3], [7], [2, 2, 5])],
)
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    small: Any, stage_io: Any, kind: str, stops: list[int]
) -> None:
    whole, io = small(seed=1), stage_io("whole")
    last = train(whole, config(kind=kind), io, batch_at, loss_for(), bias_rate=0.01)
    expected = numbers_of(io.metrics.path)
    for stop in stops:
        broken, io = small(seed=1), stage_io("broken", stop_after=stop)
        with pytest.raises(KeyboardInterrupt):
            train(broken, config(kind=kind), io, batch_at, loss_for(), bias_rate=0.01)
        io.metrics.close()
    # Where a state exists everything comes from it, so the process that resumes may start from other weights.
    resumed, io = small(seed=1 if max(stops) < 3 else 99), stage_io("broken")
    assert train(resumed, config(kind=kind), io, batch_at, loss_for(), bias_rate=0.01) == last
    assert_same(whole, resumed)
    assert numbers_of(io.metrics.path) == expected
    assert [row["step"] for row in expected] == list(range(1, 8))


def test_resuming_does_the_remaining_steps_only(small: Any, stage_io: Any) -> None:
    model, io = small(), stage_io(stop_after=5)
    with pytest.raises(KeyboardInterrupt):
        train(model, config(), io, batch_at, loss_for())
    asked: list[int] = []

    def watched(step: int) -> Batch:
        asked.append(step)
        return batch_at(step)

    train(model, config(), stage_io(), watched, loss_for())
    assert asked == [4, 5, 6]


def test_metrics_hold_the_schedule_and_the_load(small: Any, stage_io: Any) -> None:
    model, io = small(), stage_io()
    train(model, config(steps=5, schedule="linear", final_lr=1e-3), io, batch_at, loss_for(), bias_rate=0.01)
    rows = read_metrics(io.metrics.path)
    assert [row["lr"] for row in rows] == pytest.approx([5e-3, 1e-2, 1e-2, 5.5e-3, 1e-3])
    assert all(1.0 <= row["load_max"] <= 4.0 and row["grad_norm"] > 0 for row in rows)
    assert any(router.e_score_correction_bias.any() for _, router in model.routers())


def test_what_is_not_trainable_stands_still_and_is_free_again(small: Any, stage_io: Any) -> None:
    model, before = small(), small()
    train(
        model, config(steps=2), stage_io(), batch_at, loss_for(), trainable=lambda name: "lm_head" in name
    )  # fmt: skip
    moved = [n for n, t in model.state_dict().items() if not torch.equal(t, before.state_dict()[n])]
    assert moved == ["lm_head.weight"]
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_non_finite_step_is_skipped_and_counted(
    small: Any, stage_io: Any, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, io = small(), stage_io()
    states: list[dict[str, torch.Tensor]] = []

    def watched(step: int) -> Batch:
        states.append({name: t.clone() for name, t in model.state_dict().items()})
        return batch_at(step)

    train(model, config(steps=6), io, watched, loss_for((2, 4), bad), bias_rate=0.01)
    states.append(model.state_dict())
    for step in range(6):
        stood = all(torch.equal(t, states[step + 1][name]) for name, t in states[step].items())
        assert stood == (step in (2, 4)), step
    assert all(t.isfinite().all() for t in model.state_dict().values())
    rows = read_metrics(io.metrics.path)
    assert [row["skipped"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert rows[2]["grad_norm"] is None and rows[3]["grad_norm"] > 0
    name = "loss" if bad == "loss" else "lm_head.weight"
    assert [row.get(f"non_finite/{name}") for row in rows] == [None, None, 1, None, 1, None]
    assert f"stage: step 3 is skipped because of a non-finite value: the {bad}" in caplog.text


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_bad_step_leaves_the_optimizer_alone(small: Any, stage_io: Any, kind: str) -> None:
    """Six steps of which one is skipped end like the five others, at the rates they had."""
    skipped, plain, others = small(), small(), [0, 1, 2, 4, 5]
    options = dict(kind=kind, schedule="constant")
    train(skipped, config(steps=6, **options), stage_io("six"), batch_at, loss_for((3,)), bias_rate=0.01)
    io = stage_io("five")
    train(plain, config(steps=5, **options), io, lambda step: batch_at(others[step]), loss_for(), bias_rate=0.01)
    assert_same(skipped, plain)


def test_the_last_numbers_are_those_of_a_sound_step(small: Any, stage_io: Any) -> None:
    last = train(small(), config(steps=4), stage_io(), batch_at, loss_for((3,)))
    assert all(map(math.isfinite, last.values()))
    assert last["skipped"] == 1 and last["tokens_seen"] == 4 * 24


def test_too_many_bad_steps_end_the_stage(small: Any, stage_io: Any) -> None:
    model, io = small(), stage_io()
    bad = tuple(range(1, 100))
    with pytest.raises(DataError, match=rf"{MAX_SKIPPED + 1} steps had a non-finite .*lower optim\.lr"):
        train(model, config(steps=50), io, batch_at, loss_for(bad))
    # The count survives an interruption: after resuming, as many more bad steps do not start from zero.
    with pytest.raises(DataError, match=f"{MAX_SKIPPED + 1} steps"):
        train(model, config(steps=50), stage_io(), batch_at, loss_for(tuple(range(100))))
    assert len(read_metrics(io.metrics.path)) == MAX_SKIPPED + 1


def test_counters_go_on_over_resumes(small: Any, stage_io: Any) -> None:
    padded = replace(batch_at(0), documents=torch.tensor([[0] * 7 + [-1] * 5, [0] * 12]))
    for stop in (3, 4):
        with pytest.raises(KeyboardInterrupt):
            train(small(), config(), stage_io(stop_after=stop), lambda step: padded, loss_for())
    io = stage_io()
    last = train(small(), config(), io, lambda step: padded, loss_for())
    rows = read_metrics(io.metrics.path)
    assert [row["tokens_seen"] for row in rows] == [19 * step for step in range(1, 8)]
    assert last["tokens_seen"] == 19 * 7
    # The seconds of steps 3 to 7 stand on those of the state after step 2, which an earlier process had spent.
    seconds = [row["stage_seconds"] for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[-1] > seconds[1] > sum(row["step_seconds"] for row in rows[:2])


def test_evaluation_belongs_to_its_step_also_after_resuming(small: Any, stage_io: Any) -> None:
    def score(model: Any, step: int) -> dict[str, float]:
        assert not torch.is_grad_enabled()
        return {"held_out": score_of(model), "asked_at": step}

    options = dict(steps=6, evaluate_every=2, save_every=3)
    whole, io = small(seed=1), stage_io("whole")
    last = train(whole, config(**options), io, batch_at, loss_for(), evaluate=score)
    expected = numbers_of(io.metrics.path)
    assert [row["step"] for row in expected if "held_out" in row] == [2, 4, 6]
    assert last["held_out"] == score_of(whole) == expected[-1]["held_out"]
    assert expected[1]["held_out"] != expected[3]["held_out"]
    for stop in (2, 4, 5):
        with pytest.raises(KeyboardInterrupt):
            train(small(seed=1), config(**options), stage_io("cut", stop), batch_at, loss_for(), evaluate=score)
    io = stage_io("cut")
    assert train(small(seed=1), config(**options), io, batch_at, loss_for(), evaluate=score) == last
    assert numbers_of(io.metrics.path) == expected
    # Looking does not change what is looked at.
    unwatched = small(seed=1)
    train(unwatched, config(steps=6), stage_io("unwatched"), batch_at, loss_for())
    assert_same(whole, unwatched)


def score_of(model: Any) -> float:
    return float(model.lm_head.weight.detach().double().sum())


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_first_update_is_measured_once(small: Any, stage_io: Any, kind: str) -> None:
    io = stage_io()
    with pytest.raises(KeyboardInterrupt):
        train(small(), config(kind=kind, save_every=2), stage_io(stop_after=3), batch_at, loss_for())
    path = io.folder / "update_table.json"
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert {row["rule"] for row in rows} == ({"muon split", "muon", "adamw"} if kind == "muon" else {"adamw"})
    rms = {row["kind"]: row["update_rms"] for row in rows}
    assert rms["lm_head.weight"] == pytest.approx(1.0, abs=0.05)  # AdamW's first update is the gradient's sign
    assert sum(row["parameters"] for row in rows) == sum(p.numel() for p in small().parameters())
    path.unlink()
    train(small(), config(kind=kind), stage_io(), batch_at, loss_for())
    assert not path.exists()


def test_clipping_bounds_the_norm(small: Any) -> None:
    model = small()
    batch = batch_at(0)
    ctx = model.context(batch.ids)
    model.lm_head(model.model(batch.ids, ctx)).pow(2).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = sum(float(g.double().pow(2).sum()) for g in gradients) ** 0.5
    assert float(clip_gradients(model, 0.25)) == pytest.approx(norm, rel=1e-5)
    assert norm > 0.25
    assert sum(float(g.double().pow(2).sum()) for g in gradients) ** 0.5 == pytest.approx(0.25, rel=1e-4)
