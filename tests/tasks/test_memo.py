"""The tables of what sandboxes have said: bounded by bytes, least recently used first, and nothing is kept that nobody
can be shown."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from glm5.sandbox import SandboxResult
from glm5.tasks.coding.judge import MOST_BYTES, Case, Judge
from glm5.tasks.memo import ENTRY_BYTES, Memo
from glm5.tasks.tools.python_tool import MOST_OUTPUT, Programs, _shown, observation


def test_what_was_used_last_stays() -> None:
    memo: Memo[str, int] = Memo(3 * ENTRY_BYTES + 30)
    for number, key in enumerate("abc"):
        memo.put(key, number, 10)
    assert memo.get("a") == 0 and memo.get("x") is None
    memo.put("d", 3, 10)
    assert [key in memo for key in "abcd"] == [True, False, True, True] and len(memo) == 3
    memo.put("a", 9, 2 * ENTRY_BYTES)  # a larger value in its place takes the room of others
    assert [memo.get(key) for key in "acd"] == [9, None, None] and memo.bytes == 3 * ENTRY_BYTES
    memo.put("huge", 1, 9 * ENTRY_BYTES)
    assert len(memo) == memo.bytes == 0
    memo.put("a", 1, 10)
    memo.pop("a")
    memo.pop("a")
    assert len(memo) == memo.bytes == 0


class Loud:
    """A sandbox in which every program fills both streams with characters of four bytes."""

    def run_python(self, source: str, *_: object) -> SandboxResult:
        text = "\U0001f600" + "x" * 64_000
        return SandboxResult(1, text, f"{text}\nlast line of {source}", False, None, 0.0)


class Listing:
    """A sandbox whose programs all answer with a list that is small as JSON and large as objects."""

    def run_python(self, source: str, files: Any, stdin: str, *_: object) -> SandboxResult:
        line = '["value", [' + ",".join(["{}"] * (MOST_BYTES // 3 - 10)) + "]]\n"
        return SandboxResult(0, f"ready\n{line}", "", False, None, 0.0)


def grown_by(work: Callable[[], object]) -> int:
    """How many bytes are held after a piece of work that were not before."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        work()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_tiny_programs_cannot_fill_the_memory_with_what_they_print() -> None:
    programs = Programs(Loud())  # type: ignore[arg-type]
    programs._memo = Memo(4 << 20)
    kept = grown_by(lambda: [programs.run(f"print({number})") for number in range(200)])
    assert 1 << 20 < programs._memo.bytes <= 4 << 20 and kept < 5 << 20  # of 100 MB
    assert observation(programs.run("print(199)"), 100).endswith("[last line of print(199)]")


def test_tiny_programs_cannot_fill_the_memory_with_values() -> None:
    judge = Judge(Listing())  # type: ignore[arg-type]
    judge._memo = Memo(1 << 18)
    cases = [Case((1,), 1)]
    kept = grown_by(lambda: [judge.values(f"def f(x): return {n}", "f", cases) for n in range(60)])
    assert 1 << 17 < judge._memo.bytes <= 1 << 18 and kept < 1 << 19  # of 5 MB
    assert judge.runs == 60 and judge.values("def f(x): return 59", "f", cases)[0][0] == "value" and judge.runs == 60
    assert not judge._open and not judge._asked


@given(
    stdout=st.text("ab\n", max_size=50).map(lambda text: text * 900),
    stderr=st.text("cd\n", max_size=40).map(lambda text: text * 900),
    reason=st.sampled_from([None, "output"]),
    most=st.sampled_from([100, 101, 400, MOST_OUTPUT - 1, MOST_OUTPUT]),
)
def test_what_is_kept_shows_the_same(stdout: str, stderr: str, reason: str | None, most: int) -> None:
    result = SandboxResult(1, stdout, stderr, False, reason, 0.0)
    assert observation(_shown(result), most) == observation(result, most)
