"""The training loop: an interrupted run ends like an uninterrupted one, and bad steps and bad disks are survived."""

from __future__ import annotations

import errno
import itertools
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import glm5.train.checkpoint as checkpoint
from glm5.config.recipe import GradientStage, OptimConfig
from glm5.data.packing import Batch
from glm5.errors import CheckpointError, DataError
from glm5.obs.metrics import read_metrics
from glm5.train.checkpoint import load_state, save_state
from glm5.train.loop import MAX_SKIPPED, build_optimizer, clip_gradients, train
from glm5.train.losses import language_loss

NOT_NUMBERS = ("time", "step_seconds", "optimizer_seconds", "tokens_per_second")


def batch_at(step: int) -> Batch:
    ids = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1000 + step))
    documents = torch.tensor([[0] * 7 + [1] * 5, [0] * 12])
    return Batch(ids, documents, torch.ones_like(ids, dtype=torch.bool))


def loss_for(bad_steps: tuple[int, ...] = (), bad: str = "loss") -> Callable[..., Any]:
    calls = itertools.count()

    def loss_of(model: Any, batch: Batch, ctx: Any) -> Any:
        loss, tally = language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=1)
        if next(calls) in bad_steps:
            if bad == "loss":
                return loss * float("nan"), tally
            # A finite loss whose gradient is not: sqrt at 0.
            return loss + (model.lm_head.weight * 0).sum().abs().sqrt(), tally
        return loss, tally

    return loss_of


def optim(steps: int = 7, save_every: int = 2, kind: str = "muon", **options: Any) -> OptimConfig:
    return OptimConfig(steps=steps, lr=1e-2, warmup=2, save_every=save_every, kind=kind, **options)  # type: ignore[arg-type]


def config(micro_rows: int | None = None, dtype: str = "float32", **options: Any) -> GradientStage:
    return GradientStage(name="stage", optim=optim(**options), micro_rows=micro_rows, dtype=dtype)  # type: ignore[arg-type]


def numbers_of(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in NOT_NUMBERS} for row in read_metrics(path)]


def assert_same(a: Any, b: Any) -> None:
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name]), name


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("stops", [[1], [3], [4, 5], [7], [2, 2, 5]])
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
def test_a_non_finite_step_is_skipped_and_counted(small: Any, stage_io: Any, bad: str) -> None:
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


def test_too_many_bad_steps_end_the_stage(small: Any, stage_io: Any) -> None:
    model, io = small(), stage_io()
    bad = tuple(range(1, 100))
    with pytest.raises(DataError, match=rf"{MAX_SKIPPED + 1} steps had a non-finite .*lower optim\.lr"):
        train(model, config(steps=50), io, batch_at, loss_for(bad))
    # The count survives an interruption: after resuming, as many more bad steps do not start from zero.
    with pytest.raises(DataError, match=f"{MAX_SKIPPED + 1} steps"):
        train(model, config(steps=50), stage_io(), batch_at, loss_for(tuple(range(100))))
    assert len(read_metrics(io.metrics.path)) == MAX_SKIPPED + 1


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


# ---------------------------------------------------------------------------------------------------- state on disk


@pytest.fixture
def saved(small: Any, tmp_path: Path) -> tuple[Path, Any, Any]:
    model = small(seed=4)
    optimizer = build_optimizer(model, optim())
    for step in range(2):
        batch = batch_at(step)
        model.zero_grad(set_to_none=True)
        language_loss(model, batch, model.context(batch.ids))[0].backward()
        optimizer.step()
    save_state(tmp_path / "state", model, optimizer, 2, {"numbers": {"loss": 1.5}})
    return tmp_path / "state", model, optimizer


def test_state_round_trip(saved: Any, small: Any) -> None:
    path, model, optimizer = saved
    other = small(seed=5)
    fresh = build_optimizer(other, optim())
    assert load_state(path, other, fresh) == (2, {"numbers": {"loss": 1.5}})
    assert_same(model, other)
    for mine, theirs in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        for p, q in zip(mine["params"], theirs["params"], strict=True):
            assert optimizer.state[p].keys() == fresh.state[q].keys()
            assert all(torch.equal(value, fresh.state[q][key]) for key, value in optimizer.state[p].items())
    assert load_state(path.with_name("absent"), other, fresh) is None


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_state_is_refused(saved: Any, small: Any, name: str, damage: str) -> None:
    path, model, optimizer = saved
    file = path / name
    raw = bytearray(file.read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 0x11
        file.write_bytes(raw)
    elif damage == "cut":
        file.write_bytes(raw[: len(raw) // 2])
    elif name != "manifest.json":
        file.unlink()
    else:  # without its manifest the content itself must be sound
        file.unlink()
        (path / "state.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError):
        load_state(path, model, optimizer)


def test_the_state_of_another_model_is_refused(saved: Any, small: Any) -> None:
    path, _, _ = saved
    for other in (small(hidden_size=16), small(num_hidden_layers=3)):
        with pytest.raises(CheckpointError, match="belongs to another model"):
            load_state(path, other, build_optimizer(other, optim()))


def fail_on_save(error: Exception) -> Callable[..., None]:
    def save_file(tensors: Any, path: str) -> None:
        Path(path).write_bytes(b"half of it")
        raise error

    return save_file


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), Exception("Error: I/O error: No space left (os error 28)")],
)
def test_a_full_disk_keeps_the_earlier_state(
    saved: Any, small: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    path, model, optimizer = saved
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.lm_head.weight += 1
    monkeypatch.setattr(checkpoint, "save_file", fail_on_save(error))
    with pytest.raises(CheckpointError, match=r"No space left .* what was saved before is intact"):
        save_state(path, model, optimizer, 3)
    assert load_state(path, model, optimizer) == (2, {"numbers": {"loss": 1.5}})
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in kept.items())
    assert [entry.name for entry in path.parent.iterdir()] == ["state"]


def test_a_real_limit_on_file_size_is_a_clear_error(saved: Any) -> None:
    path, model, optimizer = saved
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match="No space left"):
            save_state(path, model, optimizer, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_state(path, model, optimizer) == (2, {"numbers": {"loss": 1.5}})


def test_a_run_whose_disk_filled_up_resumes_with_the_same_numbers(
    small: Any, stage_io: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small(seed=1)
    train(whole, config(), stage_io("whole"), batch_at, loss_for())
    broken, real = small(seed=1), checkpoint.save_file
    calls = itertools.count()

    def second_fails(tensors: Any, path: str) -> None:
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", second_fails)
    with pytest.raises(CheckpointError):
        train(broken, config(), stage_io("broken"), batch_at, loss_for())
    state = json.loads((stage_io("broken").folder / "state" / "state.json").read_text())
    assert state["step"] == 2
    resumed = small(seed=50)
    train(resumed, config(), stage_io("broken"), batch_at, loss_for())
    assert_same(whole, resumed)
