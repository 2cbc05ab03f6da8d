"""Engines that compute every forward pass together: attention data parallelism with expert parallelism (§3.6).

Each engine has its own requests and cache; the experts of a layer are divided over all. So whoever runs a pass needs
the others in it. Before each pass they agree on its kind: those that want it run it over their tokens, the others over
one token that nobody reads. While no engine has work they sleep; the first one with work wakes them.

Every decision follows from what all engines said in the same round, so all decide the same, and no engine can go on
without the others or with other weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

IDLE, TRUNK, MTP, UPDATE, LEAVE = range(5)
"""What an engine wants: nothing, a pass of the trunk, one of the MTP layer, to take new weights, to end."""
NOTHING, SLEEP = -1, -2
"""What else engines may decide: to ask again, and to wait for a bell."""
PAUSE_SECONDS = 1e-3
BELL_SECONDS = 3600.0


def decide(wants: Sequence[int], number: int) -> int:
    """What all engines do in round `number`, given what each wants. Passes come first, their kinds in turn, so that
    none waits for ever. New weights are taken, and engines end, only all at once."""
    first, second = (TRUNK, MTP) if number % 2 else (MTP, TRUNK)
    for kind in (first, second):
        if kind in wants:
            return kind
    if len(set(wants)) == 1:
        return SLEEP if wants[0] == IDLE else wants[0]
    return NOTHING


class Lockstep:
    """One engine's part in the rounds. `empty` runs a pass of a kind without tokens of its own. Only the engine's
    thread calls the methods; `on_bell` is called in another one when the others want this engine to join.

    All methods raise what `torch.distributed` raises if an engine is lost.
    """

    def __init__(self, group: Any, bells: tuple[dist.Store, dist.Store], empty: Callable[[int], None]) -> None:
        """`group`: collectives between hosts. `bells`: two connections to one store, for this thread and another."""
        self._group, self._store, self._empty = group, bells[0], empty
        self._number = self._phase = 0  # rounds so far; times that all went to sleep
        self._awake = False
        self._heard = -1  # the last bell that the other thread has heard
        self._removed = 0  # bells that are no longer in the store
        self._acts: list[Callable[[], None]] = []
        threading.Thread(target=self._listen, args=(bells[1],), name="glm5-bell", daemon=True).start()

    @property
    def awaited(self) -> bool:
        """Whether the other engines may be waiting for this one."""
        return self._awake or self._heard >= self._phase

    def on_bell(self, act: Callable[[], None]) -> None:
        self._acts.append(act)

    def turn(self, want: int, detail: int = 0, seconds: float | None = None) -> list[int]:
        """Return once it is the turn of what this engine wants, with the `detail` of each engine. Raises TimeoutError
        if that is not so after `seconds`; the other engines then have not done it either."""
        began = time.monotonic()
        while True:
            decided, details = self._round(want, detail)
            if decided == want:
                return details
            if seconds is not None and time.monotonic() - began > seconds:
                raise TimeoutError
            self._follow(decided)

    def attend(self, want: int = IDLE) -> bool:
        """One round without a pass of this engine's own. Returns whether all engines want the same."""
        decided, _ = self._round(want, 0)
        if decided in (want, SLEEP):
            return True
        self._follow(decided)
        return False

    def _follow(self, decided: int) -> None:
        if decided in (TRUNK, MTP):
            self._empty(decided)
        elif decided == NOTHING:
            time.sleep(PAUSE_SECONDS)

    def _round(self, want: int, detail: int) -> tuple[int, list[int]]:
        if not self._awake and self._heard < self._phase:
            self._store.set(f"bell{self._phase}", "")
        self._awake = True
        told = torch.tensor([want, detail, self._heard])
        found = [torch.empty_like(told) for _ in range(self._group.size())]
        self._group.allgather([found], [told]).wait()
        self._number += 1
        self._remove_bells(min(int(one[2]) for one in found))
        decided = decide([int(one[0]) for one in found], self._number)
        if decided == SLEEP:
            self._awake, self._phase = False, self._phase + 1
        return decided, [int(one[1]) for one in found]

    def _remove_bells(self, heard: int) -> None:
        """Remove bells up to `heard` from the store: all engines have heard them, so none waits for one of them. No
        engine rings one again either, for it does so before its first round of a phase only."""
        for phase in range(self._removed, heard + 1 if self._group.rank() == 0 else 0):
            self._store.delete_key(f"bell{phase}")
            self._removed = phase + 1

    def _listen(self, store: dist.Store) -> None:
        phase = 0
        while True:
            try:
                store.wait([f"bell{phase}"], timedelta(seconds=BELL_SECONDS))
            except Exception as error:
                if "timeout" in str(error).lower():
                    continue
                return  # the store is gone, and its engine with it
            self._heard = phase
            phase += 1
            for act in self._acts:
                act()
