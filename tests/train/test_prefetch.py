"""Rows of a step by rank and ahead of time: the whole batch is what one process would have built."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.config.optim import OptimConfig
from glm5.config.recipe import PretrainStage, SftStage
from glm5.data.packing import Batch, StepBatches
from glm5.errors import DataError, Glm5Error
from glm5.parallel.ranks import Ranks
from glm5.train import pretrain, sft
from glm5.train.loop import train
from glm5.train.losses import backbone_loss
from glm5.train.prefetch import AHEAD, Prefetch
from tests.thread_ranks import on_ranks

STEPS = 6
OPTIM = OptimConfig(steps=STEPS, lr=1e-2, save_every=0, warmup=1)
TENSORS = ("ids", "documents", "loss_mask")


def stage_batches(name: str, tokenizer: Any, shard: Any, folder: Path) -> StepBatches:
    shards = {"one": shard, "two": shard}
    corpus: dict[str, Any] = {
        "stream": {},
        "ramp": {},
        "mixture": {"weights": {"one": 3, "two": 1}, "needle_share": 0.2, "negatives_share": 0.2},
        "fim": {"fim_rate": 0.7, "fim_shards": ["two"]},
        "best-fit": {"packing": "best_fit", "fim_rate": 0.5},
        "only-needles": {"needle_share": 1.0},
    }
    if name in corpus:
        ramp = {"rows": 1, "tokens": 300} if name == "ramp" else None
        options = dict(kind="pretrain", name=name, optim=OPTIM, rows=5, row_length=64, ramp=ramp)
        stage = PretrainStage(corpus=corpus[name], **options)  # type: ignore[arg-type]
        return pretrain.batches(shards, tokenizer, stage, seed=3)
    lines = [{"messages": [{"role": role, "content": "x" * n} for role in ("user", "assistant")]} for n in range(1, 25)]
    files = [folder / "a.jsonl", folder / "b.jsonl"]
    for file in files:
        file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    data: Any = {str(files[0]): 1.0, str(files[1]): 2.0} if name == "sft-sources" else str(files[0])
    share = 0.5 if name == "sft-with-text" else 0.0
    stage = SftStage(kind="sft", name=name, optim=OPTIM, rows=5, row_length=80, data=data, text_share=share)  # type: ignore[assignment]
    return sft.prepare(stage, tokenizer, folder, 0, shards)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["stream", "ramp", "mixture", "fim", "best-fit", "only-needles", "sft", "sft-sources", "sft-with-text"],
)
def test_ranks_together_have_the_batch_of_one_process(name: str, tokenizer: Any, shard: Any, tmp_path: Path) -> None:
    """Worlds that divide no batch, and one with more ranks than the first batches of a ramp have rows."""
    whole = [stage_batches(name, tokenizer, shard, tmp_path)(step) for step in range(STEPS)]
    assert name != "ramp" or len({len(batch.ids) for batch in whole}) > 2
    for world in (1, 2, 3):
        # Every rank has batches of its own, as in processes of their own; they begin in the middle, as resumed ones do.
        own = [stage_batches(name, tokenizer, shard, tmp_path) for _ in range(world)]

        def follow(ranks: Ranks, own: list[StepBatches] = own) -> list[Batch]:
            with Prefetch(own[ranks.rank], range(2, STEPS), ranks) as batches:
                return [batches.take(step) for step in range(2, STEPS)]

        for rank, found in enumerate(on_ranks(world, follow)):
            for batch, expected in zip(found, whole[2:], strict=True):
                each = -(-len(expected.ids) // world)
                part = expected.rows(rank * each, (rank + 1) * each)
                assert all(torch.equal(getattr(batch, k), getattr(part, k)) for k in TENSORS)
                assert batch.step == expected.counts()
                assert (batch.before, batch.sparse_targets) == (expected.before, expected.sparse_targets)


class Numbered(StepBatches):
    """Three rows that hold the number of their step; notes what was built, and fails at one step."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad
        self.built: list[tuple[int, range]] = []

    def num_rows(self, step: int) -> int:
        return 3

    def build(self, step: int, rows: range) -> Batch:
        self.built.append((step, rows))
        if step == self.bad:
            raise DataError("the corpus is gone")
        ids = torch.full((len(rows), 8), step)
        return Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))


