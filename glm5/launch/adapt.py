"""`glm5 adapt`: any dense MLA checkpoint through both DSA stages, with a dense baseline and a record of how close the
result comes (§2.1.1).

The run folder is next to the new checkpoint: a folder per stage, `metrics.jsonl`, `adaptation.json`, `report.html`.
Calling again resumes an interrupted run and ends with the same numbers. Rows continue over the stages: the sparse stage
starts after the last row of the warm-up, and the dense baseline sees the rows of the sparse stage.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import AliasChoices, Field

from glm5.chat import Tokenizer
from glm5.config.model import GLM5Config
from glm5.config.parallel import DEVICE_PATTERN
from glm5.config.recipe import DsaStage
from glm5.config.schema import Frozen
from glm5.config.stages import scale, table
from glm5.data.loader import StreamLoader
from glm5.data.packing import Batch
from glm5.data.shards import Shard, open_shard
from glm5.device import AUTO, choose_device
from glm5.errors import CheckpointError, ConfigError, DataError, MissingExtraError
from glm5.files import atomic_write, exclusive, publish_dir, recover_dir
from glm5.launch.adapt_record import BASELINE, SPARSE, WARMUP, Settings, mean, record_of
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.hf_weights import write_checkpoint
from glm5.obs import MetricsWriter, PipelineProgress
from glm5.parallel.ranks import Ranks
from glm5.report import build_report
from glm5.seeds import derive_seed
from glm5.train import dsa_adapt
from glm5.train.dsa_adapt import HeldOut
from glm5.train.loop import StageIO

DONE, MODEL, RECORD, SETTINGS = "stage.json", "model", "adaptation.json", "settings.json"
POINTS = 8
"""How often held-out text is scored within the sparse stage and its baseline."""


@dataclass
class _Shared:
    """State shared by the stages."""

    settings: Settings
    folder: Path
    tokenizer: Tokenizer | None
    loader: StreamLoader
    held_out: HeldOut
    metrics: MetricsWriter
    progress: PipelineProgress
    ranks: Ranks

    def load(self, path: Path, **overrides: Any) -> GLM5ForCausalLM:
        """A checkpoint on the run's device."""
        return GLM5ForCausalLM.from_pretrained(path, device=self.ranks.device, **overrides)


