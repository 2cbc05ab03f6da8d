"""Published coding benchmarks from files: EvalPlus (HumanEval+, MBPP+) and LiveCodeBench, run in the sandbox (§6.3).

Rows are as they were published. A reply is solved if its program is right on all inputs. For EvalPlus, what is right is
what the row's own solution gives (and what mbpp.py adds); inputs on which that fails do not count.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import pickletools
import re
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError, GradingError
from glm5.records import Env, Message, StepResult
from glm5.tasks.coding.execute import FAILED, outputs, same_text, same_value, untupled
from glm5.tasks.coding.mbpp import NOT_NONE, is_right, typed
from glm5.tasks.contract import EvaluationProblem, Family, SingleTurnEnv, ToolSpec
from glm5.tasks.questions import table_rows

FENCE = re.compile(r"^[^\n`]*(`{3,})([^\n`]*)\n(.*?)(?:(?<!`)\1`*[ \t\r]*$|\Z)", re.DOTALL | re.MULTILINE)
"""A block of code: its fence, what it is said to be, and the code up to the next such fence that ends a line."""
FUTURE = re.compile(r"^from[ \t]+__future__[ \t]+import[ \t]*(?:\([^)]*\)|[^\n]*)", re.MULTILINE)
COMPLETE = """Complete this Python function. Answer with the whole function, with what it imports, in one code block.

```python
{prompt}
```"""
SOLVE = """Solve this problem with a Python program. Answer with the program in one code block.

{question}

{form}"""
READS = "The program reads its input from standard input and prints the answer to standard output."
STARTS = "Begin with this code:\n\n```python\n{starter}\n```"
PLAIN = "{question}\n\n{form}\n\nThe program:\n\n```python\n{starter}"
FORMS = ("chat", "plain")
"""A request, or a text that ends where the program begins, for base models."""
MOST_TESTS = 256 << 20
"""Bytes of a row's hidden tests."""


def program_of(reply: str) -> str:
    """The last block of code in a reply that is said to be Python; without one, the last of no language, the last of
    all, or the reply itself."""
    blocks = [((tag.split() or [""])[0].lower(), code) for _, tag, code in FENCE.findall(reply)]
    for tags in (("python", "python3", "py", "py3"), ("",), {tag for tag, _ in blocks}):
        if chosen := [code for tag, code in blocks if tag in tags]:
            return str(chosen[-1])
    return reply


def joined(start: str, code: str) -> str:
    """A program of two parts, of which the second's imports from `__future__` come first."""
    return "\n".join([*FUTURE.findall(code), start, FUTURE.sub("", code)])


@dataclass(frozen=True)
class CodeProblem(EvaluationProblem):
    """One row of a benchmark. Subclasses say what is right."""

    id: str
    key: str
    prompt: str
    thinking: bool
    domain: str = "code"
    tools: Sequence[ToolSpec] = ()

    @property
    @abstractmethod
    def grading(self) -> Any:
        """What grades the answers."""

    @abstractmethod
    def right(self, reply: str) -> bool:
        """Whether the reply's program passes. Raises GradingError if the sandbox fails."""

    def left_out(self) -> int:
        """How many inputs do not count."""
        return 0

    def env(self) -> Env:
        return CodeEnv(self, lambda message: float(self.right(message.content)))


class CodeEnv(SingleTurnEnv):
    """Asks once; `inputs_left_out` of the detail counts the inputs on which the row's own solution fails, if any."""

    def step(self, message: Message | None) -> StepResult:
        result = super().step(message)
        left_out = 0 if message is None or not isinstance(self._source, CodeProblem) else self._source.left_out()
        return replace(result, detail={**result.detail, "inputs_left_out": left_out}) if left_out else result


@functools.lru_cache(maxsize=256)
def _expected(solution: str, name: str, cases: str, task: str) -> list[tuple[Any, Any]]:
    """(arguments, tagged value) of the cases on which a solution does not fail."""
    rows = typed(task, json.loads(cases))
    found = zip(rows, outputs(solution, rows, "call", name, trusted=True), strict=True)
    return [(row, value) for row, value in found if value is not FAILED]


