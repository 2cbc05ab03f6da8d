"""Which tokens of a micro-batch each rank of a context-parallel group computes: pure functions of document lengths.

Tokens are numbered by their cell in the micro-batch, row-major; padding is computed nowhere. Causal attention costs a
late token more than an early one, so a sequence that is cut over n ranks is cut into 2n chunks, and rank i takes chunks
i and 2n - 1 - i ("zig-zag").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm5.config.arithmetic import size_report
from glm5.config.model import GLM5Config

Cells = np.ndarray
"""Ascending cells of tokens, int64."""

TOLERANCE = 0.1
"""Most work of a rank above the mean that `by_workload` accepts, if there is a plan with less."""
MOST_TOKENS = 1.5
"""Most tokens of a rank, in multiples of the mean: memory grows with tokens, not with attention's work."""
LIMITS = (1.0, 0.5, 0.25, 0.125)
"""Work of one document on one rank, in multiples of the mean work of a rank, above which the document is cut."""


@dataclass(frozen=True)
class Workload:
    """FLOPs of a token's forward pass: `token`, and for each (cap, cost) of `keys` cost * min(number of keys, cap)."""

    token: float
    keys: tuple[tuple[int | None, float], ...]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """FLOPs of tokens at these positions of their documents, from 0."""
        seen, found = positions + 1, np.full(positions.shape, self.token)
        for cap, cost in self.keys:
            found += cost * (seen if cap is None else np.minimum(seen, cap))
        return found


def workload(config: GLM5Config) -> Workload:
    """The work of a model's tokens: DSA attends to index_topk keys and scores all, a window limits the keys."""
    c, keys = config, Counter[int | None]()
    if c.attention_type == "gqa":
        width = 2 * c.head_dim
    else:
        width = 2 * c.kv_lora_rank + c.qk_rope_head_dim if c.selects_keys else c.qk_head_dim + c.v_head_dim
    for layer in range(c.num_hidden_layers):
        cap = c.index_topk if c.selects_keys else c.window(layer)
        keys[cap] += 2 * c.num_attention_heads * width
        if c.selects_keys and c.computes_topk(layer):
            keys[None] += 2 * c.index_n_heads * c.index_head_dim
    return Workload(2.0 * size_report(c, 1)["active_params"], tuple(keys.items()))


@dataclass(frozen=True)
class Document:
    """A document's tokens: the cells first .. first + length - 1."""

    first: int
    length: int


def documents_of(documents: np.ndarray) -> list[Document]:
    """The documents of packed rows: [B, T] with the numbers of `Batch.documents`."""
    flat = documents.reshape(-1)
    begins = np.ones(len(flat), bool)
    begins[1:] = flat[1:] != flat[:-1]
    begins[:: documents.shape[1]] = True
    firsts = np.flatnonzero(begins)
    lengths = np.diff(firsts, append=len(flat))
    return [Document(int(f), int(n)) for f, n in zip(firsts, lengths) if flat[f] >= 0]


def zigzag(documents: np.ndarray, ranks: int) -> list[Cells]:
    """The cells of every rank if each row is cut over all ranks, wherever its documents begin."""
    length = documents.shape[1]
    found: list[list[Cells]] = [[] for _ in range(ranks)]
    for number, row in enumerate(documents):
        for rank, part in enumerate(_zigzag(np.flatnonzero(row >= 0) + number * length, ranks)):
            found[rank] += part
    return [_joined(parts) for parts in found]


def by_workload(documents: np.ndarray, ranks: int, work: Workload) -> list[Cells]:
    """The cells of every rank so that work is even and few tokens travel (ByteScale, FlexSP): a short document is whole
    on one rank, a longer one is cut over a group of neighbouring ranks, 2, 4, … up to all of them.

    Of the plans in which no rank has more than 1 + `TOLERANCE` times the mean work and `MOST_TOKENS` times the mean
    tokens, the one whose ranks receive the fewest keys. If there is none, every document is cut over all ranks, which
    balances both up to the size of chunks.
    """
    found, begins = documents_of(documents), begins_of(documents)
    costs = work.at(np.arange(documents.size) - begins)
    sizes = [float(costs[d.first : d.first + d.length].sum()) for d in found]
    work_mean, tokens_mean = sum(sizes) / ranks, sum(d.length for d in found) / ranks
    plans = [zigzag(documents, ranks), *(_placed(found, sizes, ranks, limit * work_mean) for limit in LIMITS)]

    def even(plan: list[Cells]) -> bool:
        loads, tokens = max(costs[own].sum() for own in plan), max(map(len, plan))
        return bool(loads <= (1 + TOLERANCE) * work_mean) and tokens <= MOST_TOKENS * tokens_mean

    plans = [plan for plan in plans if even(plan)]
    if not plans:
        return _placed(found, sizes, ranks, 0.0)
    return min(plans, key=lambda plan: sum(len(keys_of(own, begins)) for own in plan))


def _placed(found: Sequence[Document], costs: Sequence[float], ranks: int, limit: float) -> list[Cells]:
    """Documents that cost more than `limit` are cut over the smallest group in which a rank's part does not. The
    largest groups and documents come first; each goes to the group with the least work so far."""
    sizes = group_sizes(ranks)
    groups = [next((size for size in sizes if cost <= limit * size), ranks) for cost in costs]
    order = sorted(range(len(found)), key=lambda i: (-groups[i], -costs[i], found[i].first))
    loads, plan = [0.0] * ranks, [list[Cells]() for _ in range(ranks)]
    for i in order:
        size = groups[i]
        begin = min(range(0, ranks, size), key=lambda rank: loads[rank])  # the ranks of a group have equal work
        for rank, parts in enumerate(_zigzag(found[i].first + np.arange(found[i].length), size), start=begin):
            plan[rank] += parts
            loads[rank] += costs[i] / size
    return [_joined(parts) for parts in plan]


def group_sizes(ranks: int) -> list[int]:
    """Sizes of the groups that a document may be cut over, ascending: each divides the next, the last is `ranks`."""
    sizes = [ranks]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // next(p for p in range(2, sizes[-1] + 1) if sizes[-1] % p == 0))
    return sizes[::-1]


def _zigzag(cells: Cells, ranks: int) -> list[list[Cells]]:
    chunks = np.array_split(cells, 2 * ranks)
    return [[chunks[rank], chunks[2 * ranks - 1 - rank]] for rank in range(ranks)]


def _joined(parts: Sequence[Cells]) -> Cells:
    return np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def begins_of(documents: np.ndarray) -> np.ndarray:
    """The first cell of the document of every cell [B * T]; of padding, the cell itself."""
    begins = np.arange(documents.size)
    for d in documents_of(documents):
        begins[d.first : d.first + d.length] = d.first
    return begins


def keys_of(cells: Cells, begins: np.ndarray) -> Cells:
    """The cells whose keys the queries `cells` may see: of every document, from its begin to the last query."""
    own = begins[cells]
    last = np.flatnonzero(np.append(own[1:] != own[:-1], True)) if len(own) else np.empty(0, np.int64)
    parts = [np.arange(own[i], cells[i] + 1) for i in last]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
