"""Engines that agree on every pass: threads with a group that the test plays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from glm5.engine.expert_parallel import ExpertParallelEngine
from glm5.engine.lockstep import IDLE, LEAVE, MTP, NOTHING, SLEEP, TRUNK, UPDATE, Lockstep, decide
from glm5.engine.page_hash import fingerprint
from glm5.errors import ConfigError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.parallel.tensor import divide_experts_of, division_of, fill_divided


class PlayedGroup:
    """An all-gather between threads."""

    def __init__(self, world: int) -> None:
        self._barrier, self._told = threading.Barrier(world, timeout=20), [torch.zeros(3)] * world

    def of(self, rank: int) -> Any:
        barrier, told = self._barrier, self._told

        class Rank:
            def size(self) -> int:
                return len(told)

            def rank(self) -> int:
                return rank

            def allgather(self, outputs: Any, inputs: Any) -> Any:
                told[rank] = inputs[0].clone()
                barrier.wait()
                for out, one in zip(outputs[0], told, strict=True):
                    out.copy_(one)
                barrier.wait()
                return self

            def wait(self) -> None:
                pass

        return Rank()


WANTS = st.lists(st.sampled_from([TRUNK, MTP]), max_size=8)


@given(st.lists(WANTS, min_size=2, max_size=4), st.booleans())
@example([[TRUNK] * 8, [MTP], []], True)
@settings(max_examples=25, deadline=None)
def test_all_engines_run_the_same_passes_and_none_waits_for_ever(work: list[list[int]], update: bool) -> None:
    group, store, world = PlayedGroup(len(work)), dist.HashStore(), len(work)
    store.set_timeout(timedelta(seconds=20))
    ran: list[list[int]] = [[] for _ in work]
    own = [0] * world
    failed: list[BaseException] = []

    def engine(rank: int) -> None:
        called = threading.Event()
        step = Lockstep(group.of(rank), (store, store), ran[rank].append)
        step.on_bell(called.set)
        try:
            for kind in work[rank]:
                step.turn(kind)
                ran[rank].append(kind)
                own[rank] += 1
            if update:
                assert step.turn(UPDATE, rank) == list(range(world))
                ran[rank].append(UPDATE)
            while not step.attend(LEAVE):
                pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=engine, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "an engine waits"
    assert not failed, failed
    assert all(one == ran[0] for one in ran) and own == [len(kinds) for kinds in work]
    assert ran[0].count(UPDATE) == update and len(ran[0]) <= sum(own) + update


@given(st.lists(st.integers(IDLE, LEAVE), min_size=1, max_size=5), st.integers(0, 9))
def test_decisions(wants: list[int], number: int) -> None:
    decided = decide(wants, number)
    if decided in (TRUNK, MTP):
        assert decided in wants
    elif decided in (UPDATE, LEAVE):
        assert set(wants) == {decided}
    elif decided == SLEEP:
        assert set(wants) == {IDLE}
    else:
        assert decided == NOTHING and not {TRUNK, MTP} & set(wants) and len(set(wants)) > 1
    if {TRUNK, MTP} <= set(wants):
        assert {decide(wants, number), decide(wants, number + 1)} == {TRUNK, MTP}


def test_idle_engines_sleep_until_the_bell() -> None:
    group, store = PlayedGroup(2), dist.HashStore()
    ends = [Lockstep(group.of(rank), (store, store), lambda kind: None) for rank in range(2)]
    called = threading.Event()
    ends[1].on_bell(called.set)
    for _ in range(3):
        assert not ends[0].awaited and not ends[1].awaited
        called.clear()
        working = threading.Thread(target=ends[0].turn, args=(TRUNK,))
        working.start()
        assert called.wait(10) and ends[1].awaited
        assert not ends[1].attend() and ends[1].awaited  # its pass was empty
        working.join(10)
        resting = [threading.Thread(target=end.attend) for end in ends]
        for thread in resting:
            thread.start()
        for thread in resting:
            thread.join(10)


def test_the_store_does_not_grow() -> None:
    """Bells that all engines have heard leave it, however often engines fall asleep and wake up."""
    world, phases = 3, 200
    group = PlayedGroup(world)
    # One connection each for the engine and its listener, as in a group of processes.
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connect = lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False)  # noqa: E731
    ends = [Lockstep(group.of(rank), (connect(), connect()), lambda kind: None) for rank in range(world)]
    empty, most = server.num_keys(), 0
    with ThreadPoolExecutor(world) as pool:
        for phase in range(phases):
            # A different engine wakes the others each time; then all rest.
            working = pool.submit(ends[phase % world].turn, TRUNK)
            others = [end for end in ends if end is not ends[phase % world]]
            wait_for(lambda: all(end.awaited for end in others))  # noqa: B023
            assert not any(pool.map(Lockstep.attend, others)) and working.result(10)
            assert all(pool.map(Lockstep.attend, ends))
            most = max(most, server.num_keys() - empty)
    assert all(end._phase == phases for end in ends)
    assert most <= 3, f"{most} bells in the store"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "no engine was woken"
        time.sleep(1e-4)


def test_weights_that_not_all_engines_take_are_taken_by_none() -> None:
    group, store = PlayedGroup(2), dist.HashStore()
    ends = [Lockstep(group.of(rank), (store, store), lambda kind: None) for rank in range(2)]
    late: list[Callable[[], object]] = []

    def update() -> None:
        with pytest.raises(TimeoutError):
            ends[0].turn(UPDATE, 1, seconds=0.1)
        late.append(lambda: None)
        ends[0].attend(LEAVE)

    thread = threading.Thread(target=update)
    thread.start()
    while not late:
        ends[1].attend()
    while not ends[1].attend(LEAVE):
        pass
    thread.join(10)


def test_every_engine_keeps_its_experts_and_all_of_the_rest(
    small: Callable[..., GLM5ForCausalLM], tmp_path: Path
) -> None:
    model = small()
    model.save_pretrained(tmp_path)
    whole, experts = model.state_dict(), model.config.n_routed_experts
    for rank in range(2):
        part = GLM5ForCausalLM.from_pretrained(tmp_path, device="meta")
        with torch.no_grad():
            divide_experts_of(part, rank, 2, lambda *arguments: arguments[1])
            fill_divided(part, torch.device("cpu"))
        division, half = division_of(part), experts // 2
        assert division is not None
        for name, tensor in part.state_dict().items():
            kept = whole[name][rank * half : (rank + 1) * half] if ".experts." in name else whole[name]
            assert torch.equal(tensor, kept) and torch.equal(division.part(name, whole[name], rank), kept), name
        assert part.config.n_routed_experts == experts
    with pytest.raises(ConfigError, match=f"n_routed_experts is {experts}"):
        divide_experts_of(GLM5ForCausalLM.from_pretrained(tmp_path, device="meta"), 0, experts + 1, lambda *a: a[1])


def test_pages_depend_on_the_experts_of_all_engines(small: Callable[..., GLM5ForCausalLM], tmp_path: Path) -> None:
    model = small()
    found = []
    for number in range(2):
        model.save_pretrained(tmp_path / str(number))
        group, store = PlayedGroup(2), dist.HashStore()

        def engine(rank: int) -> str:
            part = GLM5ForCausalLM.from_pretrained(tmp_path / str(number), device="meta")  # noqa: B023
            with torch.no_grad():
                divide_experts_of(part, rank, 2, lambda *arguments: arguments[1])
                fill_divided(part, torch.device("cpu"))
            return fingerprint(ExpertParallelEngine(part, None, (group.of(rank), (store, store))))  # noqa: B023

        with ThreadPoolExecutor() as pool:
            found.append(list(pool.map(engine, range(2))))
        for name, tensor in model.state_dict().items():
            if ".experts." in name:
                tensor[-1] *= 2.0  # one of the second engine
    assert found[0][0] == found[0][1] != found[1][0] == found[1][1]
