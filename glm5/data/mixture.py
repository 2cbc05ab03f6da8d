"""Mixtures of loaders by weight, and the factory that makes a stage's loader from its options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from glm5.chat.tokenizer import Tokenizer
from glm5.config.data import DataOptions
from glm5.data.fim import ADDED, FimDocuments, fim_tokens
from glm5.data.loader import BestFitLoader, Documents, Row, RowLoader, StreamLoader
from glm5.data.long_context import InterleaveLoader, NegativesLoader, RecallKind, RecallLoader
from glm5.data.shards import Shard
from glm5.errors import ConfigError, nearest
from glm5.seeds import derive_seed

RESOLUTION = 10_000
"""Weights are rounded to one part in this many."""


def check_names(weights: Mapping[str, object], sources: Mapping[str, object]) -> None:
    """Raise ConfigError unless every weight belongs to a source and every source has a weight."""
    for name in weights:
        if name not in sources:
            raise ConfigError(f'Unknown source "{name}"{nearest(name, sources)}; choose one of {", ".join(sources)}.')
    if missing := [name for name in sources if name not in weights]:
        raise ConfigError(f'The source "{missing[0]}" has no weight; give it 0 to leave it out.')


def whole_parts(weights: Mapping[str, float | Fraction]) -> dict[str, int]:
    """Integer weights without a common factor: exact if their sum stays within RESOLUTION, otherwise the nearest that
    sum to it. A positive weight has at least one part; sources of weight 0 are left out.

    Raises ConfigError for a weight that is negative or not finite, and for weights without a positive one.
    """
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f'The weight of "{name}" is {weight}; weights are finite and not negative.')
    exact = {name: Fraction(str(weight)) for name, weight in weights.items() if weight > 0}
    if not exact:
        raise ConfigError(f"No source has a positive weight (given: {', '.join(weights) or 'none'}).")
    scale = math.lcm(*(weight.denominator for weight in exact.values()))
    parts = {name: int(weight * scale) for name, weight in exact.items()}
    shared = math.gcd(*parts.values())
    parts = {name: part // shared for name, part in parts.items()}
    total = sum(parts.values())
    if total <= RESOLUTION:
        return parts
    rounded = {name: max(1, round(RESOLUTION * part / total)) for name, part in parts.items()}
    largest = max(rounded, key=lambda name: rounded[name])
    rounded[largest] += RESOLUTION - sum(rounded.values())
    shared = math.gcd(*rounded.values())
    return {name: part // shared for name, part in rounded.items()}


def even_schedule(parts: list[int]) -> np.ndarray:
    """One period of the order in which sources take turns, [sum(parts)]: source k comes parts[k] times, and among the
    first n entries its count differs from n parts[k] / sum(parts) by less than one.

    With K sources, only those with a deficit of at least 1 / (2K - 2) may come next. The one with the earliest deadline
    is taken (Tijdeman, The chairman assignment problem, 1980; bound 1 - 1 / (2K - 2)). Taking the largest deficit would
    exceed one with many sources.
    """
    weights, total = np.asarray(parts, dtype=np.int64), sum(parts)
    twice = 2 * len(parts) - 2
    schedule = np.zeros(total, dtype=np.int64)
    if not twice:
        return schedule
    seen = np.zeros(len(parts), dtype=np.int64)
    for at in range(total):
        behind = (at + 1) * weights - total * seen
        deadline = np.where(behind * twice >= total, ((twice - 1) * total - twice * behind) / weights, np.inf)
        schedule[at] = np.argmin(deadline)
        seen[schedule[at]] += 1
    return schedule


class Mixture(RowLoader):
    """Rows of several loaders by weight: among the first n rows each has its share, to within less than one row.

    The order of sources repeats after `sum(parts)` rows, so any step is found at once. It does not depend on the seed;
    the content of a source does. `weights` are the rounded shares (see `whole_parts`). `rows_per_epoch` is the number
    of rows after which every source that has epochs has completed its first.
    """

    def __init__(self, sources: Mapping[str, RowLoader], weights: Mapping[str, float | Fraction], *, rows: int) -> None:
        check_names(weights, sources)
        parts = whole_parts({name: weights[name] for name in sources})
        self.sources = {name: sources[name] for name in parts}
        lengths = {source.row_length for source in self.sources.values()}
        if len(lengths) > 1:
            raise ConfigError(f"The sources of a mixture have rows of {sorted(lengths)} tokens; give them one length.")
        super().__init__(rows, lengths.pop())
        self._parts, self._period = list(parts.values()), sum(parts.values())
        self.weights = {name: part / self._period for name, part in parts.items()}
        self.sparse_targets = all(source.sparse_targets for source in self.sources.values())
        self._loaders = list(self.sources.values())
        self._schedule = even_schedule(self._parts)
        hits = self._schedule[None] == np.arange(len(parts))[:, None]
        self._before = np.concatenate((np.zeros((len(parts), 1), np.int64), hits.cumsum(1)), axis=1)
        self.rows_per_epoch = max(
            -(-loader.rows_per_epoch * self._period // part) if loader.rows_per_epoch else 0
            for loader, part in zip(self._loaders, self._parts, strict=True)
        )

    def fill(self, index: int, row: Row) -> None:
        """Fill row `index` from its source."""
        period, at = divmod(index, self._period)
        k = int(self._schedule[at])
        self._loaders[k].fill(period * self._parts[k] + int(self._before[k, at]), row)

    def counts(self, rows: int) -> dict[str, int]:
        """How many of the first `rows` rows come from each source."""
        period, at = divmod(rows, self._period)
        return {name: period * self._parts[k] + int(self._before[k, at]) for k, name in enumerate(self.sources)}

    def epochs(self, step: int) -> dict[str, float]:
        """Epochs (fractional) of each source before this step; sources that never repeat are left out."""
        counts = self.counts(step * self.rows)
        return {n: counts[n] / s.rows_per_epoch for n, s in self.sources.items() if s.rows_per_epoch}


def make_loader(
    options: DataOptions,
    shards: Mapping[str, Shard],
    tokenizer: Tokenizer,
    *,
    rows: int,
    row_length: int,
    seed: int,
    name: str,
) -> Mixture:
    """The loader of the stage `name`, with batches of `rows` rows. `shards` are the training splits by name.

    Raises:
        ConfigError: weights or fim_shards name no shard, a shard has no weight or the name of other rows, or the
            tokenizer has no FIM tokens.
        DataError: a shard is too small for the options.
    """
    weights: Mapping[str, float] = options.weights or {source: len(shard.tokens) for source, shard in shards.items()}
    check_names(weights, shards)
    check_names(dict.fromkeys((*shards, *options.fim_shards)), shards)
    parts = whole_parts(weights)
    recalls: dict[str, tuple[RecallKind, float]] = {
        "recall": ("turns", options.recall_share),
        "needles": ("needle", options.needle_share),
    }
    shares = {
        "interleaved": Fraction(str(options.interleave_share)),
        "negatives": Fraction(str(options.negatives_share)),
    }
    sources: dict[str, RowLoader] = {}
    mixed: dict[str, Fraction] = {}
    size = {"rows": rows, "row_length": row_length}
    for key, (recall, wanted) in recalls.items():
        if wanted:
            sources[key] = RecallLoader(recall, tokenizer, **size, seed=derive_seed(seed, key, name))
            mixed[key] = Fraction(str(wanted))
    shares["text"] = Fraction(1) - sum(shares.values()) - sum(mixed.values())
    for source, part in parts.items():
        own_seed = derive_seed(seed, "corpus", name)
        if len(shards) > 1:
            own_seed = derive_seed(own_seed, source)
        for kind, share in shares.items():
            if share > 0:
                key = source if kind == "text" else f"{source} {kind}"
                if key in sources:
                    raise ConfigError(f'Two sources of rows are called "{key}"; give "{source}" another name.')
                sources[key] = _shard_loader(kind, options, source, shards[source], tokenizer, **size, seed=own_seed)
                mixed[key] = share * Fraction(part, sum(parts.values()))
    return Mixture(sources, mixed, rows=rows)


def _shard_loader(
    kind: str,
    options: DataOptions,
    source: str,
    shard: Shard,
    tokenizer: Tokenizer,
    *,
    rows: int,
    row_length: int,
    seed: int,
) -> RowLoader:
    if kind == "interleaved":
        return InterleaveLoader(shard, rows=rows, row_length=row_length, seed=seed)
    if kind == "negatives":
        return NegativesLoader(shard, rows=rows, row_length=row_length, seed=seed)
    whole = options.packing == "best_fit"
    documents = Documents(shard)
    if options.fim_rate and (not options.fim_shards or source in options.fim_shards):
        documents = FimDocuments(
            shard,
            fim_tokens(tokenizer),
            rate=options.fim_rate,
            spm_share=options.spm_share,
            seed=seed,
            longest=row_length - ADDED if whole else None,
        )
    packing = BestFitLoader if whole else StreamLoader
    return packing(documents, rows=rows, row_length=row_length, seed=seed)
