"""Supervised fine-tuning on packed conversations (§3.1)."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from glm5.chat.template import RULES
from glm5.chat.tokenizer import Tokenizer
from glm5.config.data import DataOptions
from glm5.config.recipe import SftStage
from glm5.data.loader import RowLoader
from glm5.data.mixture import make_loader
from glm5.data.packing import Batch
from glm5.data.sft import BadLines, Conversation, conversation_files, read_conversations, write_conversations
from glm5.data.sft_cache import CacheInfo, open_rows, publish_cache, read_cache
from glm5.data.sft_rows import RowCounts, SftRow, conversation_rows, cut_row
from glm5.data.shards import Shard
from glm5.errors import ConfigError, DataError
from glm5.files import atomic_write, sha256_files
from glm5.model.context import ForwardContext
from glm5.model.dsa import INDEXER
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.logs import get_logger
from glm5.parallel.ranks import Ranks
from glm5.quant.qat import quantization_aware
from glm5.seeds import derive_seed
from glm5.tasks import family_key, make_family
from glm5.train.loop import StageIO, train
from glm5.train.losses import language_loss
from glm5.train.sft_batches import SftBatches
from glm5.train.step_metrics import StepMetrics

FAMILIES = "families"
"""Name of the demonstrations among the sources."""
ALL = "all"
"""Name of the single source without shares."""
TOKENIZED = "tokenized"
"""Folder of the tokenised rows in the stage's folder."""

_CODE = (
    "glm5.chat.messages",
    "glm5.chat.split_pattern",
    "glm5.chat.template",
    "glm5.chat.tokenizer",
    "glm5.data.sft",
    "glm5.data.sft_rows",
    __name__,
)
"""Modules that decide the ids and masks of a conversation: rows that others made are not reused."""

_log = get_logger(__name__)


def generated_conversations(stage: SftStage, seed: int) -> list[Conversation]:
    """Demonstrations of the stage's families in proportion to their weights, training split only. Equal entries share
    the problems of their family: each continues after the last problem of the one before."""
    total = sum(family.weight for family in stage.families)
    found = []
    begun: Counter[str] = Counter()
    for config in stage.families:
        family = make_family(config.name, **config.options)
        key = family_key(config.name, config.options, config.render_tools)
        first, begun[key] = begun[key], begun[key] + round(stage.conversations * config.weight / total)
        for index in range(first, begun[key]):
            problem = family.problem("train", index)
            messages = problem.demonstration(derive_seed(seed, "demonstration", config.name, index))
            tools = problem.tools if config.render_tools else ()
            found.append(Conversation(messages, tools, problem.thinking))
    return found


def write_demonstrations(stage: SftStage, folder: Path, seed: int) -> Path | None:
    """The file of the families' demonstrations, written if it does not exist; None for a stage without families."""
    path = folder / "conversations.jsonl"
    if not stage.families:
        return None
    if not path.exists():
        write_conversations(path, generated_conversations(stage, seed))
    return path


def read_rows(
    source: Path | str, stage: SftStage, tokenizer: Tokenizer, bad: BadLines, counts: RowCounts
) -> Iterator[tuple[str, SftRow]]:
    """All rows of a file or of a folder's files, each with the FILE:LINE of its conversation; counted in `counts`.

    Raises:
        DataError: a line is unusable or a conversation too long, and the policy is "error"; or no row is left.
    """
    skipped = bad.count
    sorts = RULES[tokenizer.template_version].sorts_results
    for where, conversation in read_conversations(conversation_files(source), bad, sort_results=sorts):
        try:
            found = conversation_rows(conversation, tokenizer, stage.thinking, stage.row_length, counts)
        except DataError as error:
            bad(where, error)
            continue
        counts.conversations += 1
        counts.untrained += not found
        for row in found:
            fits = len(row.ids) <= stage.row_length
            kept = row if fits else _shorten(row, stage, tokenizer, counts, where)
            if kept is not None:
                counts.rows += 1
                counts.tokens += len(kept.ids)
                counts.targets += int(kept.mask.sum())
                yield where, kept
    counts.bad_lines = bad.count - skipped
    if not counts.conversations:
        raise DataError(f"{source} contains no conversation ({counts.bad_lines} bad lines).")
    if not counts.rows:
        raise DataError(
            f"{source}: none of {counts.conversations} conversations gives a row to train on: {counts.too_long} rows "
            f"are longer than {stage.row_length} tokens, {counts.untrained} conversations have no trained turn."
        )
    if counts.too_long:
        bad.warn(
            f"{source}: {counts.too_long} rows are longer than {stage.row_length} tokens (too_long = "
            f"{stage.too_long}); {counts.lost_targets} targets are lost, {counts.targets} are left."
        )


