"""Values of small programs, computed in the sandbox and compared outside it (§3.3, §4.2).

The sandbox receives the code and the arguments only; the wanted values stay here, so a program can neither read the
answers nor talk the grader into a pass: it has to compute them.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from glm5.errors import GradingError
from glm5.tasks.sandbox import NO_FILES, Limits, Sandbox

MEMO_SIZE = 16384
BATCH = 64  # programs of the policy that one sandbox run evaluates at most
MOST_BYTES = 4096  # of one program's values
MOST_DEPTH = 64  # of nesting in one value, far below where Python's JSON gives up

# Every job runs in a child process of its own, one after the other, and must learn nothing of the others and change
# nothing for them, since they may be other answers to the same exercise:
# - The jobs lie one after the other on standard input, which is sealed. A child reads its slice and closes the rest
#   before it runs the program; the parent, whose memory every child inherits, reads no job and wipes every result.
# - No child can start processes or threads that would outlive it, and with `file_mb=0` no file can be written.
# - The sandbox has no /proc, and denies ptrace and limits on other processes. All that a child can do to the others is
#   to kill or stop their parent, after which every job of the run is tried again alone.
# Results go out as one line of printable ASCII each; a result that is not JSON is that job's crash.
HARNESS = """\
import json, os, resource, sys, types

def attempt(function, *arguments):
    try:
        value = function(*arguments)
        json.dumps(value)
        return ["value", value]
    except BaseException as error:
        return ["error", type(error).__name__]

def values(source, name, cases):
    space = {"__name__": "solution"}
    loaded = attempt(lambda: types.FunctionType(compile(source, "solution", "exec"), space)())
    if loaded[0] == "value" and name not in space:
        loaded = ["error", "NameError"]
    return [attempt(space[name], *case) if loaded[0] == "value" else loaded for case in cases]

def be_child(start, size, writer):
    job = os.pread(0, size, start)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    os.write(writer, json.dumps(values(*json.loads(job))).encode()[:MOST_BYTES])

def receive(reader, child):
    with memoryview(bytearray(MOST_BYTES + 1)) as buffer:
        count = 0
        while count <= MOST_BYTES and (more := os.readv(reader, [buffer[count:]])):
            count += more
        os.kill(child, 9)
        os.waitpid(child, 0)
        for index in range(count):
            if not 32 <= buffer[index] < 127:
                buffer[index] = 63
        os.write(1, buffer[:count])
        os.write(1, b"\\n")
        buffer[:] = bytes(len(buffer))

os.write(1, b"ready\\n")
start = 0
for size in SIZES:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            be_child(start, size, writer)
        finally:
            os._exit(0)
    os.close(writer)
    receive(reader, child)
    os.close(reader)
    start += size
