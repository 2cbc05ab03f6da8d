"""`glm5 adapt`: a dense checkpoint through both stages, interrupted anywhere, and what it says about itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.data.loader import StreamLoader
from glm5.data.shards import build_shards, open_shard
from glm5.data.sources import Document
from glm5.errors import CheckpointError, ConfigError, DataError
from glm5.files import exclusive
from glm5.launch import adapt
from glm5.launch.adapt import Options
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import read_metrics
from glm5.report.results import load_run
from glm5.train import dsa_adapt, loop
from glm5.train.checkpoint import load_state

QUICK: dict[str, Any] = {
    "steps": 4, "sparse_steps": 5, "rows": 2, "row_length": 32, "index_topk": 4, "held_out_tokens": 256,
    "save_every": 2,
}  # fmt: skip

STAGES = ("00-dsa-warmup", "01-dsa-sparse", "02-dense-baseline")


def run(model: Path, data: Path, out: Path, options: dict[str, Any]) -> dict[str, Any]:
    return adapt.run(model, data, out, Options(**options), echo=lambda text: None)


@dataclass(frozen=True)
class Adapted:
    model: Path
    data: Path
    out: Path
    record: dict[str, Any]

    @property
    def run(self) -> Path:
        return self.out.parent / f"{self.out.name}-adapt"


@pytest.fixture(scope="module")
def adapted(small: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """A finished run. Read only."""
    folder = tmp_path_factory.mktemp("adapt")
    model = small(vocab_size=tokenizer.vocab_size, use_dsa=False, index_topk=None, seed=5)
    model.save_pretrained(folder / "dense")
    tokenizer.save(folder / "dense")
    held_out = [name for i in range(1000) if Document(name := f"{i}.txt", "").held_out][:3]
    names = [*held_out, *(name for i in range(80) if not Document(name := f"{i}.txt", "").held_out)]
    documents = [Document(name, f"line {i % 7} of file {i}\n" * (6 + i % 5)) for i, name in enumerate(names)]
    build_shards(documents, tokenizer, folder / "data", [])
    record = run(folder / "dense", folder / "data", folder / "sparse", QUICK)
    return Adapted(folder / "dense", folder / "data", folder / "sparse", record)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in GLM5ForCausalLM.from_pretrained(path).state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.long
def test_the_record(adapted: Adapted) -> None:
    record = json.loads((adapted.run / "adaptation.json").read_text(encoding="utf-8"))
    assert record == adapted.record
    assert record["topk"] == 4 and record["recall"].keys() == {"L0", "L1", "L2"}
    curve = record["mass_curve"]
    assert curve["k"] == [1, 2, 4, 8, 16]
    assert all(a <= b + 1e-6 for a, b in zip(curve["indexer"], curve["oracle"], strict=True))
    for shares in (curve["indexer"], curve["oracle"]):
        assert sorted(shares) == shares and shares[0] > 0 and shares[-1] <= 1 + 1e-6
    assert record["mean_recall"] == pytest.approx(curve["indexer"][2])
    assert record["mean_recall"] == pytest.approx(sum(record["recall"].values()) / 3)
    assert [step for step, _ in record["kl"]] == list(range(1, 10))
    curve = record["baseline"]
    assert curve["tokens"] == [step * 64 for step in range(6)] and len(curve["dense"]) == len(curve["sparse"]) == 6
    assert all(isinstance(value, float) for value in [*curve["dense"], *curve["sparse"]])
    held = record["held_out"]
    assert held["length"] == 32 and held["documents"] == 3 and held["concatenated"] is False
    assert held["sparse"] == pytest.approx(curve["sparse"][-1]) and held["dense"] == pytest.approx(curve["dense"][-1])
    assert held["gap_percent"] == pytest.approx(100 * (held["sparse"] / held["dense"] - 1))
    assert held["gap_interval"][0] < held["gap_percent"] < held["gap_interval"][1]
    assert [held[part]["tokens"] for part in ("all_positions", "beyond_4_topk")] == [8 * 31, 8 * 15]
    assert held["tokens"] == 8 * 27
    rows = dsa_adapt.held_out_rows(open_shard(adapted.data, "held_out"), 32, 256)
    for name, path in (("sparse", adapted.out), ("dense", adapted.run / "02-dense-baseline" / "model")):
        losses = dsa_adapt.position_losses(GLM5ForCausalLM.from_pretrained(path), rows)
        parts = {"all_positions": losses, "beyond_4_topk": losses[:, 16:]}
        assert held[name] == pytest.approx(float(losses[:, 4:].mean()), abs=1e-12)
        assert {key: held[key][name] for key in parts} == pytest.approx({k: float(v.mean()) for k, v in parts.items()})
    found = load_run(adapted.run)
    assert found.finished and [stage.name for stage in found.results.stages] == [
        "dsa-warmup",
        "dsa-sparse",
        "dense-baseline",
    ]
    assert "Sparse attention" in (adapted.run / "report.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_checkpoints(adapted: Adapted) -> None:
    dense, warm, sparse, baseline = (
        weights(path) for path in (adapted.model, *(adapted.run / name / "model" for name in STAGES))
    )
    assert all(torch.equal(tensor, warm[name]) for name, tensor in dense.items())  # bit by bit, router biases too
    assert {name for name in warm if name not in dense} == {name for name in warm if ".indexer." in name}
    assert not any(torch.equal(sparse[name], warm[name]) for name in dense if name.endswith("proj.weight"))
    assert baseline.keys() == dense.keys() and not torch.equal(baseline["lm_head.weight"], dense["lm_head.weight"])
    assert same(weights(adapted.out), sparse) and (adapted.out / "tokenizer.json").exists()
    loaded = GLM5ForCausalLM.from_pretrained(adapted.out)
    assert loaded.config.use_dsa and loaded.config.index_topk == 4


def test_rows_continue_over_the_stages(adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    batch = StreamLoader.batch

    def spy(self: StreamLoader, step: int, rows: slice | None = None) -> Any:
        asked.append(step)
        return batch(self, step, rows)

    monkeypatch.setattr(StreamLoader, "batch", spy)
    run(adapted.model, adapted.data, tmp_path / "again", QUICK)
    assert asked == [*range(4), *range(4, 9), *range(4, 9)]  # warm-up, sparse, baseline


@pytest.fixture(autouse=True)
def no_pictures(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page, that of the shared run, is enough: drawing takes longer than these runs."""
    monkeypatch.setattr(adapt, "build_report", lambda folder: folder / "report.html")


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "stage"),
    [
        ("step", "dsa-warmup"),
        ("publish", "dsa-warmup"),
        ("begin", "dsa-sparse"),
        ("step", "dsa-sparse"),
        pytest.param("begin", "dsa-warmup", marks=pytest.mark.slow),
        pytest.param("publish", "dsa-sparse", marks=pytest.mark.slow),
        pytest.param("begin", "dense-baseline", marks=pytest.mark.slow),
        ("step", "dense-baseline"),
        pytest.param("publish", "dense-baseline", marks=pytest.mark.slow),
    ],
)
def test_interrupted_anywhere_it_ends_with_the_same_numbers(
    adapted: Adapted, tmp_path: Path, interrupt_at: Callable[..., Any], at: str, stage: str
) -> None:
    """Ctrl-C at a border before a stage, in its fourth step (the state is from the second), and while the finished
    stage is written."""
    out = tmp_path / "sparse"
    if at == "begin":
        stop = interrupt_at(loop, "build_optimizer", lambda model, config, trainable: _stage_begins(out, stage))
    elif at == "step":
        stop = interrupt_at(loop.Trainer, "step", lambda self, step, rows: (self.io.name, step) == (stage, 3))
    else:
        stop = interrupt_at(adapt, "_publish", lambda model, tokenizer, path: path.parent.name.endswith(stage))
    with pytest.raises(KeyboardInterrupt), stop:
        run(adapted.model, adapted.data, out, QUICK)
    assert not out.exists() and not (out.parent / "sparse-adapt" / "adaptation.json").exists()
    record = run(adapted.model, adapted.data, out, QUICK)
    assert record == adapted.record
    assert same(weights(out), weights(adapted.out))
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (adapted.run, out.parent / "sparse-adapt")]
    plain = [[{k: v for k, v in row.items() if k not in ("time", *loop.TIMES)} for row in found] for found in rows]
    assert plain[0] == plain[1]


