"""Pipeline parallel training: every rank computes some stages of the model, by a schedule (§2.4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.config.pipeline import Span
from glm5.config.pipeline_schedule import Action, Schedule, make_schedule, turns
from glm5.model.context import ForwardContext
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.layers import Linear
from glm5.model.moe import Experts
from glm5.model.pipeline_stage import StagePass, run_layers, stage_modules
from glm5.ops.deferred import WeightQueue
from glm5.parallel.mesh import lost_ranks
from glm5.parallel.zero import StageGradients

P = TypeVar("P")
T = TypeVar("T")

CHANNELS = 4
"""Process groups between the stages: forward and backward, from even and from odd ranks. On each, all transfers between
two ranks go one way, in an order that both know; a communicator of NCCL needs that."""


@lru_cache
def _schedule(pp: int, chunks: int, micros: int, deferred: int) -> tuple[Schedule, dict[tuple[bool, int, int], int]]:
    schedule = make_schedule(pp, chunks, micros, deferred)
    return schedule, turns(schedule)


LAST = 1 << 62
"""A turn after all others."""


class Sent(NamedTuple):
    """A tensor on its way: the other rank receives it in its action number `turn`."""

    turn: int
    work: Any
    tensor: Tensor


class StageLinks:
    """Transfers between the ranks that compute the same rows in different stages. `ranks`: their global numbers;
    `index`: this rank's place among them; `groups`: one for each of CHANNELS.

    What is sent must not change and stays in memory until the other rank has it. That is known when something arrives
    that the other rank has sent later (`turn`: places in the other rank's schedule). gloo's sends do not tell.
    """

    def __init__(self, ranks: Sequence[int], index: int, groups: Sequence[dist.ProcessGroup], device: torch.device):
        self.ranks, self.index, self.groups, self.device = ranks, index, groups, device
        self.waited = 0.0
        self._sent: dict[int, list[Sent]] = {rank: [] for rank in range(len(ranks))}

    def rank_of(self, stage: int) -> int:
        """The place of the rank that has a stage."""
        return stage % len(self.ranks)

    def send(self, tensor: Tensor, stage: int, turn: int, backward: bool = False) -> None:
        """Start to send to the rank of `stage`, which receives it in its action number `turn`."""
        other = self.rank_of(stage)
        tensor, group = tensor.contiguous(), self._channel(self.index, backward)
        with lost_ranks():
            self._sent[other].append(Sent(turn, dist.isend(tensor, self.ranks[other], group=group), tensor))

    def receive(
        self, stage: int, turn: int, shape: tuple[int, ...], dtype: torch.dtype, backward: bool = False
    ) -> Tensor:
        """The next tensor from the rank of `stage`, which sends it at the end of its action number `turn`."""
        source, out = self.rank_of(stage), torch.empty(shape, dtype=dtype, device=self.device)
        began = time.perf_counter()
        with lost_ranks():
            dist.recv(out, self.ranks[source], group=self._channel(source, backward))
            self._forget(source, turn)
        self.waited += time.perf_counter() - began
        return out

    def bound(self, stage: int) -> None:
        """Wait until the rank of `stage` lacks no more than what it receives in as many actions as there are ranks. For
        forward passes from which nothing comes back. Ranks do not wait in a circle there: all have the same order."""
        other = self.rank_of(stage)
        turns = sorted({one.turn for one in self._sent[other]})
        if len(turns) > len(self.ranks):
            with lost_ranks():
                self._forget(other, turns[-1 - len(self.ranks)])

    def flush(self) -> None:
        """Wait until everything is sent."""
        with lost_ranks():
            for other in self._sent:
                self._forget(other, LAST)

    def _forget(self, other: int, turn: int) -> None:
        """Free what the rank `other` has received in its actions up to `turn`."""
        kept = []
        for one in self._sent[other]:
            if one.turn <= turn:
                one.work.wait()
            else:
                kept.append(one)
        self._sent[other] = kept

    def broadcast(self, tensor: Tensor, stage: int) -> Tensor:
        """The tensor of the rank of `stage`, on all ranks of the pipeline."""
        with lost_ranks():
            dist.broadcast(tensor, self.ranks[self.rank_of(stage)], group=self.groups[0])
        return tensor

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the stages, in place."""
        with lost_ranks():
            dist.all_reduce(tensor, group=self.groups[0])
        return tensor

    def _channel(self, source: int, backward: bool) -> dist.ProcessGroup:
        return self.groups[2 * backward + source % 2]


class Pipeline:
    """The stages of one rank. `spans`: those of all ranks, in order. `differentiable`: whether gradients flow between
    stages."""

    def __init__(
        self,
        model: GLM5ForCausalLM,
        spans: Sequence[Span],
        links: StageLinks,
        dtype: torch.dtype,
        differentiable: bool,
        deferred: int,
    ) -> None:
        self.model, self.spans, self.links = model, spans, links
        self.differentiable, self.deferred = differentiable, deferred
        self.own = spans[links.index :: len(links.ranks)]
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        prefixes = [tuple(f"{name}." for name, _ in stage_modules(model, span)) for span in self.own]
        chunks = [[name for name in trained if name.startswith(chunk)] for chunk in prefixes]
        self.gradients = StageGradients(model, chunks, dtype)
        self._queue = WeightQueue(self.gradients.add)
        for module in model.modules() if deferred else ():
            if isinstance(module, Linear | Experts):
                module.weight_queue = self._queue
        self.computing = False
        self.trace: list[tuple[Action, float, float, float]] | None = None
        self._passes: dict[tuple[int, int], tuple[StagePass, Tensor]] = {}
        self._turns: dict[tuple[bool, int, int], int] = {}

    def accumulate(self, parts: Sequence[P], work: Callable[[P, StagePass], Tensor]) -> list[Tensor]:
        """Forward and backward of all micro-batches; without gradients, only forward. `work` computes a stage's part of
        the loss. Gradients are the parameters' `grad` afterwards. Returns the loss of each micro-batch, over all
        stages."""
        schedule, self._turns = _schedule(len(self.links.ranks), len(self.own), len(parts), self.deferred)
        plan = schedule[self.links.index]
        if not torch.is_grad_enabled():
            plan = tuple(action for action in plan if action.kind == "F")
        losses = torch.zeros(len(parts), device=self.model.device)
        self.computing = True
        try:
            with self.gradients.gathered():
                for action in plan:
                    self._act(action, parts, work, losses)
                self.links.flush()
            self.gradients.finish()
        finally:
            self.computing = False
            self._passes.clear()
            self._queue.clear()
            self.gradients.drop()
        if torch.is_grad_enabled():
            self._sum_copies()
        return list(self.links.sum(losses))

    def _act(self, action: Action, parts: Sequence[P], work: Callable[[P, StagePass], Tensor], losses: Tensor) -> None:
        began, waited = time.perf_counter(), self.links.waited
        chunk = action.stage // len(self.links.ranks)
        if action.kind == "F":
            losses[action.micro] += self._forward(action, parts[action.micro], work)
        elif action.kind == "R":
            self.gradients.reduce(chunk)
        else:
            self.gradients.select(chunk)
            key = action.stage, action.micro
            self._queue.begin(key if action.kind == "I" else None)
            if action.kind == "W":
                self._queue.compute(key)
            else:
                self._backward(action)
        if self.trace is not None:
            self.trace.append((action, began, time.perf_counter(), self.links.waited - waited))

    def _forward(self, action: Action, part: P, work: Callable[[P, StagePass], Tensor]) -> Tensor:
        before, after = (self._turns.get((False, action.stage + step, action.micro), LAST) for step in (-1, 1))
        receive = partial(self.links.receive, action.stage - 1, before)
        stage_pass = StagePass(self.spans[action.stage], receive, self.differentiable)
        loss = work(part, stage_pass)
        for state in stage_pass.sent:
            self.links.send(state.detach(), action.stage + 1, after)
        if stage_pass.indices is not None:
            self.links.send(stage_pass.indices, action.stage + 1, after)
        if not (self.differentiable and torch.is_grad_enabled()):
            self.links.bound(action.stage + 1)
        if torch.is_grad_enabled():
            self._passes[action.stage, action.micro] = stage_pass, loss
        return loss.detach()

    def _backward(self, action: Action) -> None:
        stage_pass, loss = self._passes.pop((action.stage, action.micro))
        roots: list[Tensor] = [loss] if loss.requires_grad else []
        gradients: list[Tensor | None] = [None] if loss.requires_grad else []
        after, before = (self._turns.get((True, action.stage + step, action.micro), LAST) for step in (1, -1))
        for state in stage_pass.sent if self.differentiable else ():
            arrived = self.links.receive(action.stage + 1, after, tuple(state.shape), state.dtype, backward=True)
            if state.requires_grad:
                roots.append(state)
                gradients.append(arrived)
        if roots:
            torch.autograd.backward(roots, gradients)
        for state in stage_pass.received if self.differentiable else ():
            gradient = torch.zeros_like(state) if state.grad is None else state.grad
            self.links.send(gradient, action.stage - 1, before, backward=True)

    def _sum_copies(self) -> None:
        """Sum the gradients of the embedding over its two copies: the first stage's, and that of the stage with MTP."""
        holders = {self.links.rank_of(span.stage) for span in self.spans if span.embeds or span.mtp}
        if len(holders) < 2 or self.links.index not in holders:
            return
        parameter: Any = self.model.model.embed_tokens.weight
        if not parameter.requires_grad:
            return
        if parameter.grad is None:  # MTP had no part in this step
            parameter.grad = torch.zeros_like(parameter)
        (other,) = holders - {self.links.index}
        own: Tensor = parameter.grad.to_local()
        self.links.send(own.clone(), other, LAST)
        own.add_(self.links.receive(other, LAST, tuple(own.shape), own.dtype))

    @contextmanager
    def relayed(self) -> Iterator[None]:
        """Inside, without gradients, the model computes as if it were whole: each stage in turn, on its rank, and all
        ranks get every hidden state. All ranks must compute the same."""
        model = self.model
        with self.gradients.gathered():
            whole = self._head()
            lent = not hasattr(model, "lm_head")
            model.model.relay = Relay(self)
            try:
                if lent:
                    model.lm_head = whole
                yield
            finally:
                model.model.relay = None
                if lent:
                    del model.lm_head

    def _head(self) -> Linear:
        """The output head, sent by the last stage."""
        model, config = self.model, self.model.config
        with torch.device("meta"):
            head = Linear(config.hidden_size, config.vocab_size)
        own = getattr(model, "lm_head", None)
        weight = (
            torch.empty(head.weight.shape, dtype=model.dtype, device=self.links.device) if own is None else own.weight
        )
        head.weight = torch.nn.Parameter(self.links.broadcast(weight.detach(), self.spans[-1].stage), False)
        return head


class Relay:
    """The forward pass of all stages in turn (see `Pipeline.relayed`)."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.links = pipeline, pipeline.links

    def trunk(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `GLM5Model.forward`."""
        model = self.pipeline.model
        config = model.config
        x = ctx.flat(torch.empty(*input_ids.shape, config.hidden_size, dtype=model.dtype, device=input_ids.device))
        width = min(config.index_topk or 0, ctx.length)
        indices: Tensor | None = None
        for span in self.pipeline.spans:
            mine = self.links.rank_of(span.stage) == self.links.index
            if mine:
                x = ctx.flat(model.model.embed_tokens(input_ids)) if span.embeds else x
                x, indices = run_layers(model, span, x, ctx, indices if span.takes_indices else None)
                x = model.model.norm(x) if span.norm else x
            x = self.links.broadcast(x.contiguous(), span.stage)
            if span.gives_indices and not ctx.attend_dense:
                shape = ctx.batch, ctx.length, width
                kept = (
                    indices if mine and indices is not None else torch.empty(shape, dtype=torch.int64, device=x.device)
                )
                indices = self.links.broadcast(kept.contiguous(), span.stage)
            if span.norm:
                break
        return x

    def mtp_hidden(self, next_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """See `GLM5ForCausalLM.mtp_hidden`."""
        model = self.pipeline.model
        stage = next(span.stage for span in self.pipeline.spans if span.mtp)
        out = torch.empty_like(hidden)
        if self.links.rank_of(stage) == self.links.index and model.mtp is not None:
            out = model.mtp(ctx.flat(model.model.embed_tokens(next_ids)), ctx, hidden)
        return self.links.broadcast(out.contiguous(), stage)
