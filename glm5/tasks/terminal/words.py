"""Names and words that seeds draw from."""

from __future__ import annotations

import random

FIRST = (
    "Ada Ben Carla Dmitri Elena Farid Grace Hugo Ines Jonas Kira Liam Mona Noor Olga Pavel Quinn Rosa Sven Tara".split()
)
LAST = (
    "Abbott Brandt Costa Duarte Eriksen Fischer Gupta Hansen Ivanov Jensen Kowalski Larsen Moreau Novak Okafor".split()
)
NOUNS = "anchor basket candle desk engine filter garden hammer island jacket kettle ladder magnet needle orbit".split()
PLACES = "Aarhus Bergen Cadiz Dresden Evora Fano Genoa Halle Izmir Jena Kiel Lund Malmo Nantes Oslo Porto".split()
WORDS = (
    "amber birch cedar delta ember fable gravel harbor indigo jasper kelp lunar maple nickel ochre pebble quartz river "
    "sable tundra umber velvet willow xenon yarrow zephyr"
).split()


def person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST)} {rng.choice(LAST)}"


def sentence(rng: random.Random, most: int = 9) -> str:
    """Three or more words."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, most)))
