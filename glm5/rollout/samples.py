"""The turns of a session as training rows. A pure function of what is stored: the order of arrival does not matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from glm5.records import TrainSample
from glm5.rollout.history import Node, in_order

NOT_SAMPLED = -1
"""Weight version of tokens that no policy produced."""


def rows_of(nodes: Sequence[Node]) -> list[TrainSample]:
    """One row per last turn. A turn that several rows share counts in the loss of the first of them only."""
    rows, taken = [], set()
    for path in in_order(nodes):
        row = TrainSample([], [], [], [], [])
        for node in path:
            fresh, size = id(node) not in taken, len(node.output)
            taken.add(id(node))
            row.ids += [*node.given, *node.output]
            row.loss_mask += [False] * len(node.given) + [fresh] * size
            row.rollout_logprobs += [0.0] * len(node.given) + (node.logprobs.tolist() if fresh else [0.0] * size)
            row.weight_versions += [NOT_SAMPLED] * len(node.given)
            row.weight_versions += node.versions.tolist() if fresh else [NOT_SAMPLED] * size
        row.advantages = [0.0] * len(row.ids)
        rows.append(row)
    return rows


def summary(nodes: Sequence[Node]) -> dict[str, Any]:
    """`samples`, `forks` by cause, and the number of sampled tokens that are in no row (`tokens_lost`, always 0)."""
    rows = rows_of(nodes)
    sampled, trained = sum(len(node.output) for node in nodes), sum(sum(row.loss_mask) for row in rows)
    return {
        "samples": [
            {
                "ids": row.ids,
                "loss_mask": row.loss_mask,
                "rollout_logprobs": row.rollout_logprobs,
                "weight_versions": row.weight_versions,
            }
            for row in rows
        ],
        "turns": len(nodes),
        "forks": dict(sorted(Counter(node.cause for node in nodes if node.cause).items())),
        "tokens_sampled": sampled,
        "tokens_lost": sampled - trained,
    }