def _shorten(row: SftRow, stage: SftStage, tokenizer: Tokenizer, counts: RowCounts, where: str) -> SftRow | None:
    """A row that is too long, cut or dropped (None), and counted. Raises DataError under the policy "error"."""
    if stage.too_long == "error":
        raise DataError(
            f"{where}: {len(row.ids)} tokens do not fit into a row of {stage.row_length}; raise row_length, or set "
            'too_long to "cut" or "drop".'
        )
    kept = cut_row(row, stage.row_length, tokenizer) if stage.too_long == "cut" else None
    counts.too_long += 1
    counts.lost_targets += int(row.mask.sum()) - (int(kept.mask.sum()) if kept is not None else 0)
    return kept


def run(
    model: GLM5ForCausalLM,
    stage: SftStage,
    tokenizer: Tokenizer,
    io: StageIO,
    seed: int,
    shards: Mapping[str, Shard] | None = None,
) -> dict[str, float]:
    """Fine-tune everything except the indexers, which stay frozen after DSA adaptation.

    The loss is the mean over all trained tokens of a step. `shards` are needed for a `text_share`. The metrics
    data/NAME count what was read and left out, and how well it filled the rows.
    """
    batches, info = prepare(stage, tokenizer, io.folder, seed, shards, io.ranks)
    io.ranks.on_main(lambda: _same_data(io, info))
    counts = info.counts

    def loss_of(model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, StepMetrics]:
        loss, metrics = language_loss(model, batch, ctx, mtp_weight=stage.mtp_weight, mtp_depths=stage.mtp_depths)
        rows = batch if batch.part is None else batch.part.whole
        real = (rows.documents >= 0).sum()
        metrics.mean("fill", real, rows.ids.numel())
        metrics.mean("trained_share", rows.loss_mask.sum(), real)
        return loss, metrics

    with quantization_aware(model, stage.qat):
        numbers = train(
            model,
            stage,
            io,
            batches,
            loss_of,
            trainable=lambda name: INDEXER not in name,
            bias_rate=stage.bias_rate,
        )
    data = {k: float(v) for k, v in vars(counts).items()}
    data |= {"trained_share": counts.targets / counts.tokens} | batches.numbers(stage.optim.steps)
    return numbers | {f"data/{name}": value for name, value in data.items()}


def _same_data(io: StageIO, info: CacheInfo) -> None:
    """Write counts and hash of the rows to `rows.json`. Raises DataError for a resumed stage that began with other
    rows."""
    path, text = io.folder / "rows.json", json.dumps({**vars(info.counts), "sha256": info.sha256}, indent=1) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") != text and io.state.exists():
        raise DataError(
            f"{io.name}: the data changed since the stage began ({path} differs); restore it, or delete {io.folder}."
        )
    atomic_write(path, text)


def prepare(
    stage: SftStage,
    tokenizer: Tokenizer,
    folder: Path,
    seed: int,
    shards: Mapping[str, Shard] | None = None,
    ranks: Ranks | None = None,
) -> tuple[SftBatches, CacheInfo]:
    """The stage's batches, and the info of their rows. All ranks must call: rank 0 tokenises into `folder`, unless the
    rows of the same data are there.

    Raises ConfigError for a stage without data, or with a `text_share` but no shards.
    """
    text = _text_loader(stage, tokenizer, seed, shards) if stage.text_share else None
    cache = folder / TOKENIZED
    info = (ranks or Ranks()).on_main(lambda: replace(_tokenized(stage, tokenizer, folder, seed), warnings=()))
    shares = stage.data if isinstance(stage.data, dict) else None
    return SftBatches(open_rows(cache, info, tokenizer), stage, seed, shares, text), info


