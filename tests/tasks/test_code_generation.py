"""Write-a-function tasks: the model solutions against the callables, and that only right programs are paid."""

from __future__ import annotations

import pytest

from glm5.errors import ConfigError, GradingError
from glm5.records import Message, ToolCall
from glm5.sandbox import sandbox_available
from glm5.tasks.coding.generation import (
    LEVELS,
    MOST_WANTED,
    NAME,
    Chain,
    CodeFamily,
    CodeProblem,
    extract_program,
    hidden_cases,
    worthwhile,
)
from glm5.tasks.coding.judge import Judge, default_judge
from glm5.tasks.coding.pieces import RESULTS, SOURCES, STEPS

needs_sandbox = pytest.mark.skipif(sandbox_available() is None, reason="this machine cannot isolate programs")


class NoSandbox:
    """A judge for tests that run nothing."""

    def run_python(self, *_: object) -> object:
        raise GradingError("the sandbox broke")


DRY = Judge(NoSandbox())  # type: ignore[arg-type]


def fenced(program: str) -> Message:
    return Message("assistant", f"Here it is:\n```python\n{program}\n```\nDone.")


def every_piece() -> list[Chain]:
    """Each step and each result in a chain of its own, with the first and the last of its numbers."""
    chains = []
    for kind, source in (("numbers", "list"), ("texts", "words")):
        whole = next(piece for piece in RESULTS["any"] if piece.code == "out")
        for piece in (*STEPS[kind], *STEPS["any"]):
            chains += [Chain(source, ((piece, k),), (whole, 0)) for k in {piece.numbers[0], piece.numbers[-1]}]
        for piece in (*RESULTS[kind], *RESULTS["any"]):
            chains += [Chain(source, (), (piece, k)) for k in {piece.numbers[0], piece.numbers[-1]}]
    whole = RESULTS["any"][0]
    return [*chains, *(Chain(source, (), (whole, 0)) for source in SOURCES)]


@needs_sandbox
def test_the_python_of_every_piece_gives_the_callables_values() -> None:
    judge, chains = default_judge(), every_piece()
    jobs = [(chain.program, NAME, hidden_cases(chain, str(i))) for i, chain in enumerate(chains)]
    judge.prefill(jobs)
    for program, name, cases in jobs:
        assert judge.grade(program, name, cases) == [None] * len(cases), program


@needs_sandbox
def test_references_earn_one_and_mistakes_nothing_at_every_level() -> None:
    judge = default_judge()
    problems = [
        CodeFamily(seed=3, levels=(level,), judge=judge).problem("train", i) for level in LEVELS for i in range(8)
    ]
    judge.prefill((p.chain.program, NAME, p.cases) for p in problems)
    lacking = [(p, chain) for p in problems for chain in p.chain.omissions()]
    judge.prefill((chain.program, NAME, p.cases) for p, chain in lacking)
    assert len(lacking) > 40
    for problem in problems:
        assert problem.grade(problem.demonstration(1)[-1]) == 1.0, problem.chain.program
    for problem, chain in lacking:
        assert problem.grade(fenced(chain.program)) == 0.0, (problem.prompt, chain.program)
    other = {p.chain.source: p for p in problems}
    for problem in problems[::12]:
        for rival in other.values():
            if rival.chain != problem.chain:
                assert problem.grade(fenced(rival.chain.program)) == 0.0


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    ["", "solve = 3", "def solve(*a): pass", "def solve(*a): return 0", "def solve(*a): return []",
    "def other(x): return x",
     pytest.param("def solve(x):\n    while True: pass", marks=pytest.mark.slow),  # test_attacks_graders.py has it too
     "def solve(x: return", "import os\ndef solve(x): os._exit(0)",
     "print('[[\"value\", 0]]')\ndef solve(x): raise SystemExit",
     "def solve(*a): return type('E', (), {'__eq__': lambda *b: True})()",
     "def solve(x): return x" + "#" * 5000, "def solve(x): return '\ud800'"],
)  # fmt: skip
def test_bad_programs_earn_nothing(program: str) -> None:
    problem = CodeFamily(seed=1, levels=(2,), sources=("list",)).problem("train", 0)
    assert problem.grade(fenced(program)) == 0.0
    assert problem.grade(Message("assistant", program)) == 0.0


