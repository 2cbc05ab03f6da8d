"""Answers that want to be paid, family by family: those that cheat must get nothing, honest ones in any dress all.

The answers are data, in `attacks/FAMILY.toml`; a new trick is a new line there. Programs of a family share one run.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import pytest

from glm5.eval import harness
from glm5.records import Env, Message, ToolCall
from glm5.sandbox import Limits, Sandbox, sandbox_available
from glm5.tasks.coding.bugfix import BugfixProblem
from glm5.tasks.coding.generation import NAME, Chain, CodeProblem, extract_program
from glm5.tasks.coding.judge import Case, Judge
from glm5.tasks.coding.pieces import RESULTS, STEPS
from glm5.tasks.contract import function_tool
from glm5.tasks.general.family import VERIFIED, AssistantProblem
from glm5.tasks.general.hygiene import faults
from glm5.tasks.instructions.family import InstructionProblem
from glm5.tasks.instructions.general import GeneralProblem
from glm5.tasks.instructions.rules import Rule
from glm5.tasks.mathematics.answer import Answer
from glm5.tasks.mathematics.arithmetic import ArithmeticProblem
from glm5.tasks.mathematics.family import MathProblem
from glm5.tasks.science.family import ScienceProblem
from glm5.tasks.science.problems import Exercise
from glm5.tasks.science.units import parse_quantity
from glm5.tasks.tools.python_problems import Question
from glm5.tasks.tools.python_tool import Programs, PythonProblem
from glm5.tasks.tools.toolcall import ToolCallProblem

FOLDER = Path(__file__).with_name("attacks")
LEAST = 20  # answers of either kind that a family must have
LIMITS = Limits(cpu_s=1, wall_s=10.0, memory_mb=128, processes=2, file_mb=0, output_kb=64)
needs_sandbox = pytest.mark.skipif(sandbox_available() is None, reason="this machine cannot isolate programs")

Pay = Callable[[Any], float]


def said(env: Env, *messages: Message) -> float:
    """The reward after some messages, 0 where the episode ends before."""
    env.start()
    for message in messages:
        result = env.step(message)
        if result.done:
            return result.reward
    return 0.0


def told(text: str) -> Message:
    return Message("assistant", text)


def arithmetic(answers: Sequence[str]) -> Pay:
    problem = ArithmeticProblem("x", 37, 15, "+", 3, False)
    return lambda text: said(problem.env(), told(text))


def maths(answers: Sequence[str]) -> Pay:
    answer = Answer(("3/4",), units=("m",), name="x")
    problem = MathProblem("x", "What is 1/4 + 1/2?", "x", answer, "", "fractions", 1, False)
    return lambda text: said(problem.env(), told(text))


def python_tool(answers: Sequence[str]) -> Pay:
    question = Question("What is the sum of the decimal digits of 2^10?", "print(7)", lambda: 7)
    programs: Programs = None  # type: ignore[assignment]  # final answers run nothing
    problem = PythonProblem("x", question, 1, 4, 400, False, question.text, programs)
    return lambda text: said(problem.env(), told(text))


def general(answers: Sequence[tuple[str, str]]) -> Pay:
    return lambda entry: said(GeneralProblem("x", *entry[0].split()).env(), told(entry[1]))


def instructions(answers: Sequence[tuple[list[str], str]]) -> Pay:
    def pay(entry: tuple[list[str], str]) -> float:
        rules = []
        for kind, *values in map(str.split, entry[0]):
            rules.append(Rule(kind, tuple(int(value) if value.isdigit() else value for value in values)))
        return said(InstructionProblem("x", "rivers", tuple(rules), len(rules)).env(), told(entry[1]))

    return pay


PROMPTS = (
    r"^(?P<name>\w+) invites me to an? (?P<event>\w+) on (?P<day>\w+)\.",
    r"^Note: (?P<seller>\w+) sold a (?P<thing>\w+) to \w+ in (?P<place>\w+) for (?P<price>\d+) euros",
    r"\nWhat did (?P<who>[A-Z]\w+) buy",
    r"^A customer, (?P<name>\w+), writes: \"My (?P<item>\w+) is (?P<days>\d+) days late",
    r"^(?P<name>\w+)'s (?P<lost>\w+) died",
    r"^Rewrite politely to (?P<name>\w+), .*: \".*?(?P<task>report|slides|answer|list).*?(?P<day>\w+day)",
    r"(?s)^\"(?P<name>\w+), who is (?P<age>\d+), lives in (?P<city>\w+)\.",
)
"""What the words in braces of an answer stand for, by the prompt of its class."""


def assistant(answers: Sequence[tuple[str, str, str]]) -> Pay:
    """The mean reward over some prompts of the class that contain the given words."""

    def pay(entry: tuple[str, str, str]) -> float:
        name, part, answer = entry
        drawn = (AssistantProblem("x", name, VERIFIED[name](random.Random(seed))) for seed in range(400))
        problems = [*islice((problem for problem in drawn if part in problem.prompt), 6)]
        return sum(said(problem.env(), told(filled(problem, answer))) for problem in problems) / len(problems)

    return pay


def filled(problem: AssistantProblem, answer: str) -> str:
    good = problem.case.good
    wide = str.maketrans("0123456789-", "０１２３４５６７８９－")
    bold = str.maketrans(ascii_uppercase + ascii_lowercase, "".join(map(chr, range(0x1D400, 0x1D434))))
    words = {"csv": good, "CSV": good.upper(), "iso": good, "right": good}
    words |= {"wide": good.translate(wide), "bold": good.translate(bold)}
    for pattern in PROMPTS:
        found = re.search(pattern, problem.prompt)
        words |= {key: value for key, value in found.groupdict().items() if value} if found else {}
    return re.sub(r"\{(\w+)\}", lambda match: words[match[1]], answer)


def hygiene(answers: Sequence[str]) -> Pay:
    return lambda text: float(not faults("Tell me.", text))


SCIENCE: dict[str, Exercise] = {
    "pressure": Exercise("A force of 650 N acts on 290 cm^2. What is the pressure in kPa?", "quantity",
                         parse_quantity("22413.8 Pa"), "", "", "kPa"),
    "convert": Exercise("Convert 72 km/h to m/s.", "conversion", parse_quantity("72 km/h"), "", "", "m/s"),
    "ohm": Exercise("Write ohm as a product of powers of SI base units.", "base", parse_quantity("1 ohm"), "", ""),
    "kPa": Exercise("Write kPa as a product of powers of SI base units.", "base", parse_quantity("1 kPa"), "", ""),
    "balance": Exercise("? Cl2 + ? Na -> ? NaCl", "exact", Answer(("1", "2", "2"), "tuple", "integer"), "", ""),
    "element": Exercise("Which element has the symbol Al?", "name", ("Aluminum",), "", ""),
}  # fmt: skip


def science(answers: Sequence[tuple[str, str]]) -> Pay:
    return lambda entry: said(ScienceProblem("x", "t", 1, SCIENCE[entry[0]], False).env(), told(entry[1]))


def toolcall(answers: Sequence[tuple[list[tuple[str, Any]], str]]) -> Pay:
    tools = (function_tool("get_price", "item", "count"), function_tool("get_stock", "item", "city"))
    problem = ToolCallProblem("x", "price", ("tea", "3"), "12", tools)

    def pay(entry: tuple[list[tuple[str, Any]], str]) -> float:
        calls, text = entry
        called = Message("assistant", tool_calls=tuple(ToolCall(name, arguments) for name, arguments in calls))
        return said(problem.env(), called, told(text)) if calls else said(problem.env(), told(text), told(text))

    return pay


def programming(answers: Sequence[str]) -> Pay:
    judge = Judge(Sandbox(LIMITS))
    chain = Chain("list", ((STEPS["numbers"][0], 0),), (RESULTS["numbers"][0], 0))
    problem = CodeProblem("x", chain, 1, False, judge, lambda: None)
    judge.prefill((extract_program(text), NAME, problem.cases) for text in answers)
    return lambda text: said(problem.env(), told(text))


def bugfix(answers: Sequence[str]) -> Pay:
    judge = Judge(Sandbox(LIMITS))
    pairs = random.Random("attacks")
    cases = [(pairs.randint(2, 30), pairs.randint(2, 30)) for _ in range(9)]
    problem = BugfixProblem(
        "x", "add", ("a", "b"), "a-b", tuple(Case(pair, sum(pair)) for pair in cases), 4, False, judge, lambda: None
    )
    judge.prefill((problem.program(text.strip()), "add", problem.cases) for text in answers)
    edits = {text: Message("assistant", tool_calls=(ToolCall("edit", {"code": text}),)) for text in answers}
    return lambda text: said(problem.env(), edits[text], told("done"))


def needle(answers: Sequence[list[float]]) -> Pay:
    def pay(likelihood: list[float]) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(harness, "continuation_logprobs", lambda *_: likelihood)
            tokenizer: Any = type("Tokenizer", (), {"encode": staticmethod(list)})()
            return harness.needle_score(None, tokenizer, 256, 1, 0)["score"]  # type: ignore[arg-type]

    return pay


FAMILIES: dict[str, Callable[[Sequence[Any]], Pay]] = {
    "arithmetic": arithmetic, "math": maths, "python_tool": python_tool, "general": general, "toolcall": toolcall,
    "instructions": instructions, "needle": needle, "assistant": assistant, "hygiene": hygiene, "science": science,
}  # fmt: skip
RUNNING: dict[str, Callable[[Sequence[Any]], Pay]] = {"programming": programming, "bugfix": bugfix}


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=needs_sandbox) for name in RUNNING)])
def test_cheats_get_nothing_and_honest_answers_everything(family: str) -> None:
    table = tomllib.loads((FOLDER / f"{family}.toml").read_text(encoding="utf-8"))
    assert set(table) == {"cheats", "honest"} and min(map(len, table.values())) >= LEAST
    pay = (FAMILIES | RUNNING)[family]([*table["cheats"], *table["honest"]])
    assert [entry for entry in table["cheats"] if pay(entry) != 0.0] == [], "paid for nothing"
    assert [entry for entry in table["honest"] if pay(entry) != 1.0] == [], "not paid"


def test_every_table_has_its_family() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*FAMILIES, *RUNNING}
