"""Pipeline schedules as data: what every rank does, in which order. Pure functions, tested without processes.

Interleaved 1F1B (one forward, one backward): micro-batches run in rounds of `pp`; a rank passes a round through
its first stage, then through its next one, and so on. With one stage per rank it is 1F1B. Idle share of a step with m
micro-batches and v stages per rank, if all stages cost the same: (pp - 1) / (m v + pp - 1).

With deferred weight gradients, the backward of a micro-batch in a stage is two actions: "I" passes the gradient on to
the stage before, "W" computes the weight gradients that "I" has left. W fills time in which a rank would wait.

"R" sums the gradients of a stage over its ranks. It follows each run of micro-batches of one stage, so the gradients of
at most two stages are whole at any time (see `glm5.parallel.zero`).

torch.distributed.pipelining has such schedules too. It does not fit here: losses are on the last stage only (ours also
are on the stages of the routers and indexers), tensors that stages exchange need gradients (indices of keys have none),
their number cannot follow the batch (MTP depths), and a stage's gradients are summed once, at the end of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple


class Action(NamedTuple):
    """`kind` of `micro`-batch in `stage`: "F" forward; "B" backward, or its parts "I" and "W"; "R" sum gradients over
    ranks (of all micro-batches since the last R; `micro` is -1)."""

    kind: str
    stage: int
    micro: int


Schedule = tuple[tuple[Action, ...], ...]
"""The actions of every rank."""


def make_schedule(pp: int, chunks: int, micros: int, deferred: int = 0) -> Schedule:
    """Interleaved 1F1B of `micros` micro-batches on `pp` ranks with `chunks` stages each; stage s is on rank s % pp. At
    most `deferred` micro-batches of a rank wait for their weight gradients."""
    return tuple(rank_schedule(pp, chunks, micros, rank, deferred) for rank in range(pp))


@lru_cache(maxsize=64)
def rank_schedule(pp: int, chunks: int, micros: int, rank: int, deferred: int = 0) -> tuple[Action, ...]:
    """The part of `make_schedule` of one rank."""
    return tuple(_with_sums(rank_actions(pp, chunks, micros, rank, deferred)))


def turns(schedule: Iterable[Iterable[Action]]) -> dict[tuple[bool, int, int], int]:
    """The place of every (backward, stage, micro-batch) in the actions of its rank."""
    return {
        (action.kind != "F", action.stage, action.micro): turn
        for actions in schedule
        for turn, action in enumerate(actions)
        if action.kind in "FBI"
    }


def rank_actions(pp: int, chunks: int, micros: int, rank: int, deferred: int = 0) -> list[Action]:
    """What one rank does, without sums of gradients."""
    plan = forward_and_backward(pp, chunks, micros, rank)
    return _deferred(plan, deferred) if deferred else plan


def repeating(pp: int, micros: int, deferred: int) -> int:
    """The fewest micro-batches, at most `micros`, whose schedule has all that happens in the one of `micros`. Rounds
    repeat the third one, or the first one in which as many wait as may."""
    return min(micros, (4 - -deferred // pp) * pp + micros % pp)


@lru_cache(maxsize=4096)
def sums_of_stages(pp: int, chunks: int, micros: int, rank: int, deferred: int = 0) -> dict[int, int]:
    """How often a step sums the gradients of each stage of a rank over the processes that share it."""
    few = repeating(pp, micros, deferred)
    if few < micros:
        one, other = (sums_of_stages(pp, chunks, few + more, rank, deferred) for more in (0, -pp))
        return {stage: count + (count - other[stage]) * ((micros - few) // pp) for stage, count in one.items()}
    actions = rank_schedule(pp, chunks, micros, rank, deferred)
    return Counter(action.stage for action in actions if action.kind == "R")


def forward_and_backward(pp: int, chunks: int, micros: int, rank: int) -> list[Action]:
    """The actions "F" and "B" of one rank in their order."""
    order = _units(pp, chunks, micros)
    forward = [Action("F", chunk * pp + rank, micro) for chunk, micro in order]
    backward = [Action("B", (chunks - 1 - chunk) * pp + rank, micro) for chunk, micro in order]
    ahead = pp - 1 - rank if chunks == 1 else (chunks - 1) * pp + 2 * (pp - 1 - rank)
    ahead = min(len(forward), ahead)
    plan = forward[:ahead]
    for one, other in zip(forward[ahead:], backward):
        plan += [one, other]
    plan += backward[len(forward) - ahead :]
    return [action for action in plan if action.micro < micros]


def _units(pp: int, chunks: int, micros: int) -> list[tuple[int, int]]:
    """(stage of the rank, micro-batch) in the order of forward passes, in whole rounds: the last one may have numbers
    of micro-batches that do not exist. A schedule from which micro-batches are left out is still one that can end."""
    starts = range(0, micros, pp)
    return [(chunk, m) for start in starts for chunk in range(chunks) for m in range(start, start + pp)]


def _deferred(plan: Sequence[Action], most: int) -> list[Action]:
    """Backward in two parts. A W runs if more than `most` would wait; after the last forward, one after every I."""
    last_forward = max(i for i, action in enumerate(plan) if action.kind == "F")
    found: list[Action] = []
    waiting: list[Action] = []
    for i, action in enumerate(plan):
        if action.kind != "B":
            found.append(action)
            continue
        found.append(action._replace(kind="I"))
        waiting.append(action._replace(kind="W"))
        if len(waiting) > most or (i > last_forward and len(waiting) > 1):
            found.append(waiting.pop(0))
    return found + waiting


def _with_sums(plan: Sequence[Action]) -> list[Action]:
    """An R after every run of gradients of one stage."""
    found: list[Action] = []
    stage: int | None = None
    for action in plan:
        if action.kind != "F":
            if stage is not None and stage != action.stage:
                found.append(Action("R", stage, -1))
            stage = action.stage
        found.append(action)
    return found if stage is None else [*found, Action("R", stage, -1)]


def simulate(schedule: Schedule, cost: Callable[[Action], float]) -> list[list[tuple[float, float]]]:
    """(begin, end) of every action of every rank, if actions cost what `cost` says and transfers nothing. Raises
    ValueError for a schedule that cannot end."""
    stages = 1 + max(action.stage for plan in schedule for action in plan)
    done: dict[Action, float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in schedule]
    moved = True
    while moved:
        moved = False
        for rank, plan in enumerate(schedule):
            while len(times[rank]) < len(plan):
                action = plan[len(times[rank])]
                needed = _needs(action, stages)
                if any(all(option not in done for option in options) for options in needed):
                    break
                ready = max((done[o] for options in needed for o in options if o in done), default=0.0)
                begin = max(ready, times[rank][-1][1] if times[rank] else 0.0)
                times[rank].append((begin, begin + cost(action)))
                done[action] = begin + cost(action)
                moved = True
    for rank, plan in enumerate(schedule):
        if len(times[rank]) < len(plan):
            raise ValueError(f"rank {rank} waits for ever at {plan[len(times[rank])]}")
    return times


def _needs(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """What has to be done before, by any rank: of each tuple, one action."""
    kind, stage, micro = action
    if kind == "F":
        return [(Action("F", stage - 1, micro),)] if stage else []
    if kind == "W":
        return [(Action("I", stage, micro),)]
    if kind == "R":
        return []
    found: list[tuple[Action, ...]] = [(Action("F", stage, micro),)]
    if stage + 1 < stages:
        found.append((Action("B", stage + 1, micro), Action("I", stage + 1, micro)))
    return found


def idle_share(times: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Share of all ranks' time until the last action in which they do nothing."""
    whole = max(plan[-1][1] for plan in times) * len(times)
    return 1.0 - sum(end - begin for plan in times for begin, end in plan) / whole
