"""Measurements on held-out text after training: loss by length, attention logits, kept attention, drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from glm5.chat import Tokenizer
from glm5.data.loader import StreamLoader
from glm5.data.packing import Batch
from glm5.data.shards import Shard
from glm5.engine.measure_acceptance import generate_speculative
from glm5.errors import DataError
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.seeds import derive_seed
from glm5.tasks.needle import needle_text
from glm5.train.losses import IndexerLoss, language_loss, target_logprobs
from glm5.train.step_metrics import StepMetrics

TOKENS_AT_ONCE = 4096
DRAFTS = 3


def held_out_batches(shard: Shard, rows: int, length: int, device: torch.device) -> Iterator[Batch]:
    """The same packed rows of held-out text for every model, in parts that have the counts of the whole."""
    loader = StreamLoader(shard, rows=rows, row_length=length, seed=0)
    if rows > loader.rows_per_epoch:
        raise DataError(f"The held-out text has {loader.rows_per_epoch} rows of {length} tokens, fewer than {rows}.")
    whole = loader.batch(0)
    counts, size = whole.counts(), max(1, TOKENS_AT_ONCE // length)
    for start in range(0, rows, size):
        yield replace(whole.rows(start, min(rows, start + size)), step=counts).to(device)


@torch.no_grad()
def text_numbers(model: GLM5ForCausalLM, shard: Shard, rows: int, length: int, depths: int = 0) -> dict[str, float]:
    """Held-out `loss` and `accuracy`, those of MTP depths (`mtp1_loss`, …), the largest attention logit `max_logit`,
    and `head_logit`: the median over all heads of the trunk of each head's largest logit."""
    metrics = StepMetrics()
    heads: dict[int, Tensor] = {}
    for batch in held_out_batches(shard, rows, length, model.device):
        ctx = packed_context(batch.documents, exact=False)
        ctx.max_logits = {}
        metrics.merge([language_loss(model, batch, ctx, mtp_weight=float(depths > 0), mtp_depths=depths)[1]])
        for layer, found in ctx.max_logits.items():
            heads[layer] = torch.maximum(heads[layer], found) if layer in heads else found
    trunk = [float(v) for layer, found in heads.items() if layer < model.config.num_hidden_layers for v in found]
    numbers = metrics.numbers()
    del numbers["tokens"]
    return numbers | {"max_logit": max(trunk), "head_logit": median(trunk)}


def blocks(shard: Shard, longest: int, block: int, count: int) -> list[tuple[int, int]]:
    """(document, end) of `count` blocks of `block` held-out tokens with `longest - block` tokens before them in their
    document, drawn by a fixed seed from a grid."""
    grid = [(index, end) for index in range(len(shard)) for end in range(longest, len(shard.document(index)), block)]
    if len(grid) < count:
        raise DataError(f"The held-out documents have {len(grid)} blocks with {longest} tokens, fewer than {count}.")
    order = torch.randperm(len(grid), generator=torch.Generator().manual_seed(derive_seed(0, "blocks")))
    return [grid[i] for i in sorted(order[:count].tolist())]


@torch.no_grad()
def block_loss(model: GLM5ForCausalLM, shard: Shard, ends: list[tuple[int, int]], length: int, block: int) -> float:
    """Nats per token of the last `block` tokens of rows of `length` tokens of one document. The scored tokens are the
    same at every length, so losses differ only by the context."""
    total, count = 0.0, 0
    rows = max(1, TOKENS_AT_ONCE // length)
    for start in range(0, len(ends), rows):
        texts = [shard.document(index)[end - length : end].astype(int) for index, end in ends[start : start + rows]]
        ids = torch.tensor([text.tolist() for text in texts], device=model.device)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, -block:] = True
        batch = Batch(ids, torch.zeros_like(ids), mask)
        targets, wanted = batch.targets()
        hidden = model.model(ids, packed_context(batch.documents, exact=False))
        logprobs = target_logprobs(model, hidden, targets, wanted)[0]
        total -= float(logprobs.cpu().double().sum())
        count += logprobs.numel()
    return total / count


