"""The turns of a session as training rows. They depend only on the stored turns, not on their order of arrival."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from glm5.records import Outcome, TrainSample, Trajectory, Turn
from glm5.rollout.history import Node, in_order
from glm5.rollout.store_reader import ResultRow
from glm5.tasks.episode import NOT_SAMPLED


def rows_of(nodes: Sequence[Node]) -> list[TrainSample]:
    """One row per leaf: the tokens on its path. A turn that several rows share is in the loss of only the first."""
    rows, taken = [], set[Node]()
    for path in in_order(nodes):
        row = TrainSample([], [], [], [], [])
        for node in path:
            fresh, size = node not in taken, len(node.output)
            taken.add(node)
            row.ids += [*node.given, *node.output]
            row.loss_mask += [False] * len(node.given) + [fresh] * size
            row.rollout_logprobs += [0.0] * len(node.given) + (node.logprobs.tolist() if fresh else [0.0] * size)
            row.weight_versions += [NOT_SAMPLED] * len(node.given)
            row.weight_versions += node.versions.tolist() if fresh else [NOT_SAMPLED] * size
        row.advantages = [0.0] * len(row.ids)
        rows.append(row)
    return rows


def trajectory_of(result: ResultRow, nodes: Sequence[Node], finish: Mapping[Node, str]) -> Trajectory:
    """A rollout as a trajectory; `finish` has the finish reasons of its turns. A turn that begins a fork comes after
    the turns of the branches before it, so `to_samples` makes the same rows as `rows_of`."""
    turns, taken = [], set[Node]()
    for path in in_order(nodes):
        ids: list[int] = []
        for node in path:
            ids += node.given
            if node not in taken:
                taken.add(node)
                turns.append(
                    Turn(tuple(ids), tuple(node.output), tuple(node.logprobs), tuple(node.versions), finish[node])
                )
            ids += node.output
    detail = {"session": result.session}  # first, so that it is kept however long the rest is
    detail |= {name: value for name, value in result.detail.items() if name != "session"}
    outcome = Outcome(result.outcome)
    return Trajectory(result.problem, result.domain, result.group, turns, result.reward, outcome, detail)


def summary(nodes: Sequence[Node]) -> dict[str, Any]:
    """`samples` (the rows), `turns`, `forks` by cause, `tokens_sampled`, and `tokens_lost`: the number of sampled
    tokens that are in no row's loss (always 0)."""
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
        "forks": forks(nodes),
        "tokens_sampled": sampled,
        "tokens_lost": sampled - trained,
    }


def forks(nodes: Sequence[Node]) -> dict[str, int]:
    """Number of forks by cause."""
    return dict(sorted(Counter(node.cause for node in nodes if node.cause).items()))
