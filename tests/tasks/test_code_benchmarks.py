"""EvalPlus and LiveCodeBench rows in the sandbox: right, wrong, slow and hostile programs."""

from __future__ import annotations

import base64
import json
import pickle
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import ConfigError, DataError, GradingError
from glm5.records import Message, Outcome
from glm5.sandbox.sandbox import Limits, Sandbox, sandbox_available
from glm5.tasks import make_family
from glm5.tasks.coding.benchmark import program_of
from glm5.tasks.coding.execute import FAILED, outputs, same_text, same_value
from glm5.tasks.coding.mbpp import is_right

pytestmark = pytest.mark.skipif(sandbox_available() is None, reason="no sandbox on this machine")
HEAD = 'def spread(xs):\n    """The least and the greatest of xs, as a tuple; None for none."""\n'
EVALPLUS = {
    "task_id": "HumanEval/900", "prompt": HEAD, "entry_point": "spread", "atol": 0,
    "canonical_solution": "    return (min(xs), max(xs)) if xs else None\n",
    "base_input": [[[3, 1, 2]], [[]]], "plus_input": [[[0.1, 0.2]], [["b", "a"]], [3]],
}  # fmt: skip


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.tasks.coding.execute.CASE_S", 1)


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def outcome(problem: Any, reply: str) -> Outcome:
    return problem.env().step(Message("assistant", reply)).outcome


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("    return (min(xs), max(xs)) if xs else None", True),  # the rest of the function
        (f"Here:\n```python\n{HEAD}    ys = sorted(xs)\n    return (ys[0], ys[-1]) if ys else None\n```\nDone.", True),
        ("```\ndef spread(xs):\n    print('hi')\n    return (min(xs), max(xs)) if xs else None\n```", True),
        ("```python\ndef spread(xs):\n    return [min(xs), max(xs)] if xs else None\n```", False),  # a list
        ("```python\ndef spread(xs):\n    return (min(xs), max(xs))\n```", False),
        ("```python\ndef spread(xs):\n    while True: pass\n```", False),
        ("```python\nimport os\nos._exit(0)\n```", False),
        ("```python\ndef spread(xs:\n```", False),
        ("```python\nimport sys\nsys.exit(0)\n```", False),
        ("```python\nclass A:\n    def __eq__(self, other): return True\ndef spread(xs): return A()\n```", False),
        ("", False),
    ],
)
def test_replies_to_a_row_of_evalplus(reply: str, right: bool, tmp_path: Path) -> None:
    family = make_family(
        "evalplus", file="rows.jsonl", folder=str(Path(write(tmp_path / "rows.jsonl", EVALPLUS)).parent)
    )
    problem = family.problem("heldout", 0)
    assert HEAD.strip() in problem.prompt and (outcome(problem, reply) is Outcome.SOLVED) == right


def test_values_keep_their_types_and_floats_have_a_tolerance(tmp_path: Path) -> None:
    source = "def f(x): return {'a': (1, {2, 3}), 'b': float('nan'), 'c': x}\n"
    value = outputs(source, [[1.5], [[True, None]]], "call", "f")[0]
    assert same_value(value, outputs(source, [[1.5]], "call", "f")[0]) and not same_value(
        value, outputs(source.replace("(1", "(2"), [[1.5]], "call", "f")[0]
    )
    assert same_value(0.1 + 0.2, 0.3, 1e-6) and not same_value(0.1 + 0.2, 0.3)
    assert same_value(1, 1.0) and same_value(True, 1) and not same_value(1.1, 1)
    assert (
        same_value([2.4], [2.0], 0.5)
        and not same_value({"tuple": [1]}, [1])
        and same_value({"tuple": [1]}, [1], 0, True)
    )
    assert outputs("def f(x): return x * 10**6", [["ab"], ["a"]], "call", "f", trusted=True) == [
        FAILED,
        FAILED,
    ]  # too long
    assert outputs("def f(x): return 1", [[1], [1, 2]], "call", "f") == [1, FAILED]
    assert outputs("def f(x): return None if x else 1 / 0", [[1], [0], [1]], "call", "f") == [None, FAILED, FAILED]
    find_zero = EVALPLUS | {"prompt": "def find_zero(xs):\n", "entry_point": "find_zero", "atol": 1e-4,
                            "canonical_solution": "    return -1.0\n", "base_input": [[[-1, 0, 1]]],
                            "plus_input": []}  # fmt: skip
    problem = make_family("evalplus", file=write(tmp_path / "z.jsonl", find_zero)).problem("heldout", 0)
    assert outcome(problem, "    return 1.0") is Outcome.SOLVED
    assert {outcome(problem, f"    return {said}") for said in ("0.9", "1e308", "10**999")} == {Outcome.FAILED}