@torch.no_grad()
def retrieval(
    model: GLM5ForCausalLM, tokenizer: Tokenizer, length: int, problems: int, seed: int = 0
) -> tuple[float, float]:
    """Share of held-out needle texts of `length` bytes whose whole value is the likeliest continuation, token by token,
    with depths from the first to the last line; and the mean log-probability of a value, in nats."""
    texts = [needle_text(seed, i, length, i / max(1, problems - 1), split="heldout") for i in range(problems)]
    rows = [(tokenizer.encode(prompt), tokenizer.encode(answer)) for prompt, answer in texts]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    right, total = 0, 0.0
    step = max(1, TOKENS_AT_ONCE // width)
    for some in (rows[at : at + step] for at in range(0, problems, step)):
        ids, documents = torch.zeros(len(some), width, dtype=torch.long), torch.full((len(some), width), -1)
        for row, (prompt, answer) in enumerate(some):
            whole = prompt + answer
            ids[row, : len(whole)], documents[row, : len(whole)] = torch.tensor(whole), 0
        hidden = model.model(ids.to(model.device), packed_context(documents.to(model.device), exact=False))
        logits = hidden[: ids.numel()] @ model.lm_head.weight.T
        scores = logits.float().log_softmax(-1).view(*ids.shape, -1).cpu()
        for row, (prompt, answer) in enumerate(some):
            own = scores[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]
            right += own.argmax(-1).tolist() == answer
            total += float(own[range(len(answer)), answer].sum())
    return right / problems, total / problems


class KeptAttention(IndexerLoss):
    """Observer of dense attention: the attention mass of k keys chosen by the indexer, by an oracle, or by nearness."""

    def measure(self, layer: int, scores: Tensor, target: Tensor, valid: Tensor, crowded: Tensor) -> None:
        """See `IndexerLoss`; all [B, t, s]. Only `crowded` queries, which see more than k keys, count."""
        low = float("-inf")
        ours = scores.masked_fill(~valid, low).topk(self.topk, dim=-1).indices
        best = target.masked_fill(~valid, -1.0).topk(self.topk, dim=-1).indices
        slots = torch.arange(valid.shape[-1], device=valid.device).expand_as(valid)
        near = slots.masked_fill(~valid, -1).topk(self.topk, dim=-1).indices
        mass = target.masked_fill(~valid, 0.0).sum(-1).clamp_min(1e-20)
        chosen = torch.zeros_like(valid).scatter_(-1, ours, True)
        values = {
            "kept_mass": target.gather(-1, ours).sum(-1) / mass,
            "kept_mass_oracle": target.gather(-1, best).sum(-1) / mass,
            "kept_mass_nearest": target.gather(-1, near).sum(-1) / mass,
            "recall": chosen.gather(-1, best).float().mean(-1),
        }
        for name, value in values.items():
            self.metrics.mean(name, value[crowded].sum(), crowded.sum())


@torch.no_grad()
def kept_attention(model: GLM5ForCausalLM, shard: Shard, rows: int, length: int, topk: int) -> dict[str, float]:
    """Attention mass that the indexer's top k keep under dense attention, mean over queries with more keys than that;
    `recall` is the share of the k most attended keys that it finds."""
    metrics = StepMetrics()
    for batch in held_out_batches(shard, rows, length, model.device):
        ctx = packed_context(batch.documents, exact=False)
        ctx.observer, ctx.attend_dense = KeptAttention(batch, topk, metrics), True
        model.model(batch.ids, ctx)
    return metrics.numbers()


def pinned_prompts(shard: Shard, tokenizer: Tokenizer, count: int, length: int, spare: int) -> list[dict[str, Any]]:
    """Prompts of `length` tokens from held-out documents, evenly over documents, at offsets drawn by a hash of the
    path: `path`, `offset` in tokens, `ids`, and the first line of the `text` for readers. `spare` tokens follow."""
    long_enough = [i for i in range(len(shard)) if len(shard.document(i)) > length + spare]
    if not long_enough:
        raise DataError(f"No held-out document has {length + spare} tokens.")
    found = []
    for number in range(count):
        index = long_enough[number % len(long_enough)]
        tokens, path = shard.document(index), shard.paths[index]
        offset = derive_seed(0, "prompt", path, number // len(long_enough)) % (len(tokens) - length - spare)
        ids = tokens[offset : offset + length].astype(int).tolist()
        text = tokenizer.decode(ids).strip()
        found.append({"path": path, "offset": offset, "ids": ids, "text": text.splitlines()[0] if text else ""})
    return found


def acceptance(model: GLM5ForCausalLM, prompts: list[dict[str, Any]], max_tokens: int) -> dict[str, float]:
    """Greedy speculative decoding with `DRAFTS` chained drafts: `accept_length` (tokens per verification, at most
    DRAFTS + 1), `accept@k` = share of rounds that accept draft k, `accept_given@k` = the same among rounds that reached
    it, and `repetition`, the share of repeated 4-grams in the output (loops are easy to draft)."""
    done = generate_speculative(model, [prompt["ids"] for prompt in prompts], max_tokens=max_tokens, drafts=DRAFTS)
    numbers = {"accept_length": done.accept_length, "repetition": repetition(done.token_ids)}
    reached = done.rounds
    for place, count in enumerate(done.accepted, start=1):
        numbers[f"accept@{place}"] = count / max(1, done.rounds)
        numbers[f"accept_given@{place}"] = count / max(1, reached)
        reached = count
    return numbers


def repetition(outputs: list[list[int]], size: int = 4) -> float:
    """Share of n-grams that occurred earlier in the same output."""
    grams = [tuple(ids[i : i + size]) for ids in outputs for i in range(len(ids) - size + 1)]
    fresh = sum(len({tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)}) for ids in outputs)
    return 1.0 - fresh / max(1, len(grams))
