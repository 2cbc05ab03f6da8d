"""What is sold, to whom, in which weather: the demand of a day, drawn from the seed, the day and the product alone.

So two policies in the same year meet the same weather and, where they offer the same at the same price, sell the same.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

DAYS = 365
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TRAFFIC = (0.95, 1.0, 1.05, 1.05, 1.2, 0.9, 0.7)
"""Customers by weekday, relative to a mean day."""
SKIES = ("sunny", "cloudy", "rainy")
SKY_TRAFFIC = {"sunny": 1.1, "cloudy": 1.0, "rainy": 0.7}
MEAN_C, SWING_C = 12.0, 11.0
MOST_WANTED = 40
"""Units of one product that a day can sell."""


@dataclass(frozen=True)
class Product:
    """A product: units that a mean day sells at `price` (cents), how strongly a higher price lowers that, and how much
    a degree above the mean raises it. Large ones only fit into large slots."""

    name: str
    price: int
    units: float
    elasticity: float
    warmth: float
    large: bool = False


PRODUCTS: Mapping[str, Product] = {
    product.name: product
    for product in (
        Product("chips", 175, 4.0, 1.8, 0.0),
        Product("chocolate bar", 160, 4.5, 1.7, -0.015),
        Product("gum", 120, 2.0, 1.4, 0.0),
        Product("nuts", 210, 2.2, 1.6, -0.005),
        Product("cookies", 190, 2.6, 1.7, -0.01),
        Product("protein bar", 290, 1.6, 1.5, 0.0),
        Product("cola", 220, 5.0, 1.9, 0.025, True),
        Product("water", 170, 4.0, 2.2, 0.035, True),
        Product("orange juice", 280, 2.0, 1.7, 0.01, True),
        Product("iced tea", 240, 2.4, 1.8, 0.04, True),
        Product("energy drink", 330, 2.6, 1.6, 0.005, True),
        Product("sandwich", 480, 1.8, 1.5, 0.0, True),
    )
}


@dataclass(frozen=True)
class Weather:
    """The weather of a day."""

    sky: str
    celsius: int


@functools.lru_cache(maxsize=4 * DAYS)
def weather(seed: int, day: int) -> Weather:
    """The weather of day `day`, from 0; the year begins on 1 January."""
    rng = random.Random(f"vending weather {seed} {day}")
    season = -math.cos(2 * math.pi * (day - 15) / DAYS)
    celsius = round(MEAN_C + SWING_C * season + rng.gauss(0.0, 3.0))
    return Weather(rng.choices(SKIES, (0.35 + 0.15 * season, 0.35, 0.3 - 0.15 * season))[0], celsius)


def demand(seed: int, day: int, product: Product, price: int, different: int) -> int:
    """Units that customers want on a day at `price` cents, if `different` products are for sale. A choice draws more
    customers, up to six products."""
    now = weather(seed, day)
    mean = product.units * TRAFFIC[day % 7] * SKY_TRAFFIC[now.sky]
    mean *= max(0.2, 1.0 + product.warmth * (now.celsius - MEAN_C))
    mean *= (max(price, 1) / product.price) ** -product.elasticity
    mean *= 0.7 + 0.05 * min(different, 6)
    return _poisson(min(mean, MOST_WANTED), random.Random(f"vending demand {seed} {day} {product.name}"))


def _poisson(mean: float, rng: random.Random) -> int:
    """By inversion of one uniform number, so a lower price never sells less."""
    uniform, count, share = rng.random(), 0, math.exp(-mean)
    total = share
    while uniform > total and count < MOST_WANTED:
        count += 1
        share *= mean / count
        total += share
    return count