def settled(batches: Numbered, count: int) -> int:
    """How much was built, once that is at least `count` and nothing more comes for a while."""
    deadline = time.monotonic() + 60
    while len(batches.built) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    return len(batches.built)


def prefetchers() -> Iterator[threading.Thread]:
    return (thread for thread in threading.enumerate() if thread.name == "prefetch")


def test_few_steps_are_built_ahead_and_only_those_that_come() -> None:
    source = Numbered()
    with Prefetch(source, range(3, 8), Ranks()) as batches:
        assert settled(source, AHEAD + 1) == AHEAD + 1
        for taken, step in enumerate(range(3, 8), 1):
            assert batches.take(step).ids.unique().tolist() == [step]
            assert settled(source, min(5, taken + AHEAD + 1)) == min(5, taken + AHEAD + 1)
    assert source.built == [(step, range(3)) for step in range(3, 8)]


@pytest.mark.parametrize("taken", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_the_thread_ends_with_the_block(taken: int, late: bool) -> None:
    source = Numbered()
    with suppress(KeyboardInterrupt), Prefetch(source, range(100), Ranks()) as batches:
        for step in range(taken):
            batches.take(step)
        if late:
            settled(source, taken + AHEAD + 1)  # it waits for its place in the queue
        raise KeyboardInterrupt
    assert not list(prefetchers()) and len(source.built) <= taken + AHEAD + 1


def test_an_error_is_raised_at_its_step_on_all_ranks() -> None:
    seen: list[list[int]] = [[], []]

    def follow(ranks: Ranks) -> None:
        with Prefetch(Numbered(bad=3 if ranks.rank else -1), range(9), ranks) as batches:
            for step in range(9):
                seen[ranks.rank].append(int(batches.take(step).ids[0, 0]))

    first, second = on_ranks(2, follow)
    assert isinstance(second, DataError) and str(second) == "the corpus is gone"
    assert type(first) is Glm5Error and str(first) == "Rank 1 failed: the corpus is gone"
    assert seen == [[0, 1, 2], [0, 1, 2]] and not list(prefetchers())


def test_a_plain_function_is_called_at_its_step() -> None:
    asked: list[tuple[int, threading.Thread]] = []

    def batch_at(step: int) -> Batch:
        asked.append((step, threading.current_thread()))
        return Numbered()(step)

    with Prefetch(batch_at, range(3), Ranks()) as batches:
        for step in range(3):
            assert batches.take(step).step is None
            assert asked == [(earlier, threading.current_thread()) for earlier in range(step + 1)]


def test_training_does_not_depend_on_who_builds_the_rows(small: Any, tokenizer: Any, shard: Any, stage_io: Any) -> None:
    """Ahead of time or at the step, and interrupted between: the same numbers and weights, bit for bit."""
    options: dict[str, Any] = dict(rows=3, row_length=32, micro_rows=2, ramp={"rows": 1, "tokens": 150})
    optim = OPTIM.model_copy(update={"save_every": 2})
    stage = PretrainStage(kind="pretrain", name="pre", optim=optim, **options)
    models, numbers = [], []
    for how in ("ahead", "at the step", "interrupted"):
        batches = pretrain.batches(shard, tokenizer, stage, seed=0)
        source: Any = (lambda step, batches=batches: batches(step)) if how == "at the step" else batches
        go = partial(train, stage=stage, batch_at=source, loss_of=partial(backbone_loss, stage=stage), bias_rate=0.01)
        if how == "interrupted":
            with pytest.raises(KeyboardInterrupt):
                go(small(vocab_size=tokenizer.vocab_size, seed=1), io=stage_io(how, stop_after=3))
            assert not list(prefetchers())
        models.append(small(vocab_size=tokenizer.vocab_size, seed=1))
        last = go(models[-1], io=stage_io(how))
        numbers.append({k: v for k, v in last.items() if "second" not in k})
    assert numbers[0] == numbers[1] == numbers[2]
    for name, tensor in models[0].state_dict().items():
        assert all(torch.equal(tensor, other.state_dict()[name]) for other in models[1:]), name