@pytest.mark.parametrize(
    ("body", "right"),
    [
        ("sum(xs) / len(xs)", True), ("sum(xs) / len(xs) + 1e-7", True), ("sum(xs) / len(xs) + 1e-5", False),
        ("[sum(xs) / len(xs)]", False), ("str(sum(xs) / len(xs))", False), ("(sum(xs) / len(xs), 1)", False),
    ],
)  # fmt: skip
def test_floats_are_compared_as_evalplus_does(body: str, right: bool, tmp_path: Path) -> None:
    """By evalplus 0.3.1's own `untrusted_check` on the same programs; beside something else, floats must be equal."""
    row = EVALPLUS | {
        "prompt": "def mean(xs):\n    'm'\n",
        "entry_point": "mean",
        "canonical_solution": "    return sum(xs) / len(xs)\n",
        "base_input": [[[1, 2, 4]], [[0.1]]],
        "plus_input": [],
    }
    problem = make_family("evalplus", file=write(tmp_path / "m.jsonl", row)).problem("heldout", 0)
    assert (outcome(problem, f"    return {body}") is Outcome.SOLVED) == right
    mixed = row | {"canonical_solution": "    return sum(xs) / len(xs), 'x'\n"}
    problem = make_family("evalplus", file=write(tmp_path / "m.jsonl", mixed)).problem("heldout", 0)
    assert outcome(problem, "    return sum(xs) / len(xs) + 1e-9, 'x'") is Outcome.FAILED


def test_inputs_on_which_the_rows_own_solution_fails_do_not_count(tmp_path: Path) -> None:
    plain = make_family("evalplus", file=write(tmp_path / "a.jsonl", EVALPLUS), plus=False).problem("heldout", 0)
    assert outcome(plain, "    return (1, 3) if xs else None") is Outcome.SOLVED  # the added inputs are left out
    broken = EVALPLUS | {"canonical_solution": "    return 1 / 0\n"}
    problem: Any = make_family("evalplus", file=write(tmp_path / "b.jsonl", broken)).problem("heldout", 0)
    with pytest.raises(Exception, match="fails on every input"):
        problem.right("x")
    for row in ({"task_id": 1}, EVALPLUS | {"base_input": [3]}, EVALPLUS | {"entry_point": "a b"}):
        with pytest.raises(DataError, match="line 1: not a row of evalplus"):
            make_family("evalplus", file=write(tmp_path / "c.jsonl", row)).problem("heldout", 0)
    with pytest.raises(ConfigError):
        make_family("evalplus")


def test_imports_from_the_future_come_before_the_prompt(tmp_path: Path) -> None:
    problem = make_family("evalplus", file=write(tmp_path / "a.jsonl", EVALPLUS)).problem("heldout", 0)
    body = "def spread(xs: No):\n    return (min(xs), max(xs)) if xs else None"
    for first in ("from __future__ import annotations", "import math\nfrom __future__ import (\n    annotations,\n)"):
        assert outcome(problem, f"```python\n{first}\n{body}\n```") is Outcome.SOLVED


@pytest.mark.long
def test_inputs_that_do_not_count_are_named_and_never_for_want_of_time(tmp_path: Path) -> None:
    problem = make_family("evalplus", file=write(tmp_path / "a.jsonl", EVALPLUS)).problem("heldout", 0)
    assert problem.env().step(Message("assistant", "    return 1")).detail == {"inputs_left_out": 1}  # spread(3)
    slow = "import time\ndef f(x):\n    time.sleep(x)\n    return x"
    with pytest.raises(GradingError, match="1 of 2 inputs were not run"):
        outputs(slow, [[0], [1.8]], "call", "f", trusted=True, wall_s=1.2)
    with pytest.raises(GradingError, match="input 2 of 3 took too long"):
        outputs("def f(x):\n    while x: pass", [[0], [1], [0]], "call", "f", trusted=True)


