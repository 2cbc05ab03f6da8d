"""Problem families: splits, demonstrations, strict grading, and that nothing but solving pays."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.data import recall
from glm5.errors import ConfigError, DataError, GradingError
from glm5.records import Message, Outcome, ToolCall
from glm5.sandbox import Limits, Sandbox, SandboxResult
from glm5.tasks import make_family, needle_text, rules_score, split_of
from glm5.tasks.coding.bugfix import MOST_CALLS, OPERATIONS, VISIBLE_TESTS, BugfixEnv, BugfixFamily
from glm5.tasks.coding.judge import Case, Judge, default_judge
from glm5.tasks.contract import SPLITS, DistinctProblems
from glm5.tasks.instructions.general import ACTS, FORMS, NAMES, GeneralFamily, GeneralProblem
from glm5.tasks.mathematics.arithmetic import ArithmeticFamily, ArithmeticProblem, parse_integer, working
from glm5.tasks.tools.toolcall import ToolCallFamily
from tests.tasks.own_problems import names_of_families, needs_sandbox

SHORT = ("arithmetic", "bugfix", "general", "toolcall")  # for models that know bytes and short rows only
NAMES_OF_ALL = names_of_families()


@pytest.mark.parametrize("name", NAMES_OF_ALL)
def test_splits_are_disjoint_for_all_seeds(name: str) -> None:
    families = [make_family(name, seed) for seed in range(3)]
    keys = {
        split: {family.problem(split, index).key for family in families for index in range(150)} for split in SPLITS
    }
    assert all(keys.values()) and len(set().union(*keys.values())) == sum(map(len, keys.values()))
    assert all(split_of(key) == split for split in keys for key in keys[split])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES_OF_ALL)
def test_equal_prompts_have_equal_keys(name: str) -> None:
    """So problems with different keys differ for the policy, and splits by key share no prompt."""
    family = make_family(name, 4)
    drawn = [family.problem(split, index) for split in SPLITS for index in range(100)]
    keys: dict[str, set[str]] = {}
    for problem in drawn:
        keys.setdefault(problem.prompt, set()).add(problem.key)
    assert all(len(found) == 1 for found in keys.values())


@pytest.mark.parametrize(("name", "least"), [("toolcall", 200), ("general", 96), ("arithmetic", 500)])
def test_families_have_as_many_problems_as_recipes_ask_for(name: str, least: int) -> None:
    family = make_family(name)
    indices = DistinctProblems(family, "heldout").indices(least)
    assert len({family.problem("heldout", index).prompt for index in indices}) == least


@given(st.integers(1, 40), st.integers(0, 10**6), st.lists(st.integers(0, 120), max_size=8))
def test_distinct_problems_are_all_there_are_in_order(size: int, first: int, places: list[int]) -> None:
    """Against a plain walk over the indices; problem i has content i^2 mod `size`, so many repeat."""

    class Squares:
        name = domain = "squares"

        def problem(self, split: str, index: int) -> ArithmeticProblem:
            return ArithmeticProblem(f"{index}", index * index % size, 0, "+", 1, False)

    walk: dict[int, int] = {}
    for index in range(first, first + 2 * size):
        walk.setdefault(index * index % size, index)
    wanted = list(walk.values())
    problems = DistinctProblems(Squares(), "rl", first)
    for place in places:  # in any order
        assert problems.index(place) == wanted[place % len(wanted)]
    assert problems.indices(1000) == wanted and problems.count(1000) == len(wanted)
    if len(wanted) > 1:
        assert problems.index(len(wanted), again=1) == wanted[1]
    with pytest.raises(DataError, match=f"only {len(wanted)} distinct rl problems"):
        problems.index(len(wanted), again=len(wanted))


@pytest.mark.parametrize("name", NAMES_OF_ALL)
def test_problems_repeat_and_differ(name: str) -> None:
    first, again = (make_family(name, 5).problem("train", 3) for _ in range(2))
    assert first == again and first.demonstration(1) == again.demonstration(1)
    family = make_family(name, 5)
    assert len({family.problem("train", index).key for index in range(30)}) > 10
    assert make_family(name, 6).problem("train", 3).id != first.id


@pytest.mark.parametrize("name", [name for name in NAMES_OF_ALL if name.values != ("slides",)])  # needs a browser
def test_demonstrations_solve_their_problems_and_are_short_where_they_must_be(name: str) -> None:
    family = make_family(name, 1)
    for index in range(8 if name in ("bugfix", "code", "python_tool") else 40):  # a sandbox for each answer
        problem = family.problem("heldout" if index % 2 else "train", index)
        conversation = problem.demonstration(index)
        env = problem.env()
        opening, tools, thinking = env.start()
        assert list(opening) == conversation[: len(opening)]
        assert list(tools) == list(problem.tools) and thinking == problem.thinking
        assert name not in SHORT or len(problem.prompt.encode()) <= 40
        expected = list(conversation[len(opening) :])
        while expected:
            message = expected.pop(0)
            assert message.role == "assistant"
            assert name not in SHORT or len(message.content.encode()) <= 45
            assert (message.reasoning is not None) <= thinking
            result = env.step(message)
            assert list(result.messages) == expected[: len(result.messages)]
            del expected[: len(result.messages)]
        assert result.done and result.reward == 1.0 and result.outcome is Outcome.SOLVED


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match='did you mean "arithmetic"'):
        make_family("arithmetics")
    with pytest.raises(ConfigError, match="colour"):
        make_family("general", colour=1)
    with pytest.raises(ConfigError, match="levels"):
        ArithmeticFamily(levels=(4,))
    with pytest.raises(ConfigError, match="split"):
        ArithmeticFamily().problem("test", 0)


# --- arithmetic


@settings(deadline=None, max_examples=4 * settings.default.max_examples)
@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from("+-"))
def test_working_is_true_and_spells_the_answer(a: int, b: int, sign: str) -> None:
    if sign == "-":
        a, b = max(a, b), min(a, b)
    digits = []
    for step in working(a, b, sign).split(","):
        left, _, right = step.partition("=")
        terms = [int(term) for term in left.split(sign)]
        assert all(0 <= term < 20 for term in terms)
        value = sum(terms) if sign == "+" else terms[0] - sum(terms[1:])
        assert right in ("", str(value))
        digits.append(value % 10)
    spelled = int("".join(map(str, reversed(digits))))
    assert spelled == (a + b if sign == "+" else a - b)


def test_working_examples() -> None:
    assert working(37, 15, "+") == "7+5=12,1+3+1=5"
    assert working(42, 17, "-") == "12-7=5,4-1-1=2"
    assert working(7, 5, "+") == "7+5=12,1"
    assert working(32, 5, "+") == "2+5=7,3"


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), (" 12\n", 12), ("-3", -3), ("0", 0), ("", None), ("012", None), ("1 2", None), ("+5", None),
     ("12.", None), ("1_2", None), ("５", None), ("-0", 0), ("2*6", None), ("9" * 30, None), ("12\t", None)],
)  # fmt: skip
def test_integers_are_read_strictly(text: str, value: int | None) -> None:
    assert parse_integer(text) == value


def test_arithmetic_levels_modes_and_grading() -> None:
    for level, widths in ((1, (1, 1)), (2, (2, 1)), (3, (2, 2))):
        problems = [ArithmeticFamily(levels=(level,)).problem("train", index) for index in range(30)]
        assert all((len(str(p.a)), len(str(p.b))) == widths and p.level == level and p.answer >= 0 for p in problems)
    assert {ArithmeticFamily(thinking=None).problem("train", i).thinking for i in range(20)} == {True, False}
    assert ArithmeticFamily(thinking=False).problem("train", 0).demonstration(0)[1].reasoning is None
    problem = ArithmeticProblem("x", 3, 4, "+", 1, False)
    assert problem.key == ArithmeticProblem("y", 4, 3, "+", 1, True).key
    assert problem.grade(Message("assistant", "7")) == 1.0
    assert problem.grade(Message("assistant", "8")) == problem.grade(Message("assistant", "it is 7")) == 0.0
    assert problem.grade(Message("assistant", "7", tool_calls=(ToolCall("run", {}),))) == 0.0


# --- general


def test_every_phrase_of_every_act_keeps_the_rules() -> None:
    for act in ACTS:
        for form in FORMS:
            for name in NAMES[::6]:
                problem = GeneralProblem("x", act, name, form)
                for seed in range(8):
                    for warm in (True, False):
                        text = problem.answer(random.Random(seed), warm)
                        assert rules_score(problem, text) == 1.0, (problem.prompt, text)


@pytest.mark.parametrize(
    ("prompt", "text", "score"),
    [(("greet", "Ann", "plain"), "hi Ann", 1), (("greet", "Ann", "plain"), "hi Bob", 0),
     (("greet", "Ann", "plain"), "hi Ann and Bob", 0), (("greet", "Ann", "plain"), "hi Anna", 0),
     (("greet", "Ann", "plain"), "Ann", 0), (("greet", "Ann", "plain"), "this Ann", 0),
     (("greet", "Ann", "plain"), "hi Ann Ann", 0), (("greet", "Ann", "plain"), "", 0),
     (("greet", "Ann", "plain"), "hi Ann" + "!" * 60, 0), (("greet", "Ann", "plain"), "hi\nAnn", 0),
     (("greet", "Ann", "twice"), "hi Ann Ann", 1), (("greet", "Ann", "twice"), "hi Ann", 0),
     (("greet", "Ann", "loud"), "HI ANN!", 1), (("greet", "Ann", "loud"), "hi Ann!", 0),
     (("greet", "Ann", "loud"), "HI ANN", 0), (("bye", "Ann", "plain"), "hi Ann", 0),
     (("bye", "Ann", "plain"), "Ann, bye", 1), (("greet", "Ann", "plain"), "Hello Ann, good bye.", 0),
     (("praise", "Ann", "plain"), "Not good at all, Ann, you are a fool.", 0),
     (("greet", "Ann", "plain"), "hi Ann go away you dirty old rat.", 0)],
)  # fmt: skip
def test_rules(prompt: tuple[str, str, str], text: str, score: float) -> None:
    assert rules_score(GeneralProblem("x", *prompt), text) == score


def test_preference_pairs_differ_in_manner_only() -> None:
    family, verdicts = GeneralFamily(), []
    for index in range(200):
        prompt, better, worse = family.preference_pair(index)
        problem = family.problem("train", index)
        assert prompt == problem.prompt and better != worse
        assert rules_score(problem, better) == rules_score(problem, worse)
        verdicts.append(rules_score(problem, better))
        act = ACTS[problem.act]
        assert any(tail in better.lower() for tail in act.warm) and any(tail in worse.lower() for tail in act.cold)
    assert 0.6 < sum(verdicts) / 200 < 0.9
    assert family.preference_pair(3, "heldout")[0] != family.preference_pair(3)[0]


def test_held_out_pairs_have_endings_of_their_own() -> None:
    """Of warm[i] and cold[i]'s shapes too. A bag of words, which is always right in training, is lost there."""
    family, kept, held = GeneralFamily(), set[str](), set[str]()
    for act in ACTS.values():
        kept |= {*act.warm, *act.cold}
        for pair in act.held_out:
            assert len(pair[0]) == len(pair[1]) and pair[0].count(" ") == pair[1].count(" ")
            held |= set(pair)
    assert not held & kept
    pairs = {split: [family.preference_pair(i, split) for i in range(600)] for split in ("train", "heldout")}
    odds: Counter[str] = Counter()
    for _, better, worse in pairs["train"]:
        odds.update(set(re.findall("[a-z]+", better.lower())))
        odds.subtract(set(re.findall("[a-z]+", worse.lower())))
    right = {}
    for split, endings in (("train", kept), ("heldout", held)):
        texts = [text.lower() for _, *both in pairs[split] for text in both]
        assert all(any(ending in text for ending in endings) for text in texts)
        scores = [sum(odds[word] for word in set(re.findall("[a-z]+", text))) for text in texts]
        right[split] = sum(a > b for a, b in zip(scores[0::2], scores[1::2])) / 600
    assert right["train"] > 0.95 and right["heldout"] < 0.75


