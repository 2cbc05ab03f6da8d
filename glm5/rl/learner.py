"""The learner: takes optimizer steps on train samples and compares its log-probabilities with the engine's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from glm5.config.optim import OptimConfig
from glm5.data.packing import Batch, pack_batch
from glm5.device import on_host, put, widened
from glm5.errors import DataError
from glm5.model.context import packed_context
from glm5.model.dsa import INDEXER
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.optim.schedules import begin_step
from glm5.parallel.ranks import Ranks
from glm5.records import TrainSample
from glm5.rl.losses import Counts, Statistics, Tokens
from glm5.train.loop import build_optimizer, clip_gradients
from glm5.train.losses import target_logprobs

ROWS_PER_STEP = 16
"""Packed rows per forward pass. This number bounds memory and does not change gradients."""


@dataclass(frozen=True, kw_only=True)
class PolicyBatch(Tokens):
    """Sampled tokens of N train samples, [N, L] padded on the right. `versions` are the weight versions that sampled
    them; `teacher_logprobs` is None outside distillation."""

    versions: Tensor
    teacher_logprobs: Tensor | None = None
    samples: Sequence[TrainSample] = ()


PolicyLoss = Callable[[PolicyBatch], tuple[Tensor, Statistics]]
"""Loss and statistics of a micro-batch, scaled to its share of the optimizer step (see `policy_loss`)."""


@dataclass
class Agreement:
    """Differences of log-probabilities between learner and engine, over tokens sampled with the learner's weights."""

    tokens: int = 0
    mismatches: int = 0
    max_abs_diff: float = 0.0

    def merge(self, other: Agreement) -> None:
        """Add other tokens."""
        self.tokens += other.tokens
        self.mismatches += other.mismatches
        self.max_abs_diff = max(self.max_abs_diff, other.max_abs_diff)


def compare(learner: Tensor, engine: Tensor, fresh: Tensor) -> Tensor:
    """Number of `fresh` tokens, of those that differ, and their largest difference: [3] on their device, for
    tensors [N, L]."""
    difference = widened(torch.where(fresh, learner - engine, 0.0)).abs()
    differ = (learner != engine) & fresh
    most = difference.amax() if difference.numel() else difference.sum()
    return torch.stack((widened(fresh.sum()), widened(differ.sum()), most))