def test_each_input_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are; a program that is right on all may need as long for each as it may for one."""
    seen: list[Limits] = []

    class Spy(Sandbox):
        def __init__(self, limits: Limits) -> None:
            seen.append(limits)
            super().__init__(limits)

    monkeypatch.setattr("glm5.tasks.coding.execute.Sandbox", Spy)
    assert outputs("print(input())", ["1", "2", "3"], "stdin") == ["1\n", "2\n", "3\n"]
    assert outputs("1 / 0", ["x"] * 100, "stdin") == [FAILED] * 100
    assert seen[1].wall_s - seen[0].wall_s >= 97 * 2 and seen[1].cpu_s > seen[0].cpu_s


@pytest.mark.slow
def test_a_program_that_hides_and_ignores_its_alarm_is_ended() -> None:
    hidden = "import os, signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\n{}\ntime.sleep(99)"
    started = time.monotonic()
    for way in ("os.closerange(1, 30)", "os.fork()"):
        assert outputs(hidden.format(way), ["", ""], "stdin") == [FAILED, FAILED]
    assert time.monotonic() - started < 30


def test_integers_beyond_all_floats_are_compared() -> None:
    for got, want, right in ((10**400, 10**400, True), (10**400, 10**400 + 1, False), (10**400, 1.5, False)):
        assert same_value([got, 0.5], [want, 0.5 + 1e-9], 1e-6) == right


MBPP: dict[str, tuple[str, list[Any], str, str]] = {
    "Mbpp/106": ("def f(xs, t):\n    return t + tuple(xs)", [[5], [9, 10]], "return t + (*xs,)", "return [*t, *xs]"),
    "Mbpp/115": ("def f(xs):\n    return [type(x).__name__ for x in xs]", [[[1], []]], "return ['set', 'dict']", ""),
    "Mbpp/252": ("def f(z):\n    return z.imag", ["(1+2j)"], "return 2.0", "return 3.0"),
    "Mbpp/722": ("def f(d, n):\n    return d['a']", [{"a": [1]}, 2], "return (1,)", "return [1]"),
    "Mbpp/791": ("def f(t):\n    return t", [[1, [2, [3]]]], "return (1, (2, (3,)))", "return [1, [2, [3]]]"),
}  # fmt: skip


@pytest.mark.parametrize("task", MBPP)
def test_inputs_of_mbpp_have_the_types_that_its_file_lost(task: str, tmp_path: Path) -> None:
    solution, case, right, wrong = MBPP[task]
    row = EVALPLUS | {"task_id": task, "prompt": "'p'\n", "entry_point": "f", "canonical_solution": solution,
                      "base_input": [case], "plus_input": []}  # fmt: skip
    problem = make_family("evalplus", file=write(tmp_path / "m.jsonl", row)).problem("heldout", 0)
    head = solution.partition("\n")[0]
    assert outcome(problem, f"{head}\n    {right}") is Outcome.SOLVED
    assert outcome(problem, f"{head}\n    {wrong}") is Outcome.FAILED


@pytest.mark.parametrize(
    ("name", "arguments", "got", "want", "right"),
    [
        ("similar_elements", [], {"tuple": [4, 3]}, {"set": [3, 4]}, True), ("Diff", [], [1, 1], [1], True),
        ("Diff", [], [1, 2], [1], False), ("Diff", [], [[1]], [1], False), ("Diff", [], 5, [1], False),
        ("check_str", [], True, {"other": "<re.Match>"}, True), ("check_str", [], False, {"other": "x"}, False),
        ("check_str", [], "yes", {"other": "x"}, True), ("check_str", [], "yes", None, False),
        ("are_equivalent", [36, 57], True, False, True), ("sum_div", [1], 0, 1, True), ("sum_div", [1], 2, 1, False),
        ("surface_Area", [3, 4], 35, 33, True), ("surface_Area", [3, 4], 34, 33, False),
        ("surface_Area", [3, 10**400], 1, 33, False), ("digit_distance_nums", [1, 23], 4, 5, True),
        ("digit_distance_nums", [1, -23], 4, 5, False), ("other", [], [1], [1, 1], False),
    ],
)  # fmt: skip
def test_functions_of_mbpp_with_more_than_one_right_answer(
    name: str, arguments: list[Any], got: Any, want: Any, right: bool
) -> None:
    assert is_right(name, arguments, got, want, 0.0) == right


def packed(tests: list[dict[str, str]]) -> str:
    """As LiveCodeBench publishes hidden tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def livecode(kind: str) -> dict[str, Any]:
    tests = {
        "stdin": [("2\n1 2\n", "3\n"), ("1\n5\n", "5.0"), ("3\n1 1 1", "3")],
        "functional": [("[1, 2]\n3", "[3, 6]"), ("[]\n1", "[]"), ("[5]\n2", "[10]")],
    }[kind]
    rows = [{"input": given, "output": want, "testtype": kind} for given, want in tests]
    starter = (
        "class Solution:\n    def scale(self, xs: List[int], by: int) -> List[int]:\n        "
        if kind != "stdin"
        else ""
    )
    return {
        "question_content": "Add up." if kind == "stdin" else "Scale.", "question_id": "q1", "starter_code": starter,
        "public_test_cases": json.dumps(rows[:1]), "private_test_cases": packed(rows[1:]),
        "contest_date": "2024-09-01T00:00:00",
        "metadata": json.dumps({"func_name": "scale"} if kind != "stdin" else {}),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "reply", "right"),
    [
        ("stdin", "```python\ninput()\nprint(sum(map(int, input().split())))\n```", True),
        ("stdin", "import sys\nn, *xs = map(int, sys.stdin.read().split())\nprint(sum(xs))\nsys.exit()", True),
        ("stdin", "if __name__ == '__main__':\n    input()\n    print(sum(map(int, input().split())), 'x')", False),
        ("stdin", "```python\nprint(3)\n```", False),
        ("stdin", "```python\nimport time\ntime.sleep(99)\n```", False),
        ("functional", "class Solution:\n    def scale(_, xs: List, by):\n        return [by*x for x in xs]", True),
        ("functional", "class Solution:\n    def scale(self, xs, by):\n        return tuple(x * by for x in xs)", True),
        ("functional", "```python\nclass Solution:\n    def scale(self, xs, by):\n        return xs\n```", False),
    ],
)  # fmt: skip
def test_replies_to_rows_of_livecodebench(kind: str, reply: str, right: bool, tmp_path: Path) -> None:
    family = make_family("livecodebench", file=write(tmp_path / "r.jsonl", livecode(kind)), since="2024-08-01")
    problem: Any = family.problem("heldout", 0)
    assert len(problem.tests) == 3 and ("standard input" in problem.prompt) == (kind == "stdin")
    assert (outcome(problem, reply) is Outcome.SOLVED) == right


