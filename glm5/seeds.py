"""Seeds as data: every random draw comes from a generator seeded by (run seed, purpose, index)."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, purpose: str, *index: int | str) -> int:
    """A 63-bit seed that depends on all parts. Independent of process, rank, order of calls and Python's hash seed."""
    text = "\x1f".join([str(seed), purpose, *map(str, index)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