class Learner:
    """Owns the trained model and its optimizer. The indexers are frozen, as in all of the paper's RL (§3.2).

    With a `reference` model, batches also have its log-probabilities, for a KL penalty. With `exact`, log-probabilities
    equal those of an exact engine bit for bit; without it, torch may use faster kernels. One update takes `minibatches`
    optimizer steps.

    With several `ranks`, policy and reference are sharded in place. All ranks make the same calls with the same
    samples; each computes its share of them. Numbers and `agreement` are those of all ranks.
    """

    def __init__(
        self,
        model: GLM5ForCausalLM,
        config: OptimConfig,
        *,
        row_length: int,
        temperature: float,
        reference: GLM5ForCausalLM | None = None,
        exact: bool = True,
        minibatches: int = 1,
        spread_groups: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.config, self.exact = config, exact
        self.model = model
        self.reference = reference
        if self.ranks.world > 1:
            self.model = self.ranks.shard(model, model.dtype, _trained)
            if reference is not None:
                self.reference = self.ranks.shard(reference, reference.dtype, _trained)
        self.row_length, self.temperature, self.minibatches = row_length, temperature, minibatches
        self.split = spread_groups_over if spread_groups else split_groups
        self.version = 0
        self.agreement = Agreement()
        self.optimizer = build_optimizer(self.model, config, _trained)

    def reset_optimizer(self) -> None:
        """Clear the optimizer's state (after a weight push in agentic RL, §4.1)."""
        self.optimizer.state.clear()

    def step(self, samples: Sequence[TrainSample], loss_of: PolicyLoss, rate: float) -> dict[str, float]:
        """One update on all samples: an optimizer step per minibatch. Minibatches contain whole groups, in order,
        or with `spread_groups` a part of each.

        With several minibatches, the log-probabilities of all samples are computed once before the first step; they are
        the old policy of every step. Within a step, losses, gradients and statistics of micro-batches add up to those
        of the minibatch. Returns the statistics over all steps, `loss` and `grad_norm` as means over the steps, and
        `lr`. Raises DataError for a gradient that is not finite, and for ranks with other samples than rank 0.
        """
        self._check_equal(samples)
        rank, world = self.ranks.rank, self.ranks.world
        batches = [divide(batch, world) for batch in self.split(samples, self.minibatches)]
        old = None
        if len(batches) > 1:
            old = self._old_logprobs([[s for batch in batches for s in batch[r]] for r in range(world)])
        total, agreement, norms, at = Statistics(), Agreement(), [], 0
        for batch in batches:
            own = None if old is None else old[at : at + len(batch[rank])]
            begin_step(self.optimizer, rate)
            norms.append(self._optimizer_step(batch, loss_of, own, total, agreement))
            at += len(batch[rank])
        self.version += 1
        found = self.ranks.gather((total.plain(), agreement))
        for _, part in found:
            self.agreement.merge(part)
        numbers = Statistics().merge([part for part, _ in found]).numbers()
        if "loss" in numbers:  # `merge` added up the means of the steps
            numbers["loss"] /= len(batches)
        return numbers | {"grad_norm": sum(norms) / len(norms), "lr": rate}

    def _optimizer_step(
        self,
        shares: Sequence[Sequence[TrainSample]],
        loss_of: PolicyLoss,
        old: Sequence[Tensor] | None,
        total: Statistics,
        agreement: Agreement,
    ) -> float:
        """Take one step on the samples of all ranks, of which `old` has this rank's; return its gradient norm. Adds
        what this rank computed to `total` and `agreement`."""
        whole = Counts.of(sample.loss_mask for share in shares for sample in share)
        at = 0
        differences: list[Tensor] = []
        parts = self._parts(shares)
        for number, (part, counted) in enumerate(parts, start=1):
            known = None if old is None or not counted else old[at : at + len(part)]
            batch = self.forward(part, whole, known, counted)
            at += len(part)
            loss, statistics = self.ranks.together(partial(loss_of, batch))
            self.ranks.reduce_gradients(self.model, last=number == len(parts))
            loss.backward()
            total.merge([statistics])
            assert batch.fresh is not None
            differences.append(compare(batch.old, batch.rollout_logprobs, batch.fresh))
        # The host waits for the device here, once in an optimizer step.
        norms, found, total.values = on_host((clip_gradients(self.model, self.config.clip), differences, total.values))
        for tokens, mismatches, difference in (one.tolist() for one in found):
            agreement.merge(Agreement(int(tokens), int(mismatches), difference))
        norm = float(norms)
        if not math.isfinite(norm):
            raise DataError(f"The policy gradient of update {self.version + 1} is not finite; lower optim.lr.")
        self.optimizer.step()
        return norm

    @torch.no_grad()
    def _old_logprobs(self, shares: Sequence[Sequence[TrainSample]]) -> list[Tensor]:
        """Log-probabilities of the sampled tokens of this rank's samples under the current weights."""
        found: list[Tensor] = []
        for part, counted in self._parts(shares):
            batch = self.forward(part)
            if counted:
                found += [line[: sum(s.loss_mask)] for line, s in zip(batch.logprobs, part, strict=True)]
        return found

    def _parts(self, shares: Sequence[Sequence[TrainSample]]) -> list[tuple[list[TrainSample], bool]]:
        """The micro-batches of this rank, and whether they count. A sharded model computes on all ranks or on none, so
        a rank with fewer than others repeats the shortest sample, which then does not count."""
        parts = [self._split(share) for share in shares]
        own = [(part, True) for part in parts[self.ranks.rank]]
        missing = max(map(len, parts)) - len(own)
        if missing:
            everything = (sample for share in shares for sample in share)
            shortest = min(everything, key=lambda sample: (not any(sample.loss_mask), len(sample.ids)))
            own += [([shortest], False)] * missing
        return own

    def _split(self, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        budget = ROWS_PER_STEP * self.row_length
        parts: list[list[TrainSample]] = []
        used = 0
        for sample in samples:
            if not parts or used + len(sample.ids) > budget:
                parts.append([])
                used = 0
            parts[-1].append(sample)
            used += len(sample.ids)
        return parts

    def _check_equal(self, samples: Sequence[TrainSample]) -> None:
        """Raises DataError on all ranks if one has samples of other sizes: the ranks would wait for each other."""
        if self.ranks.world == 1:
            return
        sizes = self.ranks.gather([(len(sample.ids), sum(sample.loss_mask)) for sample in samples])
        for rank, found in enumerate(sizes):
            if found != sizes[0]:
                raise DataError(
                    f"Rank {rank} has other train samples than rank 0; the algorithm's `samples` must return the same "
                    "on every rank."
                )

    def forward(
        self,
        samples: Sequence[TrainSample],
        whole: Counts | None = None,
        old: Sequence[Tensor] | None = None,
        counted: bool = True,
    ) -> PolicyBatch:
        """Log-probabilities of all sampled tokens, computed on packed rows, returned as one row per sample. `whole` has
        the numbers of sequences and sampled tokens in the optimizer step; None: these samples are the complete step.
        `old` has the log-probabilities before the update; None: the update has taken no step yet. If the samples are
        not `counted`, the mask is empty. With several ranks all must call."""
        row_length = max(self.row_length, max(len(s.ids) for s in samples))
        batch, places = pack_batch([(s.ids, s.loss_mask) for s in samples], row_length)
        device = self.model.device
        logprobs, entropy = self._logprobs(self.model, batch)
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference = self._logprobs(self.reference, batch)[0]
        order = sorted(range(len(samples)), key=lambda i: (places[i].row, places[i].start))
        counts = [sum(s.loss_mask) for s in samples]
        width = max(counts)
        position = torch.zeros(len(samples), width, dtype=torch.long)
        mask = torch.zeros(len(samples), width, dtype=torch.bool)
        at = 0
        for i in order:
            position[i, : counts[i]] = torch.arange(at, at + counts[i])
            mask[i, : counts[i]] = counted
            at += counts[i]
        own = Counts.of_mask(mask)
        position, mask = put(position, device), put(mask, device)

        def lines(values: Callable[[TrainSample], Sequence[float]]) -> Tensor:
            out = torch.zeros(len(samples), width)
            for i, sample in enumerate(samples):
                picked = [v for v, m in zip(values(sample), sample.loss_mask, strict=True) if m]
                out[i, : counts[i]] = torch.tensor(picked)
            return put(out, device)

        versions = lines(lambda s: [float(v) for v in s.weight_versions]).long()
        return PolicyBatch(
            logprobs=torch.where(mask, logprobs[position], 0.0),
            rollout_logprobs=lines(lambda s: s.rollout_logprobs),
            advantages=lines(lambda s: s.advantages),
            mask=mask,
            old_logprobs=None if old is None else pad_sequence(list(old), batch_first=True),
            ref_logprobs=None if reference is None else reference[position],
            entropy=entropy[position],
            fresh=mask & (versions == self.version),
            own=own,
            whole=whole,
            versions=versions,
            teacher_logprobs=lines(lambda s: s.teacher_logprobs) if samples[0].teacher_logprobs else None,
            samples=samples,
        )

    def _logprobs(self, model: GLM5ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
        """`packed_logprobs` of a model that may be sharded."""

        def compute(model: GLM5ForCausalLM) -> tuple[Tensor, Tensor]:
            logprobs, entropy = packed_logprobs(model, batch, self.temperature, self.exact)
            return logprobs.clone(), entropy  # FSDP hooks the gradient of the output; with a view that is unreliable

        return self.ranks.run(compute, model)


def _trained(name: str) -> bool:
    """Whether a parameter is trained: all but the indexers, which are frozen, and MTP, which no RL loss uses."""
    return INDEXER not in name and "mtp." not in name


def split_groups(samples: Sequence[TrainSample], count: int) -> list[list[TrainSample]]:
    """Split into `count` minibatches of whole groups, in order, with about equal numbers of groups. Fewer groups give
    fewer minibatches."""
    groups: list[list[TrainSample]] = []
    for sample in samples:
        if not groups or groups[-1][-1].group != sample.group:
            groups.append([])
        groups[-1].append(sample)
    count = min(count, len(groups))
    edges = [len(groups) * i // count for i in range(count + 1)]
    return [[row for group in groups[a:b] for row in group] for a, b in pairwise(edges)]


def spread_groups_over(samples: Sequence[TrainSample], count: int) -> list[list[TrainSample]]:
    """Split into `count` minibatches that each have a part of every group: its samples are dealt out in turn, and the
    next group goes on where the last one ended. Fewer samples give fewer minibatches."""
    dealt: list[list[TrainSample]] = [[] for _ in range(min(count, len(samples)))]
    for i, sample in enumerate(samples):
        dealt[i % len(dealt)].append(sample)
    return dealt


def divide(samples: Sequence[TrainSample], ranks: int) -> list[list[TrainSample]]:
    """Split over ranks with about equal numbers of tokens. A share keeps the order of the samples, and may be empty."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for i in sorted(range(len(samples)), key=lambda i: (-len(samples[i].ids), i)):
        least = tokens.index(min(tokens))
        shares[least].append(i)
        tokens[least] += len(samples[i].ids)
    return [[samples[i] for i in sorted(share)] for share in shares]


def packed_logprobs(
    model: GLM5ForCausalLM, batch: Batch, temperature: float = 1.0, exact: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of all loss tokens of a packed batch, which is best on the CPU, in row-major
    order."""
    targets, wanted = batch.targets()
    batch = batch.to(model.device)
    hidden = model.model(batch.ids, packed_context(batch.documents, exact=exact))
    return target_logprobs(model, hidden, targets, wanted, temperature)