@dataclass(frozen=True)
class EvalPlusProblem(CodeProblem):
    """A function that the reply completes. `start` is the code that the prompt shows, `solution` the row's own."""

    start: str = ""
    name: str = ""
    solution: str = ""
    cases: str = "[]"
    tolerance: float = 0.0
    task: str = ""

    def _known(self) -> list[tuple[Any, Any]]:
        return _expected(self.start + self.solution, self.name, self.cases, self.task)

    def left_out(self) -> int:
        return len(json.loads(self.cases)) - len(self._known())

    @property
    def grading(self) -> Any:
        return self.start, self.name, self.solution, self.cases, self.tolerance

    def right(self, reply: str) -> bool:
        known = self._known()
        if not known:
            raise GradingError(f"{self.id}: its own solution fails on every input.")
        code, start = program_of(reply), self.start.rstrip()
        if start.endswith(":") and re.search(rf"^def {self.name}\b", code, re.MULTILINE):
            start += "\n    pass"  # the prompt has no docstring, and the reply is the whole function
        found = outputs(joined(start, code), [arguments for arguments, _ in known], "call", self.name)
        return all(self._is(got, *case) for got, case in zip(found, known, strict=True))

    def _is(self, got: Any, arguments: Any, want: Any) -> bool:
        if got is FAILED:
            return False
        if self.name == "find_zero" and isinstance(got, float) and arguments and isinstance(arguments[0], list):
            try:  # any root of the polynomial is right
                return abs(sum(c * got**i for i, c in enumerate(arguments[0]))) <= (self.tolerance or 1e-4)
            except OverflowError:
                return False
        if self.task.startswith("Mbpp/") and is_right(self.name, arguments, got, want, self.tolerance):
            return True
        if self.name in NOT_NONE:
            return False
        members = untupled(want) if isinstance(want, list | dict) else [want]
        floats = isinstance(members, list) and all(isinstance(one, float) for one in members)
        tolerance = self.tolerance or (1e-6 if floats else 0.0)  # EvalPlus's rule: of floats, and lists of nothing else
        return same_value(got, want) or (type(got) is type(want) and same_value(got, want, tolerance))


@dataclass(frozen=True)
class LiveCodeProblem(CodeProblem):
    """A program, or a method of a class, and its tests. `start` is the code with which a plain prompt ends."""

    name: str = ""
    start: str = ""
    tests: tuple[tuple[str, str], ...] = ()

    @property
    def grading(self) -> Any:
        return self.name, self.tests

    def right(self, reply: str) -> bool:
        program = program_of(reply) if "```" in reply else f"{self.start}{reply}"
        if not self.name:
            found = outputs(program, [given for given, _ in self.tests], "stdin")
            return all(
                got is not FAILED and same_text(got, want) for got, (_, want) in zip(found, self.tests, strict=True)
            )
        cases = [[json.loads(line) for line in given.splitlines() if line.strip()] for given, _ in self.tests]
        found = outputs(joined(COMMON, program), cases, "call", self.name)
        wanted = [json.loads(want) for _, want in self.tests]
        return all(
            got is not FAILED and same_value(got, _plain(want), sequences=True)
            for got, want in zip(found, wanted, strict=True)
        )


COMMON = """from typing import *
from collections import *
from functools import *
from itertools import *
from heapq import *
from bisect import *
from math import *
import collections, functools, heapq, itertools, math"""
"""What LeetCode imports before a solution."""


def _plain(value: Any) -> Any:
    """A JSON value as the sandbox tags it."""
    if isinstance(value, dict):
        return {"dict": sorted(([key, _plain(one)] for key, one in value.items()), key=repr)}
    return [_plain(one) for one in value] if isinstance(value, list) else value


class _FileFamily(Family):
    """The rows of `file`, in `folder` if that is set."""

    domain = "code"

    def __init__(
        self, seed: int = 0, *, file: str = "", folder: str = "", form: str = "chat", thinking: bool = True
    ) -> None:
        if not isinstance(file, str) or not file or form not in FORMS:
            raise ConfigError(f"{self.name}: set file to the benchmark's file (JSONL); form is {' or '.join(FORMS)}.")
        self._form = form
        self._path, self._thinking = Path(folder, file), bool(thinking)
        self._rows = table_rows(self._path)

    @property
    def size(self) -> int:
        """How many problems there are."""
        return len(self._rows)

    def problem(self, split: str, index: int) -> CodeProblem:
        """Raises DataError for a row that does not fit, and for a split to train on."""
        if split != "heldout":
            raise DataError(f"{self.name}: the rows are for evaluation; none are to train on.")
        line, row = self._rows[index % self.size]
        try:
            return self._made(row, line)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError, zlib.error) as error:
            raise DataError(f"{self._path}, line {line}: not a row of {self.name}: {error!r:.200}.") from None

    @abstractmethod
    def _made(self, row: Any, line: int) -> CodeProblem: ...

    def _key(self, prompt: str) -> str:
        return f"{self.name} {hashlib.sha256(prompt.encode('utf-8', 'replace')).hexdigest()}"


