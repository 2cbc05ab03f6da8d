"""State on disk: what is saved comes back, in any split; damage and lies are found; a sound earlier state is used."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from glm5.config.optim import OptimConfig
from glm5.config.recipe import GradientStage
from glm5.data.packing import Batch
from glm5.errors import CheckpointError
from glm5.files import write_manifest
from glm5.parallel.ranks import Ranks, ShardSlice
from glm5.train import shard_files
from glm5.train.checkpoint import load_state, save_state
from glm5.train.loop import build_optimizer, train
from glm5.train.losses import language_loss
from glm5.train.shard_files import check_files, index_of, parse_index, read_pieces, write_pieces

EXTRA = {"numbers": {"loss": 1.5}}


def batch_at(step: int) -> Batch:
    ids = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1000 + step))
    documents = torch.tensor([[0] * 7 + [1] * 5, [0] * 12])
    return Batch(ids, documents, torch.ones_like(ids, dtype=torch.bool))


def loss_of(model: Any, batch: Batch, ctx: Any) -> Any:
    return language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=1)


def optim(kind: str = "muon") -> OptimConfig:
    return OptimConfig(steps=7, lr=1e-2, warmup=2, save_every=2, kind=kind)  # type: ignore[arg-type]


def config() -> GradientStage:
    return GradientStage(kind="pretrain", name="stage", optim=optim())


def assert_same(a: Any, b: Any) -> None:
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name]), name


def step(model: Any, optimizer: Any, number: int) -> None:
    batch = batch_at(number)
    model.zero_grad(set_to_none=True)
    language_loss(model, batch, model.context(batch.ids))[0].backward()
    optimizer.step()


@pytest.fixture
def saved(small: Any, tmp_path: Path) -> tuple[Path, Any, Any]:
    """(folder of states, model, optimizer) after two steps."""
    model = small(seed=4)
    optimizer = build_optimizer(model, optim())
    for number in range(2):
        step(model, optimizer, number)
    save_state(tmp_path / "state", model, optimizer, 2, EXTRA)
    return tmp_path / "state", model, optimizer


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_state_round_trip(small: Any, tmp_path: Path, kind: str) -> None:
    model = small(seed=4)
    optimizer = build_optimizer(model, optim(kind))
    for number in range(2):
        step(model, optimizer, number)
    save_state(tmp_path / "state", model, optimizer, 2, EXTRA)
    other = small(seed=5)
    fresh = build_optimizer(other, optim(kind))
    assert load_state(tmp_path / "state", other, fresh) == (2, EXTRA)
    assert_same(model, other)
    for mine, theirs in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        for p, q in zip(mine["params"], theirs["params"], strict=True):
            assert optimizer.state[p].keys() == fresh.state[q].keys()
            for key, value in optimizer.state[p].items():
                assert torch.equal(value, fresh.state[q][key]) and value.dtype == fresh.state[q][key].dtype
    for number in (2, 3):
        step(model, optimizer, number)
        step(other, fresh, number)
    assert_same(model, other)
    assert load_state(tmp_path / "absent", other, fresh) is None
    (tmp_path / "empty").mkdir()
    assert load_state(tmp_path / "empty", other, fresh) is None


def test_the_newest_two_states_are_kept(saved: Any) -> None:
    path, model, optimizer = saved
    for number in (3, 4, 10):
        save_state(path, model, optimizer, number)
    assert sorted(p.name for p in path.iterdir()) == ["step-00000004", "step-00000010"]
    assert load_state(path, model, optimizer) == (10, {})
    save_state(path, model, optimizer, 10, {"again": 1})
    assert load_state(path, model, optimizer) == (10, {"again": 1})


def damage(file: Path, how: str) -> None:
    raw = bytearray(file.read_bytes())
    if how == "flip":
        raw[len(raw) // 2] ^= 0x11
        file.write_bytes(raw)
    elif how == "cut":
        file.write_bytes(raw[: len(raw) // 2])
    else:
        file.unlink()


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "delete"])
def test_a_damaged_state_falls_back_to_the_one_before(
    saved: Any, small: Any, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, model, optimizer = saved
    before = {n: t.clone() for n, t in model.state_dict().items()}
    step(model, optimizer, 2)
    save_state(path, model, optimizer, 3)
    damage(path / "step-00000003" / name, how)
    with caplog.at_level(logging.WARNING, logger="glm5"):
        assert load_state(path, model, optimizer) == (2, EXTRA)
    assert all(torch.equal(tensor, model.state_dict()[n]) for n, tensor in before.items())
    (record,) = caplog.records
    assert "step-00000003" in record.getMessage() and "state of step 2" in record.getMessage()
    # What comes after is saved beside the sound state; the damaged one is gone.
    save_state(path, model, optimizer, 3, {"second": 1})
    assert load_state(path, model, optimizer) == (3, {"second": 1})
    damage(path / "step-00000002" / name, how)
    damage(path / "step-00000003" / name, how)
    with pytest.raises(CheckpointError, match=rf"step-00000003.*[Dd]elete {path} to start this stage again"):
        load_state(path, model, optimizer)


def test_a_damaged_later_state_is_removed_by_the_next_save(saved: Any) -> None:
    path, model, optimizer = saved
    save_state(path, model, optimizer, 9)
    damage(path / "step-00000009" / "state.json", "cut")
    assert load_state(path, model, optimizer) == (2, EXTRA)
    save_state(path, model, optimizer, 4)
    assert sorted(p.name for p in path.iterdir()) == ["step-00000002", "step-00000004"]


def test_the_state_of_another_model_is_refused(saved: Any, small: Any) -> None:
    path, _, _ = saved
    for other in (small(hidden_size=16), small(num_hidden_layers=3)):
        with pytest.raises(CheckpointError, match="belongs to another model"):
            load_state(path, other, build_optimizer(other, optim()))


def test_the_state_of_a_stage_with_other_parameters_is_refused(saved: Any, small: Any) -> None:
    path, _, _ = saved
    model = small()
    with pytest.raises(CheckpointError, match="trains other parameters"):
        load_state(path, model, build_optimizer(model, optim(), lambda name: "lm_head" not in name))


def test_a_state_with_a_gap_is_not_published(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model, optimizer = saved

    def part(ranks: Ranks, tensor: Tensor) -> ShardSlice:
        return ShardSlice((99, *tensor.shape), (0,) * (tensor.ndim + 1), (1, *tensor.shape))

    monkeypatch.setattr(Ranks, "shard_slice", part)
    with pytest.raises(CheckpointError, match="leave a gap"):
        save_state(path, model, optimizer, 3)
    monkeypatch.undo()
    assert [entry.name for entry in path.iterdir()] == ["step-00000002"]
    assert load_state(path, model, optimizer) == (2, EXTRA)


def test_two_processes_cannot_save_to_one_folder(saved: Any) -> None:
    path, model, optimizer = saved
    descriptor = os.open(path, os.O_RDONLY)  # as another process has it
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        for act in (lambda: save_state(path, model, optimizer, 3), lambda: load_state(path, model, optimizer)):
            with pytest.raises(CheckpointError, match=r"Another process is saving to .*/state; two runs cannot share"):
                act()
    finally:
        os.close(descriptor)
    assert load_state(path, model, optimizer) == (2, EXTRA)


def test_what_a_crash_left_is_cleared(saved: Any) -> None:
    path, model, optimizer = saved
    (path / ".step-00000003.writing").mkdir()
    (path / ".step-00000003.writing" / "rank-00000.safetensors").write_bytes(b"half")
    (path / "step-00000002").rename(path / ".step-00000002.old")  # between the two renames of a second save of step 2
    assert load_state(path, model, optimizer) == (2, EXTRA)
    assert [p.name for p in path.iterdir()] == ["step-00000002"]


# ---------------------------------------------------------------------------------------------------- disks that fail


def fail_on_save(error: Exception) -> Callable[..., None]:
    def save_file(tensors: Any, path: str, metadata: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise error

    return save_file


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), Exception("Error: I/O error: No space left (os error 28)")],
)
def test_a_full_disk_keeps_the_earlier_state(saved: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    path, model, optimizer = saved
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.lm_head.weight += 1
    monkeypatch.setattr(shard_files, "save_file", fail_on_save(error))
    with pytest.raises(CheckpointError, match=r"No space left .* what was saved before is intact"):
        save_state(path, model, optimizer, 3)
    assert load_state(path, model, optimizer) == (2, EXTRA)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in kept.items())
    assert [entry.name for entry in path.iterdir()] == ["step-00000002"]


def test_a_real_limit_on_file_size_is_a_clear_error(saved: Any) -> None:
    path, model, optimizer = saved
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match="No space left"):
            save_state(path, model, optimizer, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_state(path, model, optimizer) == (2, EXTRA)


def test_a_run_whose_disk_filled_up_resumes_with_the_same_numbers(
    small: Any, stage_io: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small(seed=1)
    train(whole, config(), stage_io("whole"), batch_at, loss_of)
    broken, real = small(seed=1), shard_files.save_file
    calls = itertools.count()

    def second_fails(*arguments: Any) -> None:
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(shard_files, "save_file", second_fails)
    with pytest.raises(CheckpointError):
        train(broken, config(), stage_io("broken"), batch_at, loss_of)
    assert [p.name for p in (stage_io("broken").folder / "state").iterdir()] == ["step-00000002"]
    resumed = small(seed=50)
    train(resumed, config(), stage_io("broken"), batch_at, loss_of)
    assert_same(whole, resumed)


# ---------------------------------------------------------------------------------------------------- lies in an index


@contextmanager
def forged(folder: Path) -> Iterator[dict[str, Any]]:
    """Change the index of a state and hash it again, as whoever wants to do harm would."""
    index = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    yield index
    (folder / "state.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "manifest.json").unlink()
    write_manifest(folder)


NORM = "model/model.norm.weight"


def forge(index: dict[str, Any], lie: str) -> None:
    entry = index["tensors"][NORM]
    (box,) = entry["boxes"]
    if lie == "path":
        box["file"] = "../../outside.safetensors"
    elif lie == "absolute":
        box["file"] = "/etc/passwd"
    elif lie == "other file":
        box["file"] = "rank-00007.safetensors"
    elif lie == "huge":
        entry["shape"] = box["shape"] = [1 << 44]
    elif lie == "beyond":
        entry["shape"] = box["shape"] = [1 << 60]
    elif lie == "negative":
        box["offsets"] = [-1]
    elif lie == "gap":
        box["shape"] = [31]
    elif lie == "overlap":
        entry["boxes"].append(dict(box))
    elif lie == "no boxes":
        entry["boxes"] = []
    elif lie == "dtype":
        entry["dtype"] = "float64"
    elif lie == "dimensions":
        box["offsets"], box["shape"] = [0, 0], [32, 1]
    elif lie == "text":
        index["tensors"][NORM] = "all of it"
    elif lie == "no tensors":
        del index["tensors"]
    elif lie == "format":
        index["format"] = 99
    elif lie == "step":
        index["step"] = "2"
    elif lie == "optimizer":
        name = next(n for n in index["tensors"] if n.endswith("norm.weight/m") and "q_a" in n)
        index["tensors"][name] = {**index["tensors"][NORM]}
        index["tensors"][name]["boxes"] = [dict(box)]


LIES = {
    "path": "damaged", "absolute": "damaged", "other file": "missing", "huge": "damaged", "beyond": "damaged",
    "negative": "damaged", "gap": "gap", "overlap": "overlap", "no boxes": "gap", "dtype": "damaged",
    "dimensions": "damaged", "text": "damaged", "no tensors": "damaged", "format": "another version",
    "step": "damaged", "optimizer": "damaged",
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused(saved: Any, lie: str) -> None:
    path, model, optimizer = saved
    outside = path.parent / "outside.safetensors"
    shutil.copyfile(path / "step-00000002" / "rank-00000.safetensors", outside)
    with forged(path / "step-00000002") as index:
        forge(index, lie)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=LIES[lie]) as refused:
        load_state(path, model, optimizer)
    assert "Delete" in str(refused.value) or "delete" in str(refused.value)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())


def test_a_forged_index_that_is_true_is_read(saved: Any) -> None:
    """The forger's tools themselves do no harm."""
    path, model, optimizer = saved
    with forged(path / "step-00000002"):
        pass
    assert load_state(path, model, optimizer) == (2, EXTRA)


