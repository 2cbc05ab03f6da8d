"""Which conversations share a row of which step of SFT, and the batches made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from glm5.config.recipe import SftStage
from glm5.data.loader import RowLoader
from glm5.data.packing import Batch, StepBatches
from glm5.data.sft_rows import SftRow
from glm5.seeds import derive_seed

WAITING = 32
"""Largest number of conversations that wait for a later step. With more, rows fill better but order is lost."""


class _Drawn(NamedTuple):
    """A conversation by the number of its source and of its row there, and its tokens."""

    source: int
    row: int
    tokens: int


class _Source:
    """Endless rows of one source: every row once per epoch, in a new random order."""

    def __init__(self, rows: Sequence[SftRow], share: float, seed: Callable[[int], int]) -> None:
        self.rows, self.share, self._seed = rows, share, seed
        self.drawn = self.tokens = 0
        self._order = np.empty(0, np.int64)

    def draw(self, number: int) -> _Drawn:
        epoch, at = divmod(self.drawn, len(self.rows))
        if at == 0:
            generator = torch.Generator().manual_seed(self._seed(epoch))
            self._order = torch.randperm(len(self.rows), generator=generator).numpy()
        row = int(self._order[at])
        found = _Drawn(number, row, len(self.rows[row].ids))
        self.drawn += 1
        self.tokens += found.tokens
        return found


class SftBatches(StepBatches):
    """Batches of the stage's `rows` rows; they depend only on seed, stage name and step.

    Conversations are shuffled once per epoch. Each is placed whole into the fitting row with the least room; if none
    fits, it comes first in the next step. With several sources, the next conversation comes from the source with the
    fewest tokens relative to its share. `text` supplies rows of plain text, the last of a step. The plan of the steps
    so far is kept, 24 bytes per conversation; the tokens are read for the rows that are built.
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
            self.sources[name] = _Source(rows, self.shares.get(name, 1.0), seeds)
        self._ordered = list(self.sources.values())
        self._plan: list[np.ndarray] = []  # per step [conversations, 3]: row of the batch, source, row of the source
        self._used: list[int] = []  # tokens of conversations per step
        self._waiting: list[_Drawn] = []

    def num_rows(self, step: int) -> int:
        """See `StepBatches`."""
        return self.stage.rows

    def build(self, step: int, rows: range) -> Batch:
        """See `StepBatches`."""
        talks = self._talks(step)
        own = range(min(rows.start, talks), min(rows.stop, talks))
        batch = self._conversations(step, own)
        if self.text is None:
            return batch
        before = self._text_rows(step) - talks  # of the first row of the step, were it text
        texts = self.text.build(range(before + max(rows.start, talks), before + max(rows.stop, talks)))
        pairs = ((batch.ids, texts.ids), (batch.documents, texts.documents), (batch.loss_mask, texts.loss_mask))
        joined = [torch.cat(pair) for pair in pairs]
        return Batch(joined[0], joined[1], joined[2])

    def numbers(self, steps: int) -> dict[str, float]:
        """Statistics of the first `steps` steps: filled share of the conversation rows, and epochs per source."""
        self._planned(steps - 1)
        rows = steps * self.stage.rows - self._text_rows(steps)
        epochs = {name: source.drawn / len(source.rows) for name, source in self.sources.items()}
        named = {"epochs": epochs.popitem()[1]} if len(epochs) == 1 else {f"epochs/{n}": e for n, e in epochs.items()}
        return {"fill": sum(self._used[:steps]) / max(1, rows * self.stage.row_length), **named}

    def _conversations(self, step: int, rows: range) -> Batch:
        shape = (len(rows), self.stage.row_length)
        ids, documents = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.bool_)
        plan = self._planned(step)
        for at, number in enumerate(rows):
            end = 0
            for count, (_, source, index) in enumerate(plan[plan[:, 0] == number].tolist()):
                row = self._ordered[source].rows[index]
                span = slice(end, end := end + len(row.ids))
                ids[at, span], mask[at, span], documents[at, span] = row.ids, row.mask, count
        return Batch(torch.from_numpy(ids), torch.from_numpy(documents), torch.from_numpy(mask))

    def _text_rows(self, step: int) -> int:
        """Rows of plain text in all steps before this one."""
        return int(step * self.stage.rows * self.stage.text_share) if self.text is not None else 0

    def _talks(self, step: int) -> int:
        """Rows of conversations in this step."""
        return self.stage.rows - self._text_rows(step + 1) + self._text_rows(step)

    def _planned(self, step: int) -> np.ndarray:
        while len(self._plan) <= step:
            placed = self._fill(self._talks(len(self._plan)))
            self._plan.append(np.array([(r, c.source, c.row) for r, c in placed], dtype=np.int64).reshape(-1, 3))
            self._used.append(sum(c.tokens for _, c in placed))
        return self._plan[step] if step >= 0 else np.empty((0, 3), np.int64)

    def _fill(self, count: int) -> list[tuple[int, _Drawn]]:
        """One step's conversations, each with its row: waiting ones first, then new ones until enough wait or nothing
        fits."""
        placed: list[tuple[int, _Drawn]] = []
        room = [self.stage.row_length] * count
        came, self._waiting = self._waiting, []
        twice = False  # no conversation waits for longer than an epoch
        while any(room) and len(self._waiting) < WAITING and not twice:
            talk = came.pop(0) if came else self._draw()
            fitting = [(space, r) for r, space in enumerate(room) if space >= talk.tokens]
            if fitting:
                space, r = min(fitting)
                placed.append((r, talk))
                room[r] = space - talk.tokens
            else:
                twice = talk in self._waiting
                self._waiting.append(talk)
        self._waiting += came
        return placed

    def _draw(self) -> _Drawn:
        number, source = min(enumerate(self._ordered), key=lambda item: item[1].tokens / item[1].share)
        return source.draw(number)