"""


@dataclass(frozen=True)
class Case:
    """Arguments and the wanted value, all JSON."""

    args: tuple[Any, ...]
    want: Any


def _same(got: Any, want: Any) -> bool:
    """Equal in value and JSON type: 1 is not true."""
    return json.dumps(got) == json.dumps(want)


class Judge:
    """Evaluates programs in a sandbox. One judge serves many environments; safe to share between threads.

    A program's values are a pure function of (program, name, arguments), so they are remembered in a bounded table.
    (A program that reads the clock or draws random numbers gets its first result again: it gains nothing by retrying.)
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._memo: OrderedDict[tuple[str, str, str], list[Any]] = OrderedDict()
        self._asked: dict[tuple[str, str, str], None] = {}
        self._lock = threading.Lock()  # guards the two tables
        self._running = threading.Lock()  # one sandbox run at a time
        self.runs = 0

    def values(self, program: str, name: str, cases: Sequence[Case]) -> list[Any]:
        """`["value", v]` or `["error", kind]` for each case. Raises `GradingError` when the sandbox fails.

        Calls from several threads that arrive during a sandbox run are answered together by the next one.
        """
        key = (program, name, json.dumps([case.args for case in cases]))
        with self._lock:
            if key in self._memo:
                self._memo.move_to_end(key)
                return self._memo[key]
            self._asked[key] = None
        with self._running:
            with self._lock:
                if key in self._memo:
                    return self._memo[key]
                batch = [key, *(other for other in self._asked if other != key)][:BATCH]
            try:
                self._run(batch)
            finally:  # a program that breaks the sandbox must not spoil the runs of others again and again
                with self._lock:
                    for asked in batch:
                        self._asked.pop(asked, None)
            with self._lock:
                return self._memo[key]

    def prefill(self, jobs: Iterable[tuple[str, str, Sequence[Case]]]) -> None:
        """Evaluate many (program, name, cases) in one sandbox run."""
        keys = {(program, name, json.dumps([case.args for case in cases])): None for program, name, cases in jobs}
        with self._lock:
            missing = [key for key in keys if key not in self._memo]
        if missing:
            with self._running:
                self._run(missing)

    def _run(self, keys: Sequence[tuple[str, str, str]]) -> None:
        jobs = [f"[{json.dumps(program)}, {json.dumps(name)}, {cases}]" for program, name, cases in keys]
        source = f"SIZES, MOST_BYTES = {[len(job) for job in jobs]}, {MOST_BYTES}\n{HARNESS}"
        result = self._sandbox.run_python(source, NO_FILES, "".join(jobs))  # ASCII, so characters are bytes
        self.runs += 1
        if not result.stdout.startswith("ready\n"):  # said before any program runs
            why = result.killed_reason or result.stderr.strip()[-200:] or f"exit {result.exit_code}"
            raise GradingError(f"the harness did not start in the sandbox ({why}); are its limits too small?")
        values = _read_values(result.stdout.removeprefix("ready\n"), [len(json.loads(cases)) for _, _, cases in keys])
        if values is None and len(keys) > 1:
            for key in keys:
                self._run([key])
            return
        if values is None:
            values = [[["error", "timeout" if result.timed_out else "crash"]] * len(json.loads(keys[0][2]))]
        with self._lock:
            for key, found in zip(keys, values, strict=True):
                self._memo[key] = found
            while len(self._memo) > MEMO_SIZE:
                self._memo.popitem(last=False)

    def grade(self, program: str, name: str, cases: Sequence[Case]) -> list[str | None]:
        """For each case a short complaint, or None where it passes. Sees the code and the tests, nothing else."""
        complaints: list[str | None] = []
        for case, (kind, got) in zip(cases, self.values(program, name, cases), strict=True):
            call = f"{name}({','.join(map(repr, case.args))})"
            if kind == "error":
                complaints.append(f"{call}: {str(got)[:20]}")
            else:
                same = _same(got, case.want)
                complaints.append(None if same else f"{call}={repr(got)[:20]} want {case.want!r}")
        return complaints


def _read_values(stdout: str, counts: Sequence[int]) -> list[list[Any]] | None:
    """The harness's answer as [kind, value] pairs per job; None when the run as a whole failed. What a job itself wrote
    is untrusted: anything but the expected number of pairs counts as a crash of that job."""
    *lines, rest = stdout.split("\n")
    if rest or len(lines) != len(counts):
        return None
    return [_read_job(line, count) for line, count in zip(lines, counts, strict=True)]


def _read_job(line: str, count: int) -> list[Any]:
    try:
        pairs = json.loads(line) if len(line) <= MOST_BYTES else None
    except (ValueError, RecursionError):
        pairs = None
    if isinstance(pairs, list) and len(pairs) == count and all(map(_is_pair, pairs)):
        return pairs
    return [["error", "crash"]] * count


def _is_pair(pair: Any) -> bool:
    """Whether a program's word can be shown and compared: an error is a class name, a value not nested too deep."""
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    kind, got = pair
    if kind == "error":
        return isinstance(got, str) and got.isascii() and got.isidentifier()
    return kind == "value" and _is_shallow(got, MOST_DEPTH)


def _is_shallow(value: Any, depth: int) -> bool:
    inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in inner)


@functools.cache
def default_judge() -> Judge:
    """The judge that families share unless given another. Raises `GradingError` where code cannot be isolated."""
    return Judge(Sandbox(Limits(cpu_s=1, wall_s=10.0, memory_mb=128, processes=2, file_mb=0, output_kb=64)))