# ---------------------------------------------------------------------------------------------------- other splits


def split_points(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, size), max_size=4).map(lambda cuts: sorted({0, size, *cuts}))


@given(st.data())
def test_any_boxes_come_back_in_any_other_boxes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("boxes")
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    written = []
    for rank, box in enumerate(tiles(shape, data)):
        piece = {"x": (cut(whole, box), box)} if box.sizes != shape or rank == 0 else {}
        written.append(write_pieces(folder, rank, piece))
    stored = parse_index(json.loads(json.dumps(index_of(written))), folder / "state.json")
    check_files(folder, stored)
    for box in tiles(shape, data):
        target = torch.full(box.sizes, -1.0)
        read_pieces(folder, stored, [("x", target, box)])
        assert torch.equal(target, cut(whole, box))


def tiles(shape: tuple[int, ...], data: st.DataObject) -> list[ShardSlice]:
    """Boxes that cover a tensor: a grid of cuts along every dimension."""
    axes = [list(itertools.pairwise(data.draw(split_points(size)))) for size in shape]
    return [
        ShardSlice(shape, tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        for cell in itertools.product(*axes)
    ]


def cut(whole: Tensor, box: ShardSlice) -> Tensor:
    return whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].clone()


def test_a_file_that_is_missing_a_part_is_found(tmp_path: Path) -> None:
    box = ShardSlice((4, 2), (0, 0), (2, 2))
    rest = ShardSlice((4, 2), (2, 0), (2, 2))
    written: list[Mapping[str, tuple[str, ShardSlice]]] = [
        write_pieces(tmp_path, rank, {"x": (torch.ones(2, 2), part)}) for rank, part in enumerate((box, rest))
    ]
    stored = parse_index(index_of(written), tmp_path / "state.json")
    check_files(tmp_path, stored)
    write_pieces(tmp_path, 1, {"x": (torch.ones(1, 2), ShardSlice((4, 2), (2, 0), (1, 2)))})
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is damaged"):
        check_files(tmp_path, stored)
    with pytest.raises(CheckpointError, match="gap"):
        parse_index(index_of(written[:1]), tmp_path / "state.json")