def _stage_begins(out: Path, stage: str) -> bool:
    return any((out.parent / "sparse-adapt").glob(f"*-{stage}"))


def test_a_finished_run_is_not_run_again(adapted: Adapted, tmp_path: Path, interrupt_at: Callable[..., Any]) -> None:
    shutil.copytree(adapted.run, tmp_path / "sparse-adapt")
    with interrupt_at(loop.Trainer, "step"):
        assert run(adapted.model, adapted.data, tmp_path / "sparse", QUICK) == adapted.record
    assert same(weights(tmp_path / "sparse"), weights(adapted.out))


def test_a_run_belongs_to_one_process(adapted: Adapted) -> None:
    with (
        exclusive(adapted.run, "taken"),
        pytest.raises(CheckpointError, match=r"Another process is working on .*sparse-adapt; wait"),
    ):
        run(adapted.model, adapted.data, adapted.out, QUICK)


def test_other_settings_need_another_folder(adapted: Adapted) -> None:
    with pytest.raises(ConfigError, match="other settings"):
        run(adapted.model, adapted.data, adapted.out, QUICK | {"sparse_lr": 1e-3})


def test_a_checkpoint_of_another_tool(adapted: Adapted, tmp_path: Path) -> None:
    """No key of sparse attention in its configuration, no tokenizer beside it."""
    shutil.copytree(adapted.model, tmp_path / "dense")
    for name in ("manifest.json", "tokenizer.json"):
        (tmp_path / "dense" / name).unlink(missing_ok=True)
    path = tmp_path / "dense" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    kept = {k: v for k, v in config.items() if not k.startswith("index") and k != "use_dsa"}
    assert kept != config
    path.write_text(json.dumps(kept), encoding="utf-8")
    options = QUICK | {
        "twin": False,  # the old name of `baseline`
        "index_heads": 3,
        "index_dim": 6,
        "optimizer": "muon",
        "steps": 1,
        "sparse_steps": 1,
    }
    record = run(tmp_path / "dense", adapted.data, tmp_path / "sparse", options)
    assert record["held_out"]["dense"] is None and record["held_out"]["gap_percent"] is None
    assert record["held_out"]["dense_before"] == pytest.approx(adapted.record["held_out"]["dense_before"])
    loaded = GLM5ForCausalLM.from_pretrained(tmp_path / "sparse")
    assert (loaded.config.index_n_heads, loaded.config.index_head_dim) == (3, 6)
    assert not (tmp_path / "sparse" / "tokenizer.json").exists()


