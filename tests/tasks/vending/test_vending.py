"""The vending year: money and goods are conserved, a year repeats, and good management pays."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.errors import ConfigError, DataError
from glm5.records import Message, Outcome, ToolCall
from glm5.tasks import make_family
from glm5.tasks.contract import SPLITS
from glm5.tasks.vending.business import FEE_CENTS, SLOT_UNITS, SMALL_SLOTS, START_CENTS, UNPAID_DAYS, Business, Refused
from glm5.tasks.vending.market import DAYS, PRODUCTS, demand, weather
from glm5.tasks.vending.suppliers import SUPPLIERS, read_order

GOOD, SCAM, QUICK = "orders@bayvend.example", "deals@bestever.example", "desk@quickstock.example"


def conserved(business: Business) -> None:
    assert business.bank + business.cash == START_CENTS + business.sales - business.paid - business.fees
    assert min(business.bank, business.cash, *business.storage.values(), 0) == 0
    held = Counter(business.storage)
    for slot in business.slots:
        held[slot.product] += slot.units
        assert 0 <= slot.units <= SLOT_UNITS
    for product in PRODUCTS:
        assert held[product] + business.sold[product] == business.delivered[product]


def act(business: Business, rng: random.Random) -> None:
    """Something, sensible or not."""
    products, slot = sorted(PRODUCTS), rng.randint(-1, 13)
    match rng.randint(0, 6):
        case 0:
            body = "\n".join(f"order {rng.randint(0, 60)} {rng.choice(products)}" for _ in range(rng.randint(0, 3)))
            business.send(rng.choice([*SUPPLIERS, "no@one.example"]), "goods", body + rng.choice(["", " a discount?"]))
        case 1 | 2:
            business.stock(slot, rng.choice([*products, "gold"]), rng.randint(-2, 20))
        case 3:
            business.set_price(slot, rng.randint(-5, 900))
        case 4:
            business.empty(slot)
        case 5:
            business.collect()
        case 6:
            business.end_day()


@given(st.integers(0, 10**6), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_money_and_goods_are_conserved(seed: int, actions: int) -> None:
    rng, business = random.Random(actions), Business(seed, days=40)
    for _ in range(120):
        before = repr(business)
        try:
            act(business, rng)
        except Refused:
            assert repr(business) == before
        conserved(business)


@given(st.integers(0, 10**6), st.integers(0, DAYS - 1), st.sampled_from(sorted(PRODUCTS)), st.integers(1, 999))
@settings(max_examples=60, deadline=None)
def test_a_lower_price_and_a_wider_choice_never_sell_less(seed: int, day: int, name: str, price: int) -> None:
    product = PRODUCTS[name]
    wanted = demand(seed, day, product, price, 3)
    assert wanted == demand(seed, day, product, price, 3)
    assert demand(seed, day, product, price + 50, 3) <= wanted <= demand(seed, day, product, price, 6)


def test_the_year_has_seasons_and_weekends() -> None:
    def mean(name: str, days: list[int]) -> float:
        return sum(demand(s, day, PRODUCTS[name], PRODUCTS[name].price, 6) for s in range(5) for day in days) / len(
            days
        )

    winter, summer = list(range(0, 60)), list(range(170, 230))
    assert mean("iced tea", summer) > 1.5 * mean("iced tea", winter)
    assert mean("chocolate bar", summer) < mean("chocolate bar", winter)
    fridays, sundays = list(range(4, DAYS, 7)), list(range(6, DAYS, 7))
    assert mean("chips", fridays) > 1.3 * mean("chips", sundays)
    assert {weather(1, day).sky for day in range(60)} == {"sunny", "cloudy", "rainy"}


def sensible(seed: int, days: int = DAYS, supplier: str = GOOD) -> Business:
    """Orders what runs out from a fair supplier, keeps the machine full, collects cash weekly."""
    business, layout = (
        Business(seed, days),
        [
            "chips",
            "chocolate bar",
            "cookies",
            "nuts",
            "gum",
            "protein bar",
            "cola",
            "water",
            "iced tea",
            "energy drink",
            "orange juice",
            "sandwich",
        ],
    )
    business.send(supplier, "prices", "Could you give us a better price?")
    while not business.over:
        for number, product in enumerate(layout, 1):
            slot, there = business.slots[number - 1], business.storage[product]
            if there and slot.units < SLOT_UNITS:
                business.stock(number, product, min(there, SLOT_UNITS - slot.units))
                business.set_price(number, PRODUCTS[product].price)
        coming = Counter[str]()
        for delivery in business.deliveries:
            coming.update(delivery.goods)
        budget, lines = business.bank - 15 * FEE_CENTS, list[str]()
        for number, product in enumerate(layout, 1):
            held = business.slots[number - 1].units + business.storage[product] + coming[product]
            cost = 12 * SUPPLIERS[supplier].price(product)
            if held < 12 and cost <= budget:
                lines.append(f"order 12 {product}")
                budget -= cost
        if len(lines) >= 2 and business.day < days - 5:
            business.send(supplier, "goods", "\n".join(lines))
        if business.day % 7 == 0 or business.day == days - 1:
            business.collect()
        business.end_day()
        if business.day == days - 1:
            business.collect()
        conserved(business)
    business.collect()
    return business


def test_a_sensible_year_ends_above_a_lazy_one_and_repeats() -> None:
    for seed in range(2):
        lazy = Business(seed)
        while not lazy.over:
            lazy.end_day()
        good = sensible(seed)
        print(seed, good.bank / 100, lazy.bank / 100)
        assert good.day == DAYS and (seed or repr(good) == repr(sensible(seed)))
        assert good.bank > 4 * START_CENTS > START_CENTS > lazy.bank >= 0
        assert lazy.unpaid == UNPAID_DAYS and lazy.bank == 0  # 250 fees, then ten days without one
    assert sensible(0, supplier=SCAM).bank < START_CENTS
    dear = sensible(0, supplier=QUICK).bank
    assert dear < sensible(0).bank


def test_a_cheap_slot_sells_no_dear_one() -> None:
    """Few want a bar at $9, whatever the slot beside it asks; and what is dear is no choice."""

    def sold(*slots: tuple[str, int, int]) -> list[int]:
        business, total = Business(5), [0] * len(slots)
        for _ in range(40):
            for number, (product, units, price) in enumerate(slots, SMALL_SLOTS + 1):
                slot = business.slots[number - 1]
                slot.product, slot.units, slot.price = product, units, price
            business.end_day()
            left = [business.slots[SMALL_SLOTS + i].units for i in range(len(slots))]
            total = [had + slots[i][1] - left[i] for i, had in enumerate(total)]
        return total

    dear, alone = ("chips", 15, 900), ("chips", 15, 170)
    assert sold(("chips", 1, 1), dear)[1] <= sold(dear)[0] < 40
    assert sold(alone) == sold(alone, ("cola", 15, 9999), ("water", 15, 9999), ("gum", 15, 9999))[:1]
    assert sold(alone)[0] < sold(alone, ("cola", 15, 220), ("water", 15, 170), ("gum", 15, 120))[0]


def test_suppliers_and_their_mail() -> None:
    business = Business(3)
    for to, body in ((GOOD, "What do you sell?"), (GOOD, "order 12 cola\norder 12 chips"), (QUICK, "order 1 gold"),
                     (QUICK, "order 99999 sandwich"), (SCAM, "order 12 cola")):  # fmt: skip
        business.send(to, "hello", body)
    business.end_day()
    texts = [mail.body for mail in business.inbox]
    assert "- cola: $1.06" in texts[0] and "at least 24 units" in texts[0]
    assert texts[1].startswith("Thank you: 12 cola, 12 chips for $22.8") and 'no "gold"' in texts[2]
    assert "not enough" in texts[3] and texts[4].startswith("Thank you")
    for _ in range(10):
        business.end_day()
    assert business.storage == Counter(cola=12, chips=12) and len(business.deliveries) == 1  # the other never comes
    before = business.paid
    business.send(GOOD, "more", "order 24 cola, and is there a discount?")
    business.end_day()
    assert 'no "cola, and' in business.inbox[-1].body and business.discounts == {GOOD: 0.08}
    business.send(GOOD, "more", "order 24 cola.")
    business.end_day()
    assert business.paid - before == 24 * round(106 * 0.92)
    assert read_order("Order: 3 x chips\n  order 4 CHIPS", SUPPLIERS[QUICK]) == ({"chips": 7}, None)
    for wrong in (lambda: business.stock(1, "cola", 1), lambda: business.stock(SMALL_SLOTS + 1, "cola", 16),
                  lambda: business.stock(0, "chips", 1), lambda: business.set_price(1, 100),
                  lambda: business.send("x", "y", "z")):  # fmt: skip
        with pytest.raises(Refused):
            wrong()


def test_an_episode() -> None:
    env = make_family("vending", days=3, max_turns=20).problem("heldout", 0).env()
    (opening,), tools, thinking = env.start()
    assert "Day 1 of 3" in opening.content and len(tools) == 13 and thinking

    def said(*calls: tuple[str, dict[str, object]]) -> list[str]:
        result = env.step(Message("assistant", tool_calls=tuple(ToolCall(name, made) for name, made in calls)))
        assert not result.done
        return [message.content for message in result.messages]

    assert "Kaltquelle" in said(("search", {"query": "drinks"}))[0].splitlines()[0]
    assert (
        said(("send_email", {"to": QUICK, "subject": "x", "body": "order 10 chips"}), ("wait_for_next_day", {}))[0]
        == "done"
    )
    assert "10 chips" in said(("read_inbox", {}), ("check_storage", {}))[0]
    assert said(("wait_for_next_day", {}))[0].startswith("Sold: nothing.\nDelivered by QuickStock: 10 chips.")
    texts = said(("stock_slot", {"slot": 1, "product": "Chips", "units": 10}),
                 ("set_price", {"slot": 1, "dollars": 1.5}),
                 ("set_price", {"slot": 1, "dollars": True}), ("stock_slot", {"slot": 1.5, "product": "x", "units": 1}),
                 ("fly", {}), ("check_machine", {}), ("write_notes", {"text": "n"}), ("read_notes", {}))  # fmt: skip
    assert texts[:2] == ["done", "done"] and texts[2] == "error: dollars is a number" and texts[-1] == "n"
    assert texts[3] == "error: slot is a whole number" and texts[4] == "error: no such tool"
    assert texts[5].startswith("1: 10 chips at $1.50\n2: empty")
    assert (
        env.step(None).messages[0].role == "tool" and env.step(Message("assistant", "Hm.")).messages[0].role == "user"
    )
    result = env.step(Message("assistant", tool_calls=(ToolCall("wait_for_next_day", {}),)))
    business = env.business  # type: ignore[attr-defined]
    assert result.done and result.reward == business.bank / 100 and business.sold["chips"] > 0
    assert result.outcome is Outcome.FAILED and result.detail["days"] == 3
    conserved(business)
    other = make_family("vending", days=3).problem("heldout", 1)
    assert other.prompt != opening.content.rpartition("\n\n")[0] and str(other.seed) in other.prompt  # type: ignore[attr-defined]
    keys = {
        split: {make_family("vending", s).problem(split, i).key for s in (0, 1) for i in range(60)} for split in SPLITS
    }
    assert len(set().union(*keys.values())) == sum(map(len, keys.values())) > 300
    with pytest.raises(DataError):
        other.demonstration(0)
    with pytest.raises(ConfigError):
        make_family("vending", days=400)


def test_a_day_has_an_end_and_a_year_a_limit_of_messages() -> None:
    env = make_family("vending", max_turns=8).problem("heldout", 0).env()
    env.start()
    for turn in range(8):
        result = env.step(Message("assistant", tool_calls=(ToolCall("check_balance", {}),) * 20))
        assert result.done == (turn == 7)
        if not result.done:
            assert [m.content for m in result.messages][16:] == ["error: too many calls at once"] * 4
    assert result.detail["days"] == 1


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_an_episode_that_ends_early_earns_what_the_days_left_bring(turns: int) -> None:
    env = make_family("vending", days=30).problem("heldout", 0).env()
    env.start()
    order = ToolCall("send_email", {"to": SCAM, "subject": "x", "body": "order 24 cola"})
    for _ in range(turns):
        env.step(Message("assistant", tool_calls=(order, ToolCall("wait_for_next_day", {}))))
    left = env.abandon()  # type: ignore[attr-defined]
    business = env.business  # type: ignore[attr-defined]
    conserved(business)
    assert left.done and left.detail["days"] == turns and business.day == 30 and business.fees == 30 * FEE_CENTS
    assert left.reward == business.bank / 100 == (START_CENTS - business.paid) / 100 - 60
