"""How even plans of context parallelism are, and what they send; prints JSON. Nothing is trained or timed.

For rows of packed documents: `work`, the work of the busiest rank over the mean; `tokens`, the same for tokens;
`received`, tokens whose latents a rank receives per layer, on average; each a mean over random rows. "one": a document
fills the row. "mixed": one of 40,000 to 90,000 tokens among short ones. "lognormal": documents of every length.

    python benchmarks/context_plan.py [--preset glm5] [--sparse] [--ranks 8] [--length 131072] [--rows 10]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import numpy as np

from glm5.config.model import GLM5Config
from glm5.parallel.context_plan import Workload, begins_of, by_workload, keys_of, workload, zigzag


def filled(length: int, draw: Callable[[], float], *first: int) -> list[int]:
    """Lengths of documents that fill a row."""
    lengths = list(first)
    while sum(lengths) < length:
        lengths.append(min(int(draw()), length - sum(lengths)))
    return lengths


def measure(lengths: list[int], ranks: int, work: Workload) -> dict[str, list[float]]:
    """Numbers of both plans of one row: work, tokens, received."""
    documents = np.repeat(np.arange(len(lengths)), lengths)[None]
    begins = begins_of(documents)
    costs = work.at(np.arange(documents.size) - begins)
    found = {}
    for name, plan in (("zigzag", zigzag(documents, ranks)), ("workload", by_workload(documents, ranks, work))):
        loads, tokens = [costs[own].sum() for own in plan], list(map(len, plan))
        received = np.mean([len(keys_of(own, begins)) - len(own) for own in plan])
        found[name] = [max(loads) / np.mean(loads), max(tokens) / np.mean(tokens), received]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="glm5")
    parser.add_argument("--sparse", action="store_true", help="sparse attention (DSA)")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--rows", type=int, default=10)
    options = parser.parse_args()
    work = workload(GLM5Config.preset(options.preset, use_dsa=options.sparse))
    generator, length = np.random.default_rng(0), options.length
    scale = length / 131_072
    kinds: dict[str, Callable[[], list[int]]] = {
        "one": lambda: [length],
        "mixed": lambda: generator.permutation(
            filled(length, lambda: generator.integers(500, 4000), int(scale * generator.integers(40_000, 90_000)))
        ).tolist(),
        "lognormal": lambda: filled(length, lambda: max(64, generator.lognormal(8.5, 1.5))),
    }
    report = {}
    for kind, draw in kinds.items():
        rows = [measure(draw(), options.ranks, work) for _ in range(options.rows)]
        means = {plan: np.mean([row[plan] for row in rows], axis=0).round(3).tolist() for plan in rows[0]}
        report[kind] = {plan: dict(zip(("work", "tokens", "received"), numbers)) for plan, numbers in means.items()}
    print(json.dumps({**vars(options), **report}, indent=1))


if __name__ == "__main__":
    main()
