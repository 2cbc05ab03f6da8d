"""The family "vending": an agent runs a vending machine for a simulated year; its reward is the balance in dollars.

An own simulation, deterministic for a seed and actions: its balances can be compared with each other, not with those of
Vending-Bench 2, whose simulation is not published.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm5.errors import ConfigError, DataError
from glm5.records import Env, Message, Outcome, StepResult, ToolCall
from glm5.tasks.contract import Family, ToolSpec, draw
from glm5.tasks.vending.business import (
    FEE_CENTS,
    LARGE_SLOTS,
    SLOT_UNITS,
    SMALL_SLOTS,
    START_CENTS,
    UNPAID_DAYS,
    Business,
    Refused,
)
from glm5.tasks.vending.market import DAYS
from glm5.tasks.vending.suppliers import directory

PROMPT = f"""You run a vending machine in town number {{town}} for {{days}} days. What counts is the balance of your
bank account at the end.

You begin with ${START_CENTS / 100:.0f}. Each day costs ${FEE_CENTS / 100:.2f}; if it cannot be paid {UNPAID_DAYS} days
in a row, the business ends. The machine has {SMALL_SLOTS + LARGE_SLOTS} slots of {SLOT_UNITS} units; slots 1 to
{SMALL_SLOTS} are for small products only. Find suppliers, order from them by e-mail, bring what they deliver from
storage into slots, and set prices: a slot without a price sells nothing. Customers pay by card to your account, or in
cash that you collect from the machine. Sales depend on prices, choice, weekday, season and weather. Suppliers differ,
and not all keep their word. Your memory of this conversation may be cut: keep notes.
Use the tools; wait_for_next_day ends the day."""
GO_ON = "Go on with your tools; wait_for_next_day ends the day."
MOST_CALLS = 16
CALLS_A_DAY = 100
MOST_NOTES = 8000


def _tool(name: str, about: str, **parameters: str) -> ToolSpec:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS: dict[str, ToolSpec] = {
    name: _tool(name, about, **parameters)
    for name, about, parameters in (
        ("search", "Search the network for suppliers.", {"query": "string"}),
        ("send_email", "Send an e-mail; answers come overnight.",
         {"to": "string", "subject": "string", "body": "string"}),
        ("read_inbox", "Read the e-mails that you have not read.", {}),
        ("check_balance", "The bank account, the cash in the machine, and the day.", {}),
        ("check_storage", "What is in storage.", {}),
        ("check_machine", "What is in the slots, and their prices.", {}),
        ("stock_slot", "Bring units from storage into a slot.",
         {"slot": "integer", "product": "string", "units": "integer"}),
        ("empty_slot", "Bring what is in a slot back to storage.", {"slot": "integer"}),
        ("set_price", "Set a slot's price in dollars.", {"slot": "integer", "dollars": "number"}),
        ("collect_cash", "Bring the machine's cash to the bank.", {}),
        ("write_notes", "Replace your notes.", {"text": "string"}),
        ("read_notes", "Read your notes.", {}),
        ("wait_for_next_day", "End the day.", {}),
    )
}  # fmt: skip


@dataclass(frozen=True)
class VendingProblem:
    """One year."""

    id: str
    seed: int
    days: int
    max_turns: int
    thinking: bool
    domain: str = "vending"
    tools: Sequence[ToolSpec] = tuple(TOOLS.values())

    @property
    def key(self) -> str:
        return f"vending {self.seed}"

    @property
    def prompt(self) -> str:
        return PROMPT.format(days=self.days, town=self.seed)

    def env(self) -> Env:
        return VendingEnv(self)

    def demonstration(self, rng_seed: int) -> list[Message]:
        """Raises DataError: nobody knows the best year."""
        raise DataError(f"{self.id} has no demonstration.")


class VendingEnv:
    """One year. The agent's part ends with the last day, after `max_turns` messages, or when the fee was not paid for
    too long. Days that are left pass without it, so the reward is always the balance at the end of the year."""

    def __init__(self, problem: VendingProblem) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._source, self.business = problem, Business(problem.seed, problem.days)
        self._turns = self._calls = self._today = 0
        self._notes = ""

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        opening = f"{self._source.prompt}\n\n{self.business.today()}"
        return (Message("user", opening),), self._source.tools, self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        self._turns += 1
        calls = message.tool_calls if message is not None else ()
        texts = [self._call(number, call) for number, call in enumerate(calls)]
        if self.business.over or self._turns >= self._source.max_turns:
            return self._end()
        if message is not None and not calls:
            return StepResult(messages=(Message("user", GO_ON),))
        return StepResult(messages=tuple(Message("tool", text) for text in texts or ["error: these are no calls"]))

    def abandon(self) -> StepResult:
        """The end of an episode that cannot go on."""
        return self._end()

    def _end(self) -> StepResult:
        business = self.business
        played = business.day
        while not business.over:
            business.end_day()
        outcome = Outcome.SOLVED if business.bank > START_CENTS else Outcome.FAILED
        detail = {
            "days": played,
            "calls": self._calls,
            "sales": business.sales / 100,
            "cash": business.cash / 100,
        }
        return StepResult(done=True, reward=business.bank / 100, outcome=outcome, detail=detail)

    def _call(self, number: int, call: ToolCall) -> str:
        if number >= MOST_CALLS:
            return "error: too many calls at once"
        if (wrong := _misuse(call)) is not None:
            return f"error: {wrong}"
        self._calls, self._today = self._calls + 1, self._today + 1
        if call.name == "wait_for_next_day" or self._today > CALLS_A_DAY:
            if self.business.over:
                return "error: the business has ended"
            self._today = 0
            return self.business.end_day()
        try:
            return self._done(call.name, call.arguments)
        except Refused as error:
            return f"error: {error}"

    def _done(self, name: str, given: Mapping[str, Any]) -> str:
        business = self.business
        match name:
            case "search":
                return directory(given["query"])
            case "send_email":
                business.send(given["to"].strip().lower(), given["subject"], given["body"])
            case "read_inbox":
                new = [mail for mail in business.inbox if not mail.read]
                for mail in new:
                    mail.read = True
                return "\n\n".join(f"From {m.sender}: {m.subject}\n{m.body}" for m in new) or "no new e-mails"
            case "check_balance":
                money = f"bank ${business.bank / 100:.2f}, cash in the machine ${business.cash / 100:.2f}"
                return f"{money}. {business.today()}"
            case "check_storage":
                return ", ".join(f"{n} {name}" for name, n in sorted(business.storage.items()) if n) or "empty"
            case "check_machine":
                return "\n".join(
                    f"{i}: {slot.units} {slot.product} at ${slot.price / 100:.2f}" if slot.product else f"{i}: empty"
                    for i, slot in enumerate(business.slots, 1)
                )
            case "stock_slot":
                business.stock(int(given["slot"]), given["product"].strip().lower(), int(given["units"]))
            case "empty_slot":
                business.empty(int(given["slot"]))
            case "set_price":
                business.set_price(int(given["slot"]), round(100 * given["dollars"]))
            case "collect_cash":
                return f"collected ${business.collect() / 100:.2f}"
            case "write_notes":
                self._notes = given["text"][:MOST_NOTES]
            case "read_notes":
                return self._notes or "no notes"
        return "done"


def _misuse(call: ToolCall) -> str | None:
    """What is wrong with the form of a call, or None."""
    spec = TOOLS.get(call.name)
    if spec is None:
        return "no such tool"
    properties = spec["function"]["parameters"]["properties"]
    if set(call.arguments) != set(properties):
        return f"{call.name} takes {', '.join(properties) or 'no arguments'}"
    for key, value in call.arguments.items():
        kind = properties[key]["type"]
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6
        if kind == "string" and not isinstance(value, str):
            return f"{key} is a text"
        if kind != "string" and not (number and (kind == "number" or value == int(value))):
            return f"{key} is a {'whole ' if kind == 'integer' else ''}number"
    return None


class VendingFamily(Family):
    """Years of `days` days, by seed and index; an agent has at most `max_turns` messages in one. Raises ConfigError for
    options out of bounds."""

    name = domain = "vending"

    def __init__(self, seed: int = 0, *, days: int = DAYS, max_turns: int = 2000, thinking: bool = True) -> None:
        if not all(type(value) is int and value >= 1 for value in (days, max_turns)) or days > DAYS:
            raise ConfigError(f"vending: days is 1 to {DAYS}, max_turns at least 1.")
        self._seed, self._days, self._max_turns, self._thinking = seed, days, max_turns, bool(thinking)

    def problem(self, split: str, index: int) -> VendingProblem:
        return draw(self._make, self.name, self._seed, split, index)

    def _make(self, rng: random.Random, name: str) -> VendingProblem:
        return VendingProblem(name, rng.randrange(10**6), self._days, self._max_turns, self._thinking)
