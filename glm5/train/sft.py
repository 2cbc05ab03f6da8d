"""Supervised fine-tuning on packed conversations (§3.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from glm5.chat.tokenizer import Tokenizer
from glm5.config.recipe import SftStage
from glm5.data.packing import Batch, pack_batch
from glm5.data.sft import Conversation, read_conversations, render_rows, write_conversations
from glm5.model.context import ForwardContext
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.seeds import derive_seed
from glm5.tasks import make_family
from glm5.train.loop import StageIO, train
from glm5.train.losses import language_loss
from glm5.train.tally import Tally


def generated_conversations(stage: SftStage, seed: int) -> list[Conversation]:
    """Demonstrations of the stage's families in proportion to their weights, training split only."""
    total = sum(family.weight for family in stage.families)
    found = []
    for config in stage.families:
        family = make_family(config.name, **config.options)
        for index in range(round(stage.conversations * config.weight / total)):
            problem = family.problem("train", index)
            messages = problem.demonstration(derive_seed(seed, "demonstration", config.name, index))
            tools = problem.tools if config.render_tools else ()
            found.append(Conversation(messages, tools, problem.thinking))
    return found


def row_batches(rows: Sequence[tuple[list[int], list[bool]]], stage: SftStage, seed: int) -> Callable[[int], Batch]:
    """Step -> packed batch of about `rows` full rows. Conversations are shuffled once per epoch by the seed."""
    budget = stage.rows * stage.row_length
    order: list[int] = []
    starts = [0]

    def extend() -> None:
        """Append one more batch to the plan: conversations in shuffled order until the token budget is used."""
        used, at = 0, starts[-1]
        while True:
            while at >= len(order):
                epoch = len(order) // len(rows)
                generator = torch.Generator().manual_seed(derive_seed(seed, "conversations", stage.name, epoch))
                order.extend(torch.randperm(len(rows), generator=generator).tolist())
            used += len(rows[order[at]][0])
            if used > budget and at > starts[-1]:
                break
            at += 1
        starts.append(at)

    def batch(step: int) -> Batch:
        while len(starts) < step + 2:
            extend()
        chosen = [rows[i] for i in order[starts[step] : starts[step + 1]]]
        return pack_batch(chosen, stage.row_length)[0]

    return batch


def run(model: GLM5ForCausalLM, stage: SftStage, tokenizer: Tokenizer, io: StageIO, seed: int) -> dict[str, float]:
    """Fine-tune everything but the indexers, which stay frozen after DSA adaptation."""
    if stage.data is not None:
        conversations = read_conversations(Path(stage.data))
    else:
        path = io.folder / "conversations.jsonl"
        if not path.exists():
            write_conversations(path, generated_conversations(stage, seed))
        conversations = read_conversations(path)
    rows = render_rows(conversations, tokenizer, stage.row_length)

    def loss_of(model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, Tally]:
        return language_loss(model, batch, ctx, mtp_weight=stage.mtp_weight, mtp_depths=stage.mtp_depths)

    return train(
        model,
        stage,
        io,
        row_batches(rows, stage, seed),
        loss_of,
        trainable=lambda name: ".indexer." not in name,
        bias_rate=stage.bias_rate,
    )