def _tokenized(stage: SftStage, tokenizer: Tokenizer, folder: Path, seed: int) -> CacheInfo:
    """The info of the stage's rows, which are tokenised if `folder` does not have them."""
    names = [stage.data] if isinstance(stage.data, str) else list(stage.data or ())
    shared = isinstance(stage.data, dict)
    files: list[tuple[str, Path | str]] = [(name, name) for name in names if not shared or name != FAMILIES]
    if (written := write_demonstrations(stage, folder, seed)) is not None:
        files.insert(0, (FAMILIES, written))
    if not files:
        raise ConfigError(f"{stage.name} has nothing to train on: list `families`, or set `data` to a JSONL file.")
    cache, key = folder / TOKENIZED, _cache_key(stage, tokenizer, files)
    if (found := _reusable(cache, key, tokenizer)) is not None:
        for text in found.warnings:
            _log.warning("%s", text)
        return found
    counts, bad = RowCounts(), BadLines(stage.bad_lines)
    sources: dict[str, tuple[int, int]] = {}
    with publish_cache(cache, tokenizer) as (writer, finish):
        for name, path in files:
            own = RowCounts()
            first, _ = sources.setdefault(name if shared else ALL, (writer.rows, writer.rows))
            for where, row in read_rows(path, stage, tokenizer, bad, own):
                writer.append(row, where)
            sources[name if shared else ALL] = (first, writer.rows)
            counts.add(own)
        info = CacheInfo(key, sources, counts, writer.sha256, bad.warnings)
        finish(info)
    return info


def _cache_key(stage: SftStage, tokenizer: Tokenizer, files: Sequence[tuple[str, Path | str]]) -> dict[str, Any]:
    """Everything that decides the rows: equal keys mean equal rows in the same order. Raises DataError for data that
    cannot be read twice."""
    inputs = [(name, path) for name, source in files for path in conversation_files(source)]
    if pipes := [path for _, path in inputs if not path.is_file()]:
        raise DataError(f"{pipes[0]} is not a file; write the conversations to one, because a resumed stage reads it.")
    try:
        hashes = sha256_files([path for _, path in inputs])
    except OSError as error:
        raise DataError(f"Cannot read {error.filename}: {error.strerror}.") from None
    return {
        "tokenizer": tokenizer.hash(),
        "template": tokenizer.template_version,
        "options": {name: getattr(stage, name) for name in ("thinking", "row_length", "bad_lines", "too_long")},
        "shares": isinstance(stage.data, dict),
        "data": [[name, str(path), sha256] for (name, path), sha256 in zip(inputs, hashes, strict=True)],
        "code": sha256_files([Path(str(sys.modules[name].__file__)) for name in _CODE]),
    }


def _reusable(cache: Path, key: Mapping[str, Any], tokenizer: Tokenizer) -> CacheInfo | None:
    """The info of the rows in `cache` if they are intact and made of the same data; otherwise None, with a warning."""
    try:
        if (info := read_cache(cache)) is not None and info.key == key:
            open_rows(cache, info, tokenizer)  # they fit each other
    except DataError as error:
        _log.warning("The tokenised rows are made again: %s", error)
        return None
    if info is None or info.key == key:
        return info
    changed = ", ".join(name for name in key if info.key.get(name) != key[name])
    _log.warning("%s is out of date (%s changed); the rows are made again.", cache, changed)
    return None


def _text_loader(stage: SftStage, tokenizer: Tokenizer, seed: int, shards: Mapping[str, Shard] | None) -> RowLoader:
    if not shards:
        raise ConfigError(f"{stage.name}: text_share = {stage.text_share} needs the shards of a run with `data`.")
    size = dict(rows=stage.rows, row_length=stage.row_length, seed=seed, name=stage.name)
    return make_loader(DataOptions(), shards, tokenizer, **size)  # type: ignore[arg-type]