def test_bf16_and_micro_batches_leave_the_backbone_alone(adapted: Adapted, tmp_path: Path) -> None:
    options = {"dtype": "bfloat16", "micro_rows": 1, "recompute": True, "steps": 2, "sparse_steps": 1}
    run(adapted.model, adapted.data, tmp_path / "sparse", QUICK | options)
    warm = weights(tmp_path / "sparse-adapt" / "00-dsa-warmup" / "model")
    assert all(torch.equal(tensor, warm[name]) for name, tensor in weights(adapted.model).items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"row_length": 8}, "at least 16"),
        ({"held_out_length": 12}, "at least 16"),
        ({"row_length": 10_000}, "positions"),
        ({"index_dim": 2}, "rotary"),
    ],
)
def test_what_cannot_work_is_said_at_once(
    adapted: Adapted, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(adapted.model, adapted.data, tmp_path / "sparse", QUICK | options)


def test_models_and_data_that_do_not_fit(adapted: Adapted, tmp_path: Path, small: Any) -> None:
    with pytest.raises(ConfigError, match="already"):
        run(adapted.out, adapted.data, tmp_path / "a", QUICK)
    small(vocab_size=40, use_dsa=False, index_topk=None).save_pretrained(tmp_path / "dense")
    with pytest.raises(DataError, match="vocabulary of 40"):
        run(tmp_path / "dense", adapted.data, tmp_path / "b", QUICK)


def test_the_last_state_of_a_stage_is_on_disk(adapted: Adapted, small: Any) -> None:
    """What resuming would load: the state after step 4 of 5."""
    model = GLM5ForCausalLM.from_pretrained(adapted.out)
    config = adapt.Settings.model_validate(adapted.record["settings"]).sparse.optim
    step, _ = load_state(adapted.run / "01-dsa-sparse" / "state", model, loop.build_optimizer(model, config)) or (0, {})
    assert step == 4