@needs_sandbox
def test_answers_with_tool_calls_earn_nothing_and_bare_programs_do() -> None:
    problem = CodeFamily(seed=1).problem("heldout", 0)
    assert problem.grade(Message("assistant", problem.chain.program)) == 1.0
    assert problem.grade(Message("assistant", problem.chain.program, tool_calls=(ToolCall("run", {}),))) == 0.0


@needs_sandbox
def test_references_share_a_run_and_have_the_values_of_children() -> None:
    judge, alone = Judge(default_judge()._sandbox), Judge(default_judge()._sandbox)
    family = CodeFamily(seed=8, judge=judge)
    for index in range(32):
        problem = family.problem("train", index)
        env = problem.env()
        env.start()
        assert env.step(problem.demonstration(index)[-1]).reward == 1.0
    problems = [family.problem("train", index) for index in range(32)]
    jobs = [(problem.chain.program, NAME, problem.cases) for problem in problems]
    alone.prefill(jobs)
    assert [judge.values(*job) for job in jobs] == [alone.values(*job) for job in jobs]
    assert (judge.runs, alone.runs) == (1, 1)


def test_sandbox_failure_is_no_verdict() -> None:
    problem = CodeFamily(judge=DRY).problem("train", 0)
    with pytest.raises(GradingError, match="broke"):
        problem.grade(fenced("def solve(x): return x"))


@pytest.mark.parametrize("count", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_train_and_heldout_prompts_do_not_overlap(count: int) -> None:
    family = CodeFamily(judge=DRY)
    prompts = {split: {family.problem(split, index).prompt for index in range(count)} for split in ("train", "heldout")}
    assert min(map(len, prompts.values())) > count // 4 and not prompts["train"] & prompts["heldout"]


def test_hidden_tests_are_fixed_small_and_begin_with_the_empty_argument() -> None:
    for index in range(200):
        problem = CodeFamily(judge=DRY).problem("train", index)
        assert problem.cases == hidden_cases(problem.chain, problem.key) and 5 <= len(problem.cases) <= 16
        assert sum(len(repr(case.want)) for case in problem.cases) <= MOST_WANTED + 100
        assert problem.cases[0].args[0] in ([], 0, "", {})
        assert str([case.args for case in problem.cases]) not in problem.prompt
        assert len({str(case.want) for case in problem.cases}) >= 3, "a constant would do"
        assert worthwhile(problem.chain) and problem.level == len(problem.chain.steps)


def test_worthless_chains_are_refused() -> None:
    even, odd = STEPS["numbers"][:2]
    total = RESULTS["numbers"][0]
    assert worthwhile(Chain("list", ((even, 0),), (total, 0)))
    assert not worthwhile(Chain("list", ((even, 0), (odd, 0)), (total, 0)))
    reverse = next(piece for piece in STEPS["any"] if piece.code == "out[::-1]")
    assert not worthwhile(Chain("list", ((reverse, 0),), (total, 0)))
    assert len([*Chain("list", ((even, 0), (STEPS["numbers"][2], 3)), (total, 0)).mistakes()]) == 3


def test_programs_are_found_in_texts() -> None:
    assert extract_program("a\n```python\nx\n```\nb\n```\ny\n```") == "y"
    assert extract_program("\ndef f(): pass\n") == "def f(): pass"
    assert extract_program("```python\nnever closed") == "```python\nnever closed"


def test_options_are_checked_and_problems_repeat() -> None:
    for options in ({"levels": (9,)}, {"sources": ()}, {"sources": ("tree",)}):
        with pytest.raises(ConfigError, match=r"code (levels|sources)"):
            CodeFamily(judge=DRY, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="split"):
        CodeFamily(judge=DRY).problem("test", 0)
    first, again = (CodeFamily(judge=DRY).problem("train", 5) for _ in range(2))
    assert isinstance(first, CodeProblem) and first == again and first.cases == again.cases
    assert CodeFamily(judge=DRY, thinking=False).problem("train", 5).demonstration(0)[1].reasoning is None
