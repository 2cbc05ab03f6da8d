"""The hash ring and what makes requests belong together; no process is started."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.engine.hash_ring import FLOOR, SLACK, HashRing
from glm5.serve.router.affinity import Affinity, affinity_of

IDS = [f"rollout-{i}" for i in range(2000)]
RANKS = st.sets(st.integers(0, 200), min_size=1, max_size=8)


@given(RANKS, st.randoms(use_true_random=False), st.text())
def test_the_order_of_arrival_does_not_matter(ranks: set[int], chance: random.Random, key: str) -> None:
    shuffled = list(ranks)
    chance.shuffle(shuffled)
    one, other = HashRing(sorted(ranks), points=16), HashRing(points=16)
    for rank in [*shuffled, 999]:
        other.add(rank)
        other.add(rank)
    other.remove(999)
    other.remove(999)
    assert list(one.walk(key)) == list(other.walk(key)) and other.ranks == ranks and len(other) == len(ranks)


@given(RANKS, st.integers(201, 300), st.lists(st.text(), min_size=1, max_size=20))
def test_only_ids_of_a_rank_that_comes_or_goes_move(ranks: set[int], new: int, keys: list[str]) -> None:
    ring = HashRing(ranks, points=16)
    before = {key: list(ring.walk(key)) for key in keys}
    ring.add(new)
    for key in keys:
        assert ring.owner(key) in (before[key][0], new)
        assert [rank for rank in ring.walk(key) if rank != new] == before[key]
    ring.remove(new)
    assert {key: list(ring.walk(key)) for key in keys} == before


@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_shares_and_churn(count: int) -> None:
    ring = HashRing(range(count))
    before = {key: ring.owner(key) for key in IDS}
    shares = Counter(before.values())
    assert min(shares.values()) > 0.6 * len(IDS) / count and max(shares.values()) < 1.5 * len(IDS) / count
    ring.add(count)
    moved = sum(ring.owner(key) != before[key] for key in IDS) / len(IDS)
    assert 0.6 / (count + 1) < moved < 1.5 / (count + 1)
    ring.remove(count)
    ring.remove(0)
    left = [key for key in IDS if ring.owner(key) != before[key]]
    assert left == [key for key in IDS if before[key] == 0]
    if count > 2:  # its ids go to all others, not to one neighbour
        assert len({ring.owner(key) for key in left}) == count - 1


@given(RANKS, st.dictionaries(st.integers(0, 200), st.integers(0, 50)), st.text(), st.text(), st.data())
def test_a_pick_is_within_the_bound_and_the_owner_if_that_is(
    ranks: set[int], load: dict[int, int], key: str, spill: str, data: st.DataObject
) -> None:
    ring = HashRing(ranks, points=16)
    avoid = data.draw(st.sets(st.sampled_from(sorted(ranks))))
    if avoid == ranks:
        with pytest.raises(LookupError):
            ring.pick(key, load, avoid=avoid)
        return
    picked, left = ring.pick(key, load, spill=spill, avoid=avoid), ranks - avoid
    bound = (1 + SLACK) * sum(load.get(rank, 0) for rank in left) / len(left) + FLOOR
    fits = {rank for rank in left if load.get(rank, 0) < bound}
    assert picked in fits
    if ring.owner(key) in fits:
        assert picked == ring.owner(key)
    else:
        assert picked == next(rank for rank in ring.walk(spill or key) if rank in fits)


def test_an_empty_ring_has_no_owner() -> None:
    with pytest.raises(LookupError):
        HashRing().owner("x")
    with pytest.raises(LookupError):
        HashRing().pick("x", {})


def test_other_processes_agree() -> None:
    """Also with another seed of Python's own hash."""
    ask = "r = HashRing(range(5)); print([r.owner(str(i)) for i in range(50)])"
    code = f"from glm5.engine.hash_ring import HashRing; {ask}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)}, capture_output=True
    )
    ring = HashRing(range(5))
    assert json.loads(done.stdout) == [ring.owner(str(i)) for i in range(50)], done.stderr


