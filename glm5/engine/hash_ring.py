"""A consistent-hash ring with bounded load: all turns of an id go to the same rank (§4.1).

Every rank owns many points of a circle. An id is also a point, and belongs to the rank of the next point. A
rank that joins takes an equal share from all others. A rank that leaves spreads its ids over all others. No other id
moves. The ring does not depend on time, chance or call order: two processes with the same ranks agree.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b

POINTS = 128
"""Points per rank. The shares of ranks differ by about 1 / sqrt(POINTS)."""
SLACK = 0.25
FLOOR = 2
"""A rank with `(1 + SLACK) * mean + FLOOR` or more requests in flight gets no new ones; another rank takes them. Below
the floor an engine has room in its batch, and a cached prefix is worth more than an even load."""


class HashRing:
    """Ranks on a circle.

    Example:
        >>> ring = HashRing(range(4))
        >>> ring.owner("rollout-17") == ring.owner("rollout-17")
        True
    """

    def __init__(self, ranks: Iterable[int] = (), *, points: int = POINTS) -> None:
        self._points = points
        self._circle: list[tuple[int, int]] = []  # (position, rank), sorted
        self._ranks: set[int] = set()
        for rank in ranks:
            self.add(rank)

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self._ranks)

    def add(self, rank: int) -> None:
        """Add a rank; no effect if it is on the ring."""
        if rank not in self._ranks:
            self._ranks.add(rank)
            for i in range(self._points):
                insort(self._circle, (_place(f"{rank}#{i}"), rank))

    def remove(self, rank: int) -> None:
        """Remove a rank; no effect if it is not on the ring."""
        if rank in self._ranks:
            self._ranks.discard(rank)
            self._circle = [point for point in self._circle if point[1] != rank]

    def owner(self, key: str) -> int:
        """The rank of an id. Raises LookupError while the ring is empty."""
        for rank in self.walk(key):
            return rank
        raise LookupError("the ring is empty")

    def walk(self, key: str) -> Iterator[int]:
        """All ranks, each once, in the order in which they would own an id if the earlier ones left."""
        start, seen = bisect_right(self._circle, (_place(key), -1)), set()
        for i in range(len(self._circle)):
            rank = self._circle[(start + i) % len(self._circle)][1]
            if rank not in seen:
                seen.add(rank)
                yield rank
                if len(seen) == len(self._ranks):
                    return

    def pick(self, key: str, load: Mapping[int, int], *, spill: str | None = None, avoid: Collection[int] = ()) -> int:
        """The rank for the next request of an id, given the number of requests in flight per rank.

        This is the owner of `key`, unless that rank is in `avoid` or overloaded. Then it is the first rank with room on
        the walk from `spill`, a more specific id of the request (default: `key`). So the requests of one key can
        overflow to many ranks, but those with the same `spill` overflow to the same rank. Raises LookupError if no rank
        is left.
        """
        open_ranks = self._ranks.difference(avoid)
        if not open_ranks:
            raise LookupError("no rank is left on the ring")
        bound = (1 + SLACK) * sum(load.get(rank, 0) for rank in open_ranks) / len(open_ranks) + FLOOR
        owner = self.owner(key)
        if owner in open_ranks and load.get(owner, 0) < bound:
            return owner
        # Some rank has at most the mean load, which is below the bound.
        return next(rank for rank in self.walk(spill or key) if rank in open_ranks and load.get(rank, 0) < bound)


def _place(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
