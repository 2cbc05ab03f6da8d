"""A consistent-hash ring: ids to ranks, the same for every turn, and bounded load (§4.1).

Every rank owns many points of a circle, and an id belongs to the rank whose point comes next after the id's own. A rank
that joins takes its share from all others alike, one that leaves gives its ids to all others alike, and no other id
moves. Nothing here depends on time, chance or the order of calls: two processes with the same ranks agree.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b

POINTS = 128
"""Of each rank. The shares of ranks differ by about 1 / sqrt(POINTS)."""
SLACK = 0.25
FLOOR = 2
"""A rank that has more than `(1 + SLACK) * mean + FLOOR` in flight sends ids on. Below the floor an engine has room in
its batch, and a prefix that is cached is worth more than an even load."""


class HashRing:
    """Ranks on a circle.

    Example:
        >>> ring = HashRing(range(4))
        >>> ring.owner("rollout-17") == ring.owner("rollout-17")
        True
    """

    def __init__(self, ranks: Iterable[int] = (), *, points: int = POINTS) -> None:
        self._points = points
        self._circle: list[tuple[int, int]] = []  # (place, rank), sorted
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
        """Without effect where the rank is on the ring already."""
        if rank not in self._ranks:
            self._ranks.add(rank)
            for i in range(self._points):
                insort(self._circle, (_place(f"{rank}#{i}"), rank))

    def remove(self, rank: int) -> None:
        """Without effect where the rank is not on the ring."""
        if rank in self._ranks:
            self._ranks.discard(rank)
            self._circle = [point for point in self._circle if point[1] != rank]

    def owner(self, key: str) -> int:
        """The rank of an id. Raises LookupError while the ring is empty."""
        for rank in self.walk(key):
            return rank
        raise LookupError("the ring is empty")

    def walk(self, key: str) -> Iterator[int]:
        """All ranks, each once, in the order in which they would own an id if those before them left."""
        start, seen = bisect_right(self._circle, (_place(key), -1)), set()
        for i in range(len(self._circle)):
            rank = self._circle[(start + i) % len(self._circle)][1]
            if rank not in seen:
                seen.add(rank)
                yield rank
                if len(seen) == len(self._ranks):
                    return

    def pick(self, key: str, load: Mapping[int, int], *, spill: str | None = None, avoid: Collection[int] = ()) -> int:
        """The rank for the next request of an id, given how many each rank has in flight.

        That is the owner, unless it is one of `avoid` or has too much to do: then the first rank with room on the way
        from `spill`, a finer id (default: the same), so that what many requests share may overflow to many ranks while
        each finer id overflows to one. Raises LookupError where no rank is left.
        """
        open_ranks = self._ranks.difference(avoid)
        if not open_ranks:
            raise LookupError("no rank is left on the ring")
        bound = (1 + SLACK) * sum(load.get(rank, 0) for rank in open_ranks) / len(open_ranks) + FLOOR
        owner = self.owner(key)
        if owner in open_ranks and load.get(owner, 0) < bound:
            return owner
        # Someone has at most the mean, which is below the bound.
        return next(rank for rank in self.walk(spill or key) if rank in open_ranks and load.get(rank, 0) < bound)


def _place(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