class Simulation:
    """Sessions of several turns on engines with room for some prefixes; a turn takes a random time."""

    def __init__(self, ranks: int, room: int, seed: int) -> None:
        self.ring = HashRing(range(ranks))
        self.caches: dict[int, OrderedDict[str, None]] = {rank: OrderedDict() for rank in range(ranks)}
        self.load: Counter[int] = Counter()
        self.ends: list[tuple[float, int]] = []
        self.room, self.chance, self.now = room, random.Random(seed), 0.0
        self.hits = self.turns = 0
        self.peaks: list[float] = []

    def turn(self, session: str, pick: Callable[[str], int]) -> None:
        self.now += self.chance.expovariate(1.0)
        for end, rank in [one for one in self.ends if one[0] <= self.now]:
            self.ends.remove((end, rank))
            self.load[rank] -= 1
        rank = pick(session)
        cache = self.caches[rank]
        self.turns += 1
        self.hits += session in cache
        cache[session] = None
        cache.move_to_end(session)
        while len(cache) > self.room:
            cache.popitem(last=False)
        self.load[rank] += 1
        self.ends.append((self.now + self.chance.expovariate(1 / 40), rank))
        loads = [self.load[r] for r in self.ring.ranks]
        self.peaks.append(max(loads) / (sum(loads) / len(loads)))

    def run(self, pick: Callable[[str], int], turns: int = 4000) -> tuple[float, float]:
        """Share of turns that found their session's prefix, and the mean of the highest load over the mean load."""
        popular = [1 / (1 + i) ** 0.7 for i in range(200)]
        sessions = self.chance.choices(range(200), popular, k=turns)
        for session in sessions:
            self.turn(f"s{session}", pick)
        return self.hits / self.turns, sum(self.peaks[turns // 4 :]) / len(self.peaks[turns // 4 :])


def test_simulated_traffic_keeps_its_prefixes_and_its_balance() -> None:
    """Affinity finds far more prefixes than chance does, and bounded load evens out what plain hashing leaves."""
    bounded, plain, chance = (Simulation(4, 80, seed=1) for _ in range(3))
    hits, peak = bounded.run(lambda key: bounded.ring.pick(key, bounded.load))
    plain_hits, plain_peak = plain.run(plain.ring.owner)
    random_hits, _ = chance.run(lambda key: chance.chance.randrange(4))
    assert hits > 0.85 and hits > random_hits + 0.2 and hits > plain_hits - 0.1
    assert peak < 1.5 and peak < plain_peak


def test_simulated_churn_costs_the_share_that_moved() -> None:
    simulation = Simulation(4, 200, seed=2)
    pick = lambda key: simulation.ring.pick(key, simulation.load)  # noqa: E731
    simulation.run(pick)
    simulation.hits = simulation.turns = 0
    simulation.ring.remove(2)
    simulation.load[2] = 0
    simulation.ends = [one for one in simulation.ends if one[1] != 2]
    simulation.caches[2].clear()
    gone, _ = simulation.run(pick, turns=1000)
    simulation.ring.add(2)
    simulation.hits = simulation.turns = 0
    back, _ = simulation.run(pick, turns=1000)
    assert gone > 0.85 and back > 0.85


HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("headers", "fields", "key"),
    [
        ({"x-session-id": "a", "x-smg-routing-key": "b"}, {"user": "c"}, "a"),
        ({"x-smg-routing-key": "b"}, {"session_id": "c"}, "b"),
        ({}, {"session_id": "c", "prompt_cache_key": "d", "user": "e", "metadata": {"user_id": "f"}}, "c"),
        ({}, {"prompt_cache_key": "d", "user": "e", "metadata": {"user_id": "f"}}, "d"),
        ({}, {"user": "e", "metadata": {"user_id": "f"}}, "e"),
        ({}, {"user": "", "metadata": {"user_id": "f"}, "messages": [HI]}, "f"),
        ({}, {"session_id": 7}, "7"),
    ],
)
def test_a_client_names_its_session(headers: Mapping[str, str], fields: dict[str, Any], key: str) -> None:
    assert affinity_of(headers, json.dumps(fields).encode()) == Affinity(f"session:{key}")


def of(**fields: Any) -> Affinity:
    return affinity_of({}, json.dumps(fields).encode())


def test_conversations_are_known_by_how_they_begin() -> None:
    system, other = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "ho"}
    chat = of(messages=[system, HI])
    turn = of(messages=[system, HI, {"role": "assistant", "content": "x"}, other], temperature=0)
    assert chat == turn and chat.spill is not None
    beside = of(messages=[system, other])
    assert beside.key == chat.key and beside.spill != chat.spill  # one system prompt, two conversations
    assert of(messages=[{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, HI]) == chat
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    marked = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    assert (
        of(system=blocks, messages=[{"role": "user", "content": marked}])
        == of(system="Be brief.", messages=[HI])
        == chat
    )
    alone = of(messages=[HI])
    assert alone == of(messages=[HI, other]) != of(messages=[other]) and alone.key != chat.key


def test_plain_prompts_are_known_by_how_they_begin() -> None:
    long = "x" * 300
    assert of(prompt=long) == of(prompt=long + "more") == of(text=[long, "y"]) != of(prompt="y" + long)
    ids = list(range(100))
    assert of(input_ids=ids) == of(input_ids=[*ids, 5]) == of(input_ids=[[*ids, 6]]) != of(input_ids=ids[1:])


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'"a"', b"null"])
def test_what_is_no_request_belongs_somewhere(body: bytes) -> None:
    assert affinity_of({}, body) == Affinity("")


@given(
    st.dictionaries(
        st.sampled_from(["messages", "system", "prompt", "text", "input_ids", "metadata", "user", "session_id"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["role", "content", "text", "user_id"]), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        max_size=4,
    )
)
def test_any_object_has_an_affinity(fields: dict[str, Any]) -> None:
    """The engine refuses bad requests, not the router."""
    found = affinity_of({}, json.dumps(fields).encode())
    assert found == affinity_of({}, json.dumps(fields).encode()) and HashRing([0, 1]).owner(found.key) in (0, 1)