class EvalPlusFamily(_FileFamily):
    """HumanEvalPlus.jsonl or MbppPlus.jsonl: prompt, entry_point, canonical_solution, base_input, plus_input, atol.
    `plus=False` leaves the added inputs out."""

    name = "evalplus"

    def __init__(
        self, seed: int = 0, *, file: str = "", folder: str = "", plus: bool = True, form: str = "chat",
        thinking: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(seed, file=file, folder=folder, form=form, thinking=thinking)
        self._plus = bool(plus)

    def _made(self, row: Any, line: int) -> EvalPlusProblem:
        start, name, solution = (str(row[key]) for key in ("prompt", "entry_point", "canonical_solution"))
        cases = [*row["base_input"], *(row["plus_input"] if self._plus else ())]
        if not cases or not all(isinstance(case, list) for case in cases) or not name.isidentifier():
            raise ValueError("its inputs are no lists of arguments, or entry_point is no name")
        task = str(row["task_id"])
        typed(task, cases)
        prompt = start if self._form == "plain" else COMPLETE.format(prompt=start.strip())
        return EvalPlusProblem(
            f"evalplus/{task}", self._key(prompt), prompt, self._thinking, start=start, name=name,
            solution=solution, cases=json.dumps(cases), tolerance=float(row.get("atol") or 0.0), task=task,
        )  # fmt: skip


def _date(row: Any, otherwise: str) -> str:
    return str(row.get("contest_date", otherwise)) if isinstance(row, dict) else otherwise


class LiveCodeFamily(_FileFamily):
    """LiveCodeBench's rows: question_content, starter_code, public_test_cases, private_test_cases (JSON, or packed as
    published), metadata. `since` and `until` choose by contest_date, as "2024-08-01"."""

    name = "livecodebench"

    def __init__(
        self, seed: int = 0, *, file: str = "", folder: str = "", since: str = "", until: str = "",
        form: str = "chat", thinking: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(seed, file=file, folder=folder, form=form, thinking=thinking)
        within = [one for one in self._rows if since <= _date(one[1], since) <= (until or "~")]
        if not within:
            raise DataError(f"livecodebench: no row of {self._path} is from {since or 'the beginning'} to {until}.")
        self._rows = within

    def _made(self, row: Any, line: int) -> LiveCodeProblem:
        tests = [*_tests(row["public_test_cases"]), *_tests(row["private_test_cases"])]
        found = tuple((str(test["input"]), str(test["output"])) for test in tests)
        kinds = {str(test.get("testtype", "stdin")) for test in tests}
        metadata = json.loads(row.get("metadata") or "{}")
        name = str(metadata["func_name"]) if kinds == {"functional"} else ""
        if not found or len(kinds) != 1:
            raise ValueError("there are no tests, or of several types")
        starter = str(row.get("starter_code") or "").rstrip()
        form = STARTS.format(starter=starter) if starter else READS
        asked, start = str(row["question_content"]).strip(), ""
        if self._form == "plain":
            start = f"{starter}\n" if starter else ""
            prompt = PLAIN.format(question=asked, form="" if starter else READS, starter=start)
        else:
            prompt = SOLVE.format(question=asked, form=form)
        name_of = row.get("question_id") or line
        return LiveCodeProblem(
            f"livecodebench/{name_of}", self._key(prompt), prompt, self._thinking, name=name, start=start, tests=found
        )


def _tests(text: str) -> list[Any]:
    """Tests as JSON, or as base64 of a compressed pickle of it, whose text is read without running the pickle."""
    try:
        found = json.loads(text)
    except ValueError:
        packed = zlib.decompressobj()
        data = packed.decompress(base64.b64decode(text, validate=True), MOST_TESTS)
        if packed.unconsumed_tail:
            raise ValueError("its hidden tests are too large") from None
        texts = [value for _, value, _ in pickletools.genops(data) if isinstance(value, str)]
        if len(texts) != 1:
            raise ValueError("its hidden tests are not one packed text") from None
        found = json.loads(texts[0])
    if not isinstance(found, list):
        raise ValueError("its tests are no list")
    return found