PEAK = """
import sys, torch
from pathlib import Path
from glm5.config.model import GLM5Config
from glm5.config.optim import OptimConfig
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.train.checkpoint import load_state, save_state
from glm5.train.loop import build_optimizer

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))

def peak(act):
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    act()
    return memory("VmHWM") - before

model = GLM5ForCausalLM(GLM5Config.preset("nano", vocab_size=2048, hidden_size=512, intermediate_size=2048,
                                          num_hidden_layers=6, first_k_dense_replace=6, num_nextn_predict_layers=0))
optimizer = build_optimizer(model, OptimConfig(steps=1, lr=0.1, kind="adamw"))
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
for parameter in model.parameters():
    parameter.grad = None
small = GLM5ForCausalLM(GLM5Config.preset("nano"))
save_state(Path(sys.argv[1]) / "small", small, build_optimizer(small, OptimConfig(steps=1, lr=0.1)), 1)
path = Path(sys.argv[1]) / "state"
saving = peak(lambda: save_state(path, model, optimizer, 1))
loading = peak(lambda: load_state(path, model, optimizer))
tensors = [t.numel() * 4 for t in model.state_dict().values()]
print(saving, loading, sum(tensors), max(tensors))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured through /proc")
def test_memory_while_saving_and_loading(tmp_path: Path, forks: Any) -> None:
    """Saving takes no second copy of anything larger than a tensor; loading only the optimizer's own new state."""
    saving, loading, model, largest = map(int, forks.run(PEAK, tmp_path).split())
    assert model > 60e6
    assert saving < largest + (8 << 20)
    assert loading < 2 * model + largest + (8 << 20)  # new moments, before the old ones are freed
