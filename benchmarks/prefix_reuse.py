"""Prefix reuse of multi-turn rollouts over several engines: sessions routed by consistent hashing, and at random.

`python benchmarks/prefix_reuse.py [--engines 2] [--sessions 32] [--turns 6]`. Repeated are the tokens of a prompt that
the same session has sent or sampled before; the cache holds whole pages of 64 tokens, and has room for all sessions.
Also: how many sessions move when one engine is added.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import uuid
from pathlib import Path

from glm5 import GLM5Config, GLM5ForCausalLM
from glm5.chat import Tokenizer
from glm5.engine.hash_ring import HashRing
from glm5.records import SamplingParams
from glm5.rollout.engines import EnginePool
from glm5.rollout.fleet import LocalFleet
from glm5.serve.options import EngineOptions, Limits
from glm5.serve.router.control import expositions

FIRST, NEW, ANSWER = 600, 120, 60
"""Tokens of a session's first prompt, of each further message, and of an answer."""


async def cached(fleet: LocalFleet) -> int:
    texts = (await expositions(fleet.workers)).values()
    lines = [line for text in texts for line in text.splitlines() if line.startswith("glm5_cached_tokens_total ")]
    return sum(int(float(line.split()[1])) for line in lines)


async def play(pool: EnginePool, turns: int, vocabulary: int, rng: random.Random, routed: bool) -> int:
    """Play a session; returns the number of repeated tokens that it sent."""
    name, repeated, ids = uuid.uuid4().hex, 0, list[int]()
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    for turn in range(turns):
        repeated += len(ids)
        ids += [rng.randrange(vocabulary) for _ in range(NEW if turn else FIRST)]
        async for delta in pool.generate(ids, params, name if routed else uuid.uuid4().hex):
            ids = [*ids, *delta.token_ids]
    return repeated


async def measure(start: Path, engines: int, sessions: int, turns: int, seed: int, routed: bool) -> float:
    """Share of the repeated tokens that came from a prefix cache."""
    room = 2 * sessions * (FIRST + turns * (NEW + ANSWER))
    fleet = LocalFleet(start, engines, EngineOptions(max_batch=sessions, cache_tokens=room), Limits())
    try:
        await fleet.start()
        rng, pool = random.Random(seed), EnginePool(fleet.sources, most=sessions)
        played = [play(pool, turns, 256, random.Random(rng.random()), routed) for _ in range(sessions)]
        repeated = sum(await asyncio.gather(*played))
        return await cached(fleet) / repeated
    finally:
        await fleet.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start, tokenizer = Path(folder), Tokenizer.byte_level()
        GLM5ForCausalLM(GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size), seed=0).save_pretrained(start)
        tokenizer.save(start)
        for routed in (True, False):
            found = [
                asyncio.run(measure(start, options.engines, options.sessions, options.turns, seed, routed))
                for seed in range(options.seeds)
            ]
            how = "by session" if routed else "at random "
            spread = f"({min(found):.3f} to {max(found):.3f})"
            print(f"{how}: {statistics.median(found):.3f} of the repeated tokens from cache {spread}", flush=True)
    names = [uuid.UUID(int=random.Random(i).getrandbits(128)).hex for i in range(20_000)]
    for engines in (1, 2, 4, 8, 16, 32):
        before, after = HashRing(range(engines)), HashRing(range(engines + 1))
        moved = sum(before.owner(name) != after.owner(name) for name in names) / len(names)
        print(f"{engines} engines and one more: {moved:.3f} of the sessions move, {moved * engines:.2f} / {engines}")


if __name__ == "__main__":
    main()
