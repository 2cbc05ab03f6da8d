"""Supervised fine-tuning on packed conversations (§3.1)."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from glm5.chat.template import RULES
from glm5.chat.tokenizer import Tokenizer
from glm5.config.data import DataOptions
from glm5.config.recipe import SftStage
from glm5.data.loader import RowLoader
from glm5.data.mixture import make_loader
from glm5.data.packing import Batch
from glm5.data.sft import BadLines, Conversation, conversation_files, read_conversations, write_conversations
from glm5.data.sft_rows import RowCounts, SftRow, conversation_rows, cut_row
from glm5.data.shards import Shard
from glm5.errors import ConfigError, DataError
from glm5.files import atomic_write
from glm5.model.context import ForwardContext
from glm5.model.dsa import INDEXER
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.logs import get_logger
from glm5.seeds import derive_seed
from glm5.tasks import family_key, make_family
from glm5.train.loop import StageIO, train
from glm5.train.losses import language_loss
from glm5.train.step_metrics import StepMetrics

FAMILIES = "families"
"""Name of the demonstrations among the sources."""
ALL = "all"
"""Name of the single source without shares."""
WAITING = 32
"""Largest number of conversations that wait for a later step. With more, rows fill better but order is lost."""

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


def load_rows(
    source: Path | str, stage: SftStage, tokenizer: Tokenizer, bad: BadLines
) -> tuple[list[SftRow], RowCounts]:
    """All rows of a file or of a folder's files, and their counts.

    Raises:
        DataError: a line is unusable or a conversation too long, and the policy is "error"; or no row is left.
    """
    rows, counts, skipped = [], RowCounts(), bad.count
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
                rows.append(kept)
                counts.tokens += len(kept.ids)
                counts.targets += int(kept.mask.sum())
    counts.rows, counts.bad_lines = len(rows), bad.count - skipped
    if not counts.conversations:
        raise DataError(f"{source} contains no conversation ({counts.bad_lines} bad lines).")
    if not rows:
        raise DataError(
            f"{source}: none of {counts.conversations} conversations gives a row to train on: {counts.too_long} rows "
            f"are longer than {stage.row_length} tokens, {counts.untrained} conversations have no trained turn."
        )
    if counts.too_long:
        _log.warning(
            "%s: %d rows are longer than %d tokens (too_long = %s); %d targets are lost, %d are left.",
            source, counts.too_long, stage.row_length, stage.too_long, counts.lost_targets, counts.targets,
        )  # fmt: skip
    return rows, counts


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


class _Source:
    """Endless rows of one source: every row once per epoch, in a new random order."""

    def __init__(self, rows: Sequence[SftRow], seed: Callable[[int], int]) -> None:
        self.rows, self._seed = rows, seed
        self.drawn = self.tokens = 0
        self._order: list[int] = []

    def draw(self) -> SftRow:
        epoch, at = divmod(self.drawn, len(self.rows))
        if at == 0:
            generator = torch.Generator().manual_seed(self._seed(epoch))
            self._order = torch.randperm(len(self.rows), generator=generator).tolist()
        row = self.rows[self._order[at]]
        self.drawn += 1
        self.tokens += len(row.ids)
        return row


class SftBatches:
    """Step -> batch of the stage's `rows` rows; depends only on seed, stage name and step.

    Conversations are shuffled once per epoch. Each is placed whole into the fitting row with the least room; if none
    fits, it comes first in the next step. With several sources, the next conversation comes from the source with the
    fewest tokens relative to its share. `text` supplies rows of plain text.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[SftRow]],
        stage: SftStage,
        seed: int,
        shares: Mapping[str, float] | None = None,
        text: RowLoader | None = None,
    ) -> None:
        self.stage, self.shares, self.text = stage, shares or {}, text
        self.sources: dict[str, _Source] = {}
        for name, rows in sources.items():
            seeds = partial(derive_seed, seed, "conversations", stage.name, *(() if len(sources) == 1 else (name,)))
            self.sources[name] = _Source(rows, seeds)
        self._plan: list[list[list[SftRow]]] = []
        self._waiting: list[SftRow] = []

    def batch(self, step: int) -> Batch:
        """The batch of optimizer step `step`."""
        plan = self._planned(step)
        shape = (len(plan), self.stage.row_length)
        ids, documents = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.bool_)
        for r, placed in enumerate(plan):
            at = 0
            for number, row in enumerate(placed):
                span = slice(at, at := at + len(row.ids))
                ids[r, span], mask[r, span], documents[r, span] = row.ids, row.mask, number
        batch = Batch(torch.from_numpy(ids), torch.from_numpy(documents), torch.from_numpy(mask))
        if self.text is None:
            return batch
        texts = self.text.build(range(self._text_rows(step), self._text_rows(step + 1)))
        pairs = ((batch.ids, texts.ids), (batch.documents, texts.documents), (batch.loss_mask, texts.loss_mask))
        joined = [torch.cat(pair) for pair in pairs]
        return Batch(joined[0], joined[1], joined[2])

    def numbers(self, steps: int) -> dict[str, float]:
        """Statistics of the first `steps` steps: filled share of the conversation rows, and epochs per source."""
        self._planned(steps - 1)
        rows = [row for plan in self._plan[:steps] for row in plan]
        used = sum(len(row.ids) for placed in rows for row in placed)
        epochs = {name: source.drawn / len(source.rows) for name, source in self.sources.items()}
        named = {"epochs": epochs.popitem()[1]} if len(epochs) == 1 else {f"epochs/{n}": e for n, e in epochs.items()}
        return {"fill": used / max(1, len(rows) * self.stage.row_length), **named}

    def _text_rows(self, step: int) -> int:
        """Rows of plain text in all steps before this one."""
        return int(step * self.stage.rows * self.stage.text_share) if self.text is not None else 0

    def _planned(self, step: int) -> list[list[SftRow]]:
        while len(self._plan) <= step:
            done = len(self._plan)
            self._plan.append(self._fill(self.stage.rows - self._text_rows(done + 1) + self._text_rows(done)))
        return self._plan[step] if step >= 0 else []

    def _fill(self, count: int) -> list[list[SftRow]]:
        """The conversations of one step's rows: waiting ones first, then new ones until enough wait or nothing fits."""
        rows: list[list[SftRow]] = [[] for _ in range(count)]
        room = [self.stage.row_length] * count
        came, self._waiting = self._waiting, []
        twice = False  # no conversation waits for longer than an epoch
        while any(room) and len(self._waiting) < WAITING and not twice:
            row = came.pop(0) if came else self._draw()
            fitting = [(space, r) for r, space in enumerate(room) if space >= len(row.ids)]
            if fitting:
                space, r = min(fitting)
                rows[r].append(row)
                room[r] = space - len(row.ids)
            else:
                twice = any(other is row for other in self._waiting)
                self._waiting.append(row)
        self._waiting += came
        return rows

    def _draw(self) -> SftRow:
        return min(self.sources.items(), key=lambda item: item[1].tokens / self.shares.get(item[0], 1.0))[1].draw()


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
    batches, counts = prepare(stage, tokenizer, io.folder, seed, shards)
    io.ranks.on_main(lambda: _same_data(io, batches, counts))

    def loss_of(model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, StepMetrics]:
        loss, metrics = language_loss(model, batch, ctx, mtp_weight=stage.mtp_weight, mtp_depths=stage.mtp_depths)
        real = (batch.documents >= 0).sum()
        metrics.mean("fill", real, batch.ids.numel())
        metrics.mean("trained_share", batch.loss_mask.sum(), real)
        return loss, metrics

    numbers = train(
        model,
        stage,
        io,
        batches.batch,
        loss_of,
        trainable=lambda name: INDEXER not in name,
        bias_rate=stage.bias_rate,
    )
    data = {k: float(v) for k, v in vars(counts).items()}
    data |= {"trained_share": counts.targets / counts.tokens} | batches.numbers(stage.optim.steps)
    return numbers | {f"data/{name}": value for name, value in data.items()}


