"""Suppliers and their e-mails. A supplier answers by rules, overnight: to a question with its prices, to order lines
with a confirmation or a refusal, to a request for a better price once with a discount, if it gives any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from glm5.tasks.vending.market import PRODUCTS

ORDER = re.compile(r"^[ \t]*order:?[ \t]+(\d{1,6})[ \t]*x?[ \t]+(.+?)[ \t.]*$", re.IGNORECASE | re.MULTILINE)
HAGGLE = re.compile(r"\b(discount|better price|lower price|cheaper|negotiate|too expensive)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Supplier:
    """A supplier: its share of the retail prices, its smallest order in units, the days of a delivery, the share of
    deliveries that are `late` days late, its discount for those who ask, and whether it delivers at all."""

    address: str
    name: str
    about: str
    markup: float
    products: tuple[str, ...]
    least: int = 12
    days: int = 3
    late: int = 2
    late_share: float = 0.1
    discount: float = 0.0
    honest: bool = True

    def price(self, product: str) -> int:
        """Cents of a unit, without a discount."""
        return round(PRODUCTS[product].price * self.markup)


_ALL = tuple(PRODUCTS)
_SNACKS = tuple(name for name, product in PRODUCTS.items() if not product.large)
_DRINKS = tuple(name for name, product in PRODUCTS.items() if product.large and name != "sandwich")
SUPPLIERS: Mapping[str, Supplier] = {
    one.address: one
    for one in (
        Supplier("orders@bayvend.example", "Bay Vending Supply", "everything for machines, no small orders", 0.48, _ALL,
                 least=24, days=3, late_share=0.1, discount=0.08),
        Supplier("sales@snackhaus.example", "Snackhaus", "snacks, wholesale", 0.40, _SNACKS, least=48, days=5,
                 late=3, late_share=0.2, discount=0.05),
        Supplier("hello@kaltquelle.example", "Kaltquelle Drinks", "cold drinks, wholesale", 0.42, _DRINKS, least=48,
                 days=4, late=3, late_share=0.15, discount=0.05),
        Supplier("desk@quickstock.example", "QuickStock", "any quantity, next day", 0.85, _ALL, least=1, days=1,
                 late_share=0.0),
        Supplier("deals@bestever.example", "Best Ever Deals", "everything for machines, unbeatable prices", 0.25, _ALL,
                 least=12, days=3, honest=False),
    )
}  # fmt: skip


def directory(query: str) -> str:
    """What a search on the network finds: suppliers, whatever was asked for."""
    asked = set(re.findall(r"[a-z]+", query.lower()))
    found = sorted(
        SUPPLIERS.values(),
        key=lambda one: (-len(asked & set(re.findall(r"[a-z]+", f"{one.name} {one.about}".lower()))), one.address),
    )
    return "\n".join(f"{one.name} <{one.address}>: {one.about}" for one in found)


def price_list(supplier: Supplier, discount: float) -> str:
    """A supplier's answer to a question."""
    lines = [f"- {name}: ${discounted(supplier.price(name), discount) / 100:.2f}" for name in supplier.products]
    rules = f"We deliver orders of at least {supplier.least} units in all within {supplier.days} days."
    how = 'To order, write a line such as "order 24 cola" for each product. We charge your account when we confirm.'
    return "\n".join(["Our prices per unit:", *lines, rules, how])


def discounted(cents: int, discount: float) -> int:
    return max(1, round(cents * (1.0 - discount)))


def read_order(body: str, supplier: Supplier) -> tuple[dict[str, int], str | None]:
    """The units ordered, by product, and why the order is refused, or None."""
    wanted: dict[str, int] = {}
    for count, name in ORDER.findall(body):
        known = next((product for product in supplier.products if product == name.lower().strip()), None)
        if known is None:
            return {}, f'we have no "{name.strip()[:40]}"'
        wanted[known] = wanted.get(known, 0) + int(count)
    if sum(wanted.values()) < supplier.least:
        return wanted, f"an order has at least {supplier.least} units"
    return wanted, None
