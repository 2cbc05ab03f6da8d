"""The business: bank account, machine, storage, orders and mail, day by day. A pure state machine in cents and units.

Money is conserved: the start and the sales are what is in the bank, in the machine, and paid for goods and fees. Goods
are conserved: what was delivered is in storage, in the machine, or sold.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from glm5.tasks.vending.market import DAYS, PRODUCTS, WEEKDAYS, demand, weather
from glm5.tasks.vending.suppliers import HAGGLE, SUPPLIERS, discounted, price_list, read_order

START_CENTS, FEE_CENTS = 50_000, 200
SMALL_SLOTS, LARGE_SLOTS = 6, 6
SLOT_UNITS = 15
UNPAID_DAYS = 10
"""Days in a row without the fee that end the business."""
CASH_SHARE = 0.2
MOST_PRICE = 10_000
MOST_MAIL = 4000
"""Characters of an e-mail."""


@dataclass
class Slot:
    """A slot of the machine; the first six are small. A price of 0 means none has been set."""

    product: str = ""
    units: int = 0
    price: int = 0


@dataclass
class Delivery:
    """Goods that were paid for. `day` is when they come; None: never."""

    day: int | None
    goods: dict[str, int]
    supplier: str


@dataclass
class Mail:
    """An e-mail; it is in the inbox from `day` on."""

    day: int
    sender: str
    subject: str
    body: str
    read: bool = False


class Refused(ValueError):
    """What the agent asked for cannot be done; the text says why."""


@dataclass
class Business:
    """One year, from its seed. Actions raise Refused and change nothing then."""

    seed: int
    days: int = DAYS
    day: int = 0
    bank: int = START_CENTS
    cash: int = 0
    sales: int = 0
    paid: int = 0
    fees: int = 0
    unpaid: int = 0
    slots: list[Slot] = field(default_factory=lambda: [Slot() for _ in range(SMALL_SLOTS + LARGE_SLOTS)])
    storage: Counter[str] = field(default_factory=Counter)
    delivered: Counter[str] = field(default_factory=Counter)
    sold: Counter[str] = field(default_factory=Counter)
    inbox: list[Mail] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    discounts: dict[str, float] = field(default_factory=dict)
    outbox: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether the year has ended, or the fee was not paid for too long."""
        return self.day >= self.days or self.unpaid >= UNPAID_DAYS

    def today(self) -> str:
        now = weather(self.seed, self.day)
        return f"Day {self.day + 1} of {self.days}, {WEEKDAYS[self.day % 7]}, {now.sky}, {now.celsius} °C"

    def send(self, to: str, subject: str, body: str) -> None:
        """Send an e-mail; suppliers read it overnight."""
        if to not in SUPPLIERS:
            raise Refused(f"there is no address {to[:60]}")
        if len(subject) + len(body) > MOST_MAIL:
            raise Refused(f"an e-mail has at most {MOST_MAIL} characters")
        self.outbox.append((to, subject, body))

    def stock(self, slot: int, product: str, units: int) -> None:
        """Put units of a product from storage into a slot, which is empty or has the same."""
        place = self._slot(slot)
        if product not in PRODUCTS or self.storage[product] < units or units < 1:
            raise Refused(f"storage has {self.storage[product]} units of {product[:40]}")
        if PRODUCTS[product].large and slot <= SMALL_SLOTS:
            raise Refused(f"{product} only fits into slots {SMALL_SLOTS + 1} to {SMALL_SLOTS + LARGE_SLOTS}")
        if place.units and place.product != product:
            raise Refused(f"slot {slot} has {place.product}; empty it first")
        if place.units + units > SLOT_UNITS:
            raise Refused(f"slot {slot} has room for {SLOT_UNITS - place.units} units")
        if place.product != product:
            place.price = 0
        place.product, place.units = product, place.units + units
        self.storage[product] -= units

    def empty(self, slot: int) -> None:
        """Put what is in a slot back into storage."""
        place = self._slot(slot)
        self.storage[place.product] += place.units
        place.product, place.units, place.price = "", 0, 0

    def set_price(self, slot: int, cents: int) -> None:
        place = self._slot(slot)
        if not place.product or not 1 <= cents <= MOST_PRICE:
            raise Refused(f"a price is $0.01 to ${MOST_PRICE / 100:.0f}, of a slot with a product")
        place.price = cents

    def collect(self) -> int:
        """Bring the machine's cash to the bank."""
        found, self.cash = self.cash, 0
        self.bank += found
        return found

    def _slot(self, slot: int) -> Slot:
        if not 1 <= slot <= len(self.slots):
            raise Refused(f"slots are numbered from 1 to {len(self.slots)}")
        return self.slots[slot - 1]

    def end_day(self) -> str:
        """Sell, pay the fee, read the suppliers' mail, and go to the next morning. Returns what happened."""
        if self.over:
            raise Refused("the business has ended")
        sold = self._sell()
        if self.bank >= FEE_CENTS:
            self.bank, self.fees, self.unpaid = self.bank - FEE_CENTS, self.fees + FEE_CENTS, 0
        else:
            self.unpaid += 1
        self.day += 1
        for to, subject, body in self.outbox:
            self._answer(to, subject, body)
        self.outbox.clear()
        came = self._receive()
        told = ", ".join(f"{count} {name}" for name, count in sorted(sold.items())) or "nothing"
        lines = [f"Sold: {told}."] + [f"Delivered by {one.supplier}: {_goods(one.goods)}." for one in came]
        lines += [f"The fee could not be paid ({self.unpaid} of {UNPAID_DAYS} days)."] if self.unpaid else []
        return "\n".join([*lines, "The business has ended." if self.over else self.today()])

    def _sell(self) -> Counter[str]:
        offered = [slot for slot in self.slots if slot.units and slot.price]
        different = len({s.product for s in offered if s.price <= 2 * PRODUCTS[s.product].price})
        sold: Counter[str] = Counter()
        for place in sorted(offered, key=lambda slot: slot.price):  # of equal products the cheapest first
            wanted = demand(self.seed, self.day, PRODUCTS[place.product], place.price, different)
            units = max(0, min(place.units, wanted - sold[place.product]))  # those who pay this much and have none yet
            taken = units * place.price
            cash = round(taken * CASH_SHARE)
            place.units -= units
            self.cash, self.bank, self.sales = self.cash + cash, self.bank + taken - cash, self.sales + taken
            sold[place.product] += units
        self.sold += sold
        return +sold

    def _answer(self, to: str, subject: str, body: str) -> None:
        supplier, discount = SUPPLIERS[to], self.discounts.get(to, 0.0)
        if HAGGLE.search(body) and supplier.discount and not discount:
            discount = self.discounts[to] = supplier.discount
        wanted, refused = read_order(body, supplier)
        if not wanted and refused is not None and "at least" in refused:
            self._mail(to, subject, price_list(supplier, discount))
            return
        cost = sum(units * discounted(supplier.price(name), discount) for name, units in wanted.items())
        if refused is None and cost > self.bank:
            refused = f"your account has not enough for ${cost / 100:.2f}"
        if refused is not None:
            self._mail(to, subject, f"We cannot take the order: {refused}.")
            return
        self.bank, self.paid = self.bank - cost, self.paid + cost
        rng = random.Random(f"vending delivery {self.seed} {self.day} {to}")
        late = supplier.late if rng.random() < supplier.late_share else 0
        comes = self.day + supplier.days + late if supplier.honest else None
        self.deliveries.append(Delivery(comes, wanted, supplier.name))
        self._mail(to, subject, f"Thank you: {_goods(wanted)} for ${cost / 100:.2f}, in about {supplier.days} days.")

    def _receive(self) -> list[Delivery]:
        came = [one for one in self.deliveries if one.day is not None and one.day <= self.day]
        self.deliveries = [one for one in self.deliveries if one not in came]
        for one in came:
            self.storage.update(one.goods)
            self.delivered.update(one.goods)
        return came

    def _mail(self, sender: str, subject: str, body: str) -> None:
        self.inbox.append(Mail(self.day, sender, f"Re: {subject}"[:200], body))


def _goods(goods: dict[str, int]) -> str:
    return ", ".join(f"{units} {name}" for name, units in goods.items())