def test_hidden_tests_are_read_without_running_a_pickle(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.write_text, (tmp_path / "evil", "x"))

    evil = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    for tests in (
        evil,
        "!!",
        "aGVsbG8=",
        "[" * 100_000,
        base64.b64encode(zlib.compress(pickle.dumps(["a", "b"]))).decode(),
        '{"a": 1}',
        "[]",
    ):
        row = livecode("stdin") | {"private_test_cases": tests, "public_test_cases": "[]"}
        with pytest.raises(DataError, match="line 1: not a row of livecodebench"):
            make_family("livecodebench", file=write(tmp_path / "r.jsonl", row)).problem("heldout", 0)
    assert not (tmp_path / "evil").exists()
    with pytest.raises(DataError, match="no row"):
        make_family("livecodebench", file=write(tmp_path / "r.jsonl", livecode("stdin")), until="2024-01-01")


def test_texts_and_blocks() -> None:
    assert same_text("1 2\n3\n", "1  2 \n3.0") and not same_text("1 2 3", "1 2\n3") and not same_text("a", "b")
    assert program_of("x = 1") == "x = 1"


@pytest.mark.parametrize(
    "reply",
    [
        "```python3\nx\n```\nDone.", "```python\nx\n", "Input:\n```text\n1 2\n```\nSo:\n```python\nx\n```\nThat is it.",
        "```bash\npip install y\n```\nthen\n```py\nx\n```",
        "```py\ny\n```\nBut:\n```Python\nx\n```\nIt prints:\n```\n3\n```",
        "Use ```x``` so:\n  ```\nx\n  ```\nand\n```json\n{}\n```", "````python title=a\r\nx\n````\n```c\ny\n```",
        "```rust\nx\n```",
    ],
)  # fmt: skip
def test_the_program_is_the_last_python_block(reply: str) -> None:
    assert program_of(reply).strip() == "x"


def test_plain_prompts_end_where_the_program_begins(tmp_path: Path) -> None:
    problem: Any = make_family(
        "livecodebench", file=write(tmp_path / "f.jsonl", livecode("functional")), form="plain"
    ).problem("heldout", 0)
    assert problem.prompt.endswith("def scale(self, xs: List[int], by: int) -> List[int]:\n")
    assert outcome(problem, "        return [x * by for x in xs]\n") is Outcome.SOLVED
    assert outcome(problem, "        return xs\n") is Outcome.FAILED
    problem = make_family("livecodebench", file=write(tmp_path / "s.jsonl", livecode("stdin")), form="plain").problem(
        "heldout", 0
    )
    assert problem.prompt.endswith("```python\n") and "standard input" in problem.prompt
    assert outcome(problem, "input()\nprint(sum(map(int, input().split())))\n") is Outcome.SOLVED
    row = make_family("evalplus", file=write(tmp_path / "e.jsonl", EVALPLUS), form="plain").problem("heldout", 0)
    assert row.prompt == HEAD and outcome(row, "    return (min(xs), max(xs)) if xs else None") is Outcome.SOLVED
    with pytest.raises(ConfigError, match="chat or plain"):
        make_family("evalplus", file=str(tmp_path / "e.jsonl"), form="few-shot")