def surface(text: str) -> list[float]:
    """What can be seen of a text without knowing a word of it."""
    words = text.replace(",", " ").split()
    marks = [text.count(mark) for mark in ",.!?"]
    opening = [text.lower().startswith(start) for act in ACTS.values() for start in map(str.lower, act.openings)]
    ends = [text.endswith(mark) for mark in ".!"]
    capitals = sum(letter.isupper() for letter in text)
    longest = max(map(len, words))
    numbers = [
        len(text),
        len(words),
        longest,
        *marks,
        capitals,
        text[:1].isupper(),
        *opening,
        *ends,
        len(text) ** 2 / 40,
    ]
    return [float(number) for number in numbers]


def test_the_surface_does_not_tell_better_from_worse() -> None:
    """Warm and cold tails have the same shapes, act by act, so no classifier of the surface can beat chance; and one
    that is trained on 2,000 pairs does not."""
    for act in ACTS.values():
        shapes = [sorted((len(tail), tail.count(" ")) for tail in tails) for tails in (act.warm, act.cold)]
        assert shapes[0] == shapes[1] and len(set(act.warm) & set(act.cold)) == 0
        assert all(tail.islower() and tail.replace(" ", "").isalpha() for tail in (*act.warm, *act.cold))
    family, rows = GeneralFamily(seed=3), {}
    for split in ("train", "heldout"):
        pairs = [family.preference_pair(index, split) for index in range(2000)]
        rows[split] = torch.tensor([surface(better) for _, better, _ in pairs], dtype=torch.float64)
        rows[split] -= torch.tensor([surface(worse) for _, _, worse in pairs], dtype=torch.float64)
        assert 0.45 < ((rows[split][:, 0] > 0).double() + (rows[split][:, 0] == 0) / 2).mean() < 0.55, "length decides"
    scale = rows["train"].std(dim=0).clamp_min(1e-9)
    weight = torch.zeros(rows["train"].shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = -torch.nn.functional.logsigmoid(rows["train"] / scale @ weight).mean() + 1e-3 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    margin = (rows["heldout"] / scale @ weight).detach()
    assert ((margin > 1e-9).double() + (margin.abs() <= 1e-9) / 2).mean() <= 0.55


# --- toolcall


def test_only_the_exact_call_and_the_told_result_pay() -> None:
    problem = ToolCallFamily().problem("train", 0)
    right = Message("assistant", tool_calls=(problem.call,))
    wrong_calls = [
        (ToolCall(problem.call.name, {}),),
        (ToolCall("other", problem.call.arguments),),
        (ToolCall(problem.call.name, {**problem.call.arguments, "more": "x"}),),
        (problem.call, problem.call),
        (),
    ]
    for calls in wrong_calls:
        env = problem.env()
        env.start()
        result = env.step(Message("assistant", problem.result, tool_calls=calls))
        assert result.done and result.reward == 0.0
    for answer, reward in ((problem.result, 1.0), (problem.result + ".", 1.0), ("no", 0.0), ("", 0.0)):
        env = problem.env()
        env.start()
        assert env.step(right).messages == (Message("tool", problem.result),)
        assert env.step(Message("assistant", answer)).reward == reward
    assert problem.env().step(None).outcome is Outcome.MALFORMED


# --- bugfix


def edit(code: object) -> Message:
    return Message("assistant", tool_calls=(ToolCall("edit", {"code": code}),))


RUN = Message("assistant", tool_calls=(ToolCall("run", {}),))
DONE = Message("assistant", "done")


@needs_sandbox
def test_every_listed_bug_shows_and_no_wrong_repair_passes() -> None:
    family = BugfixFamily()
    seen = set()
    for index in range(150):
        problem = family.problem("train", index)
        if problem.function in seen:
            continue
        seen.add(problem.function)
        grades = family.judge.grade(problem.program(problem.right), problem.function, problem.cases)
        assert grades == [None] * len(problem.cases)
        for template in OPERATIONS[problem.function].wrong:
            program = problem.program(template.format(*problem.letters))
            grades = family.judge.grade(program, problem.function, problem.cases)
            assert any(grades[:VISIBLE_TESTS]) and any(grades[VISIBLE_TESTS:]), program
    assert len(seen) >= 15


@needs_sandbox
def test_bugfix_tools_tell_the_truth() -> None:
    problem = next(p for p in (BugfixFamily().problem("train", i) for i in range(99)) if p.function == "add")
    env = problem.env()
    env.start()
    failing = env.step(RUN).messages[0].content
    assert failing.startswith("fail add(") and " want " in failing
    a, b = problem.letters
    assert env.step(edit(f"{a}+{b}")).messages[0].content == "ok"
    result = env.step(DONE)
    assert (result.done, result.reward, result.outcome) == (True, 1.0, Outcome.SOLVED)


@needs_sandbox
def test_unsolved_endings_pay_nothing() -> None:
    problem = BugfixFamily(max_turns=2).problem("train", 0)
    env = problem.env()
    env.start()
    assert (env.step(DONE).reward, env.step(DONE).outcome) == (0.0, Outcome.FAILED)
    env = problem.env()
    assert not env.step(RUN).done
    assert env.step(RUN).outcome is Outcome.TRUNCATED
    env = problem.env()
    assert not env.step(RUN).done
    last = env.step(edit(problem.right))  # right on the last turn counts although nothing was said
    assert (last.done, last.reward) == (True, 1.0)


@needs_sandbox
@pytest.mark.parametrize(
    "bad",
    [None, Message("assistant", tool_calls=(ToolCall("rm", {}),)), edit(3), edit(""), edit("a\nb"), edit("a" * 99),
     Message("assistant", tool_calls=(ToolCall("edit", {}),)),
     Message("assistant", tool_calls=(ToolCall("run", {"x": "1"}),))],
)  # fmt: skip
def test_second_malformed_call_ends_the_episode(bad: Message | None) -> None:
    env = BugfixFamily().problem("train", 0).env()
    env.start()
    first = env.step(bad)
    assert not first.done and first.messages[0].content.startswith("error: ")
    second = env.step(bad)
    assert (second.done, second.reward, second.outcome) == (True, 0.0, Outcome.MALFORMED)


@needs_sandbox
@pytest.mark.parametrize(
    "cheat",
    ["__import__('os')._exit(0)", "print('[[\"value\",1]]')", "exit()", "1//0", "(", "[].sort",
     pytest.param("10**9**9", marks=pytest.mark.slow),  # a second of CPU time
     "open('cases.json').read()", "type('E',(),{'__eq__':lambda*a:1})()"],
)  # fmt: skip
def test_cheating_code_fails_politely(cheat: str) -> None:
    problem = BugfixFamily().problem("train", 1)
    env = problem.env()
    env.start()
    observation = env.step(edit(cheat)).messages[0].content
    assert observation.startswith("fail ") and len(observation) < 90
    result = env.step(DONE)
    assert (result.reward, result.outcome) == (0.0, Outcome.FAILED)


@needs_sandbox
@pytest.mark.parametrize("first", [edit("__import__('time').sleep(9)"), RUN], ids=["hangs", "answers"])
def test_one_message_cannot_hold_the_judge(first: Message) -> None:
    judge = Judge(Sandbox(Limits(cpu_s=1, wall_s=0.6, memory_mb=128, processes=2, file_mb=0)))
    problem = BugfixFamily(judge=judge, max_turns=3).problem("train", 0)
    env = problem.env()
    env.start()
    before = judge.runs
    other = edit("__import__('time').sleep(8)")
    flood = Message("assistant", tool_calls=(*first.tool_calls, *other.tool_calls, *RUN.tool_calls * 100))
    texts = [message.content for message in env.step(flood).messages]
    hangs = texts.index(next(text for text in texts if text.endswith(": timeout")))
    assert judge.runs - before <= 1  # the broken program has been evaluated with the block of problems
    assert set(texts[hangs + 1 : MOST_CALLS]) == {"error: no time left"}
    assert set(texts[MOST_CALLS:]) == {"error: too many calls at once"}
    env.step(RUN)
    assert env.step(DONE).reward == 0.0 and judge.runs - before <= 1  # what hung is not tried again


@needs_sandbox
def test_values_are_remembered_per_program_and_cases() -> None:
    judge = Judge(default_judge()._sandbox)
    problem = BugfixFamily(judge=judge).problem("train", 0)
    for _ in range(3):
        judge.grade(problem.prompt, problem.function, problem.cases)
    assert judge.runs == 1
    judge.grade(problem.prompt, problem.function, problem.cases[:1])
    assert judge.runs == 2


@needs_sandbox
def test_demonstrations_share_a_run_and_have_the_values_of_children() -> None:
    judge = Judge(default_judge()._sandbox)
    family = BugfixFamily(seed=8, judge=judge)
    for index in range(32):
        family.problem("train", index).demonstration(index)
    assert judge.runs == 1
    problems = [family.problem("train", index) for index in range(32)]
    jobs = [(program, p.function, p.cases) for p in problems for program in p.programs]
    odd = [
        "def f(x): return [x] * 3000",
        "def f(x): return {1, 2}",
        "def f(x): raise KeyError(x)",
        "def f(x): return x / 0",
        "def g(x): return x",
        "def f(x) return x",
    ]
    jobs += [(program, "f", (Case((2,), 2), Case((5,), 5))) for program in odd]
    judge.prefill_own(jobs)
    alone = Judge(default_judge()._sandbox)
    alone.prefill(jobs)
    for job in jobs:
        assert judge.values(*job) == alone.values(*job), job[0]
    assert (judge.runs, alone.runs) == (2, 1)
    judge.prefill_own([("def f(x):\n    while x: pass", "f", [Case((1,), 1)])])
    assert judge.values(*jobs[0]) == alone.values(*jobs[0])


class BrokenSandbox:
    def run_python(self, *_: object) -> SandboxResult:
        raise GradingError("the sandbox broke")


def test_sandbox_failure_is_no_verdict() -> None:
    judge = Judge(BrokenSandbox())  # type: ignore[arg-type]
    problem = BugfixFamily(judge=judge).problem("train", 0)
    with pytest.raises(GradingError, match="broke"):
        BugfixEnv(problem).step(RUN)


# --- needle


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 999), st.integers(32, 3000), st.floats(0, 1))
def test_needle_documents(index: int, size: int, depth: float) -> None:
    prompt, answer = needle_text(1, index, size, depth)
    assert size - 24 < len(prompt.encode()) <= size
    *lines, query = prompt.split("\n")
    assignments = dict(line.split(" = ") for line in lines)
    assert len(assignments) == len(lines) and query.endswith(" = ")
    name = query.removesuffix(" = ")
    assert assignments[name] == answer.removesuffix("\n")
    assert {len(value) for value in assignments.values()} == {3}, "a value is likelier for being short"
    assert abs([*assignments].index(name) - depth * (len(lines) - 1)) <= 0.5
    assert recall.split_of(f"needle {name}={assignments[name]}") == "train"
    assert needle_text(1, index, size, depth) == (prompt, answer)


def test_needle_options_are_checked() -> None:
    for size, depth, split in ((10, 0.5, "train"), (100, 1.5, "train"), (100, 0.5, "x")):
        with pytest.raises(ConfigError, match="needle"):
            needle_text(0, 0, size, depth, split=split)
    assert needle_text(0, 0, 100, 0.0, split="heldout")[0] != needle_text(0, 0, 100, 0.0)[0]