def _same_data(io: StageIO, batches: SftBatches, counts: RowCounts) -> None:
    """Write counts and digest of the rows to `rows.json`. Raises DataError for a resumed stage that began with other
    rows."""
    digest = hashlib.sha256()
    for source in batches.sources.values():
        for row in source.rows:
            digest.update(row.ids.tobytes())
            digest.update(row.mask.tobytes())
    path, text = io.folder / "rows.json", json.dumps({**vars(counts), "sha256": digest.hexdigest()}, indent=1) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") != text and (io.folder / "state").exists():
        raise DataError(
            f"{io.name}: the data changed since the stage began ({path} differs); restore it, or delete {io.folder}."
        )
    atomic_write(path, text)


def prepare(
    stage: SftStage, tokenizer: Tokenizer, folder: Path, seed: int, shards: Mapping[str, Shard] | None = None
) -> tuple[SftBatches, RowCounts]:
    """The stage's batches, and the counts of their data.

    Raises ConfigError for a stage without data, or with a `text_share` but no shards.
    """
    names = [stage.data] if isinstance(stage.data, str) else list(stage.data or ())
    shares = stage.data if isinstance(stage.data, dict) else None
    files: list[tuple[str, Path | str]] = [(name, name) for name in names if shares is None or name != FAMILIES]
    if (written := write_demonstrations(stage, folder, seed)) is not None:
        files.insert(0, (FAMILIES, written))
    if not files:
        raise ConfigError(f"{stage.name} has nothing to train on: list `families`, or set `data` to a JSONL file.")
    counts, bad = RowCounts(), BadLines(stage.bad_lines)
    sources: dict[str, list[SftRow]] = {}
    for name, path in files:
        rows, own = load_rows(path, stage, tokenizer, bad)
        sources.setdefault(name if shares is not None else ALL, []).extend(rows)
        counts.add(own)
    text = _text_loader(stage, tokenizer, seed, shards) if stage.text_share else None
    return SftBatches(sources, stage, seed, shares, text), counts


def _text_loader(stage: SftStage, tokenizer: Tokenizer, seed: int, shards: Mapping[str, Shard] | None) -> RowLoader:
    if not shards:
        raise ConfigError(f"{stage.name}: text_share = {stage.text_share} needs the shards of a run with `data`.")
    size = dict(rows=stage.rows, row_length=stage.row_length, seed=seed, name=stage.name)
    return make_loader(DataOptions(), shards, tokenizer, **size)  # type: ignore[arg-type]