class Options(Frozen):
    """Options of a run. None: from the stage presets `dsa_warmup` and `dsa_sparse`, scaled to the model."""

    steps: int = Field(100, ge=1)
    """Steps of the warm-up."""
    sparse_steps: int | None = Field(None, ge=1)
    """Steps of the sparse stage and of its baseline; None: the steps of the warm-up."""
    index_topk: int | None = Field(None, ge=1)
    index_heads: int | None = Field(None, ge=1)
    """None: from the model's configuration."""
    index_dim: int | None = Field(None, ge=1)
    rows: int = Field(8, ge=1)
    row_length: int | None = Field(None, ge=2)
    """None: 512 tokens, or eight times index_topk if that is more, limited by the model's positions."""
    micro_rows: int | None = Field(None, ge=1)
    warmup_lr: float | None = Field(None, gt=0)
    sparse_lr: float | None = Field(None, gt=0)
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the warm-up; the report does not name one."""
    pretrain_tokens: float | None = Field(None, gt=0)
    """Tokens that the model was trained on before; only sets the default of `sparse_lr`."""
    save_every: int = Field(25, ge=0)
    held_out_length: int | None = Field(None, ge=2)
    """Tokens of a held-out row, at least four times index_topk; None: row_length."""
    held_out_tokens: int = Field(32_768, ge=1)
    """Tokens scored at the end of every stage and eight times within the sparse ones."""
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = Field(AUTO, pattern=DEVICE_PATTERN)
    recompute: bool = False
    baseline: bool = Field(True, validation_alias=AliasChoices("baseline", "twin"))
    """Also train a dense baseline on the rows of the sparse stage."""


def run(
    model_dir: Path, data_dir: Path, out: Path, options: Options | None = None, echo: Callable[[str], None] = print
) -> dict[str, Any]:
    """Adapt the checkpoint `model_dir` on the shards `data_dir`; the result goes to `out`, the run to `out`-adapt.

    Prints the scaled presets through `echo`. Returns the content of `adaptation.json`. Raises ConfigError, DataError or
    CheckpointError for anything that does not fit.
    """
    options = options or Options()
    ranks = Ranks(choose_device(options.device))
    config, overrides = dense_config(model_dir)
    settings = _settings(str(model_dir), str(data_dir), options, config, echo)
    _check(settings, config)
    folder = out.parent / f"{out.name}-adapt"
    busy = f"Another process is working on {folder}; wait for it, stop it, or choose another --out."
    with exclusive(folder, busy):
        _claim(folder, settings)
        tokenizer = Tokenizer.load(model_dir) if (model_dir / "tokenizer.json").exists() else None
        train, held_out = (open_shard(data_dir, split, tokenizer) for split in ("train", "held_out"))
        if tokenizer is None:
            _check_ids(train, held_out, config)
        warmup = settings.warmup
        seed = derive_seed(settings.seed, "adaptation")
        loader = StreamLoader(train, rows=warmup.rows, row_length=warmup.row_length, seed=seed)
        text = dsa_adapt.held_out_rows(held_out, settings.held_out_length, settings.held_out_tokens)
        names = [WARMUP, SPARSE, *([BASELINE] if settings.baseline else [])]
        with MetricsWriter(folder / "metrics.jsonl") as metrics, PipelineProgress(names) as progress:
            shared = _Shared(settings, folder, tokenizer, loader, text, metrics, progress, ranks)
            entries = _stages(shared, lambda: shared.load(model_dir, **overrides))
        record = record_of(settings, text, entries, folder)
        atomic_write(folder / RECORD, json.dumps(record, indent=1) + "\n")
        atomic_write(folder / "results.json", json.dumps(_results(shared, entries), indent=1) + "\n")
        _publish(shared.load(folder / f"01-{SPARSE}" / MODEL), tokenizer, out)
        try:
            echo(f"Report: {build_report(folder)}")
        except MissingExtraError as error:
            echo(f"No report: {error}")
        return record


def _settings(model: str, data: str, o: Options, config: GLM5Config, echo: Callable[[str], None]) -> Settings:
    """All settings: the scaled presets (also printed), overridden by the options."""
    row_length = o.row_length or min(max(512, 8 * (o.index_topk or 0)), config.max_position_embeddings)
    stages, topk = [], 0
    own: dict[str, Any] = {"dtype": o.dtype, "recompute": o.recompute, "micro_rows": o.micro_rows}
    for name, preset, steps, chosen in (
        (WARMUP, "dsa_warmup", o.steps, {"lr": o.warmup_lr, "kind": o.optimizer}),
        (SPARSE, "dsa_sparse", o.sparse_steps or o.steps, {"lr": o.sparse_lr, "final_lr": o.sparse_lr}),
    ):
        scaled = scale(
            preset, config, steps=steps, rows=o.rows, row_length=row_length, pretrain_tokens=o.pretrain_tokens
        )
        echo(table(scaled) + "\n")
        optim = scaled.values["optim"] | {key: value for key, value in chosen.items() if value is not None}
        optim |= {"save_every": o.save_every, "evaluate_every": max(1, steps // POINTS) if name == SPARSE else 0}
        stages.append(DsaStage.model_validate({**scaled.values, **own, "name": name, "optim": optim}))
        topk = scaled.model["index_topk"]
    return Settings(
        model=model,
        data=data,
        seed=o.seed,
        baseline=o.baseline,
        index_topk=o.index_topk or topk,
        index_heads=o.index_heads or config.index_n_heads,
        index_dim=o.index_dim or config.index_head_dim,
        held_out_length=o.held_out_length or row_length,
        held_out_tokens=o.held_out_tokens,
        warmup=stages[0],
        sparse=stages[1],
    )


def dense_config(model_dir: Path) -> tuple[GLM5Config, dict[str, Any]]:
    """Configuration of a dense MLA checkpoint, and overrides for it. A foreign file without any key of sparse attention
    means a dense model, not our defaults; indexers that were never adapted start anew."""
    config = GLM5Config.load(model_dir)
    overrides: dict[str, Any] = {}
    raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    silent = not any(key.startswith("index") or key == "use_dsa" for key in raw)
    if config.use_dsa and (silent or not config.indexer_adapted):
        overrides = {"use_dsa": False, "index_topk": None}
        config = GLM5Config.load(model_dir, **overrides)
    return config, overrides


def _check(settings: Settings, config: GLM5Config) -> None:
    """Raise errors now that would otherwise come after hours."""
    length, topk = settings.held_out_length, settings.index_topk
    if length < 4 * topk:
        raise ConfigError(
            f"Held-out rows of {length} tokens are too short to measure {topk} keys per query; use rows of at least "
            f"{4 * topk} tokens (row_length or held_out_length), or a smaller index_topk."
        )
    longest = max(length, settings.warmup.row_length)
    if longest > config.max_position_embeddings:
        raise ConfigError(
            f"Rows of {longest} tokens are longer than the model's {config.max_position_embeddings} positions."
        )


def _check_ids(train: Shard, held_out: Shard, config: GLM5Config) -> None:
    """Raise DataError for ids outside the vocabulary; there is no tokenizer to compare."""
    for shard in (train, held_out):
        if len(shard.tokens) and int(shard.tokens.max()) >= config.vocab_size:
            raise DataError(f"The shards contain token ids beyond the model's vocabulary of {config.vocab_size}.")


def _claim(folder: Path, settings: Settings) -> None:
    """Save the settings, or check that the run was started with the same ones."""
    path, text = folder / SETTINGS, settings.model_dump_json(indent=1) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") != text and any(folder.glob("*/*")):
        raise ConfigError(f"{folder} was started with other settings (see {path}). Choose another --out, or delete it.")
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text)


def _stages(run: _Shared, load: Callable[[], GLM5ForCausalLM]) -> dict[str, dict[str, Any]]:
    """Run the unfinished stages; returns the measurements of each stage."""
    s = run.settings
    dense: list[dict[str, Any]] = []

    def fresh() -> GLM5ForCausalLM:
        model = load()
        dense.append(_losses(model, run))
        return dsa_adapt.add_indexer(
            model, derive_seed(s.seed, "indexer"), s.index_topk, heads=s.index_heads, dim=s.index_dim
        )

    def warm(model: GLM5ForCausalLM, io: StageIO) -> dict[str, float]:
        return dsa_adapt.run_stage(model, s.warmup, run.loader.batch, io)

    def after_warmup(step: int) -> Batch:
        return run.loader.batch(s.warmup.optim.steps + step)

    def scored(model: GLM5ForCausalLM, step: int) -> Mapping[str, float]:
        return {"held_out_loss": mean(_losses(model, run)["beyond"])}

    def sparse(model: GLM5ForCausalLM, io: StageIO) -> dict[str, float]:
        return dsa_adapt.run_stage(model, s.sparse, after_warmup, io, scored)

    def baseline(model: GLM5ForCausalLM, io: StageIO) -> dict[str, float]:
        return dsa_adapt.run_baseline(model, s.sparse, after_warmup, io, scored)

    def warmed() -> GLM5ForCausalLM:
        return run.load(run.folder / f"00-{WARMUP}" / MODEL)

    entries = {WARMUP: _one(run, 0, WARMUP, s.warmup.kind, s.warmup.optim.steps, fresh, warm, lambda: dense[0])}
    entries[SPARSE] = _one(run, 1, SPARSE, s.sparse.kind, s.sparse.optim.steps, warmed, sparse)
    if s.baseline:
        entries[BASELINE] = _one(run, 2, BASELINE, "midtrain", s.sparse.optim.steps, load, baseline)
    return entries


def _one(
    run: _Shared,
    number: int,
    name: str,
    kind: str,
    steps: int,
    start: Callable[[], GLM5ForCausalLM],
    train: Callable[[GLM5ForCausalLM, StageIO], dict[str, float]],
    before: Callable[[], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Run one stage and measure it at its end. A finished stage is read from its entry, an interrupted one resumed."""
    folder = run.folder / f"{number:02d}-{name}"
    recover_dir(folder / MODEL)
    if (folder / DONE).exists():
        run.progress.skip(name)
        return _finished(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run.progress.start(name, steps)
    began = time.perf_counter()
    model = start()
    numbers = train(
        model,
        StageIO(name, folder, run.metrics, lambda n, found: run.progress.advance(n, **_few(found)), run.ranks),
    )
    trained = time.perf_counter()
    _publish(model, run.tokenizer, folder / MODEL)
    entry: dict[str, Any] = {"name": name, "kind": kind, "numbers": numbers}
    entry |= {"before": before(), "losses": _losses(model, run)}
    if model.config.use_dsa:
        entry["mass"] = dsa_adapt.attention_mass(model, run.held_out)
    entry["parameters"] = sum(p.numel() for p in model.parameters())
    entry |= {"train_seconds": trained - began, "evaluation_seconds": time.perf_counter() - trained}
    atomic_write(folder / DONE, json.dumps(entry, indent=1) + "\n")
    run.progress.finish(name, ", ".join(f"{key} {value:.3f}" for key, value in _few(numbers).items()))
    return entry


def _finished(folder: Path) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = json.loads((folder / DONE).read_text(encoding="utf-8"))
        entry["losses"]["beyond"], entry["numbers"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{folder / DONE} is damaged; delete {folder} to run this stage again.") from None
    return entry


def _losses(model: GLM5ForCausalLM, run: _Shared) -> dict[str, Any]:
    """Mean loss in nats of every held-out row: over all of it, over the tokens with more than index_topk tokens before
    them (`beyond`), and over those with more than four times as many (`far`; empty for shorter rows)."""
    topk = run.settings.index_topk
    losses = dsa_adapt.position_losses(model, run.held_out)
    parts = {"all": losses, "beyond": losses[:, topk:], "far": losses[:, 4 * topk :]}
    return {name: part.mean(1).tolist() if part.shape[1] else [] for name, part in parts.items()}


def _publish(model: GLM5ForCausalLM, tokenizer: Tokenizer | None, path: Path) -> None:
    with publish_dir(path) as folder:
        write_checkpoint(model, folder)
        if tokenizer is not None:
            tokenizer.save(folder)


def _results(run: _Shared, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`results.json`, the input of reports on any run."""
    stages = [{key: entry[key] for key in ("name", "kind", "numbers")} for entry in entries.values()]
    times = {
        name: {key: entry[key] for key in ("train_seconds", "evaluation_seconds")} for name, entry in entries.items()
    }
    return {
        "name": run.folder.name,
        "seed": run.settings.seed,
        "parameters": entries[SPARSE]["parameters"],
        "stages": stages,
        "times": {"total_seconds": sum(sum(part.values()) for part in times.values()), "stages": times},
        "software": {"torch": torch.__version__},
    }


def _few(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers that fit on a progress line."""
    return {key: numbers[key] for key in ("loss", "indexer_kl", "indexer_recall", "held_out_loss") if key in numbers}
