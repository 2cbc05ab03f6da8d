"""Runs small programs in the sandbox and compares their return values outside it (§3.3, §4.2).

The sandbox gets only the code and the arguments; the expected values stay outside. So a program can neither read the
answers nor manipulate the grader: it must compute them.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from glm5.errors import GradingError
from glm5.sandbox.sandbox import NO_FILES, Limits, Sandbox, SandboxResult
from glm5.tasks.memo import Memo

BATCH = 64  # maximum number of the policy's programs per sandbox run
MOST_BYTES = 4096  # maximum size of one program's values
MOST_DEPTH = 64  # maximum nesting of one value, far below the limit of Python's JSON
TIMEOUT = "timeout"
"""The error kind of a program that ran out of wall time."""

# What the sandbox runs: HARNESS, then a way to judge one job (APART or TOGETHER), then EVERY_JOB.
# APART: every job runs in its own child process, one after the other. Jobs may be other answers to the same exercise,
# so a child must neither learn from other jobs nor affect them:
# - Standard input is sealed. It contains the sizes of all jobs, then their programs and arguments. A child closes it
#   before it receives its program. The kernel copies each part into the child's pipe (sendfile). The parent, whose
#   memory every child inherits, reads only the sizes and wipes every result.
# - A child opens its own null device for the program's output: children could communicate through the flags of a
#   shared one.
# - A child gets the arguments of a case after it has answered the previous case: later arguments are neither in its
#   memory nor readable through its descriptors. It cannot change a sent answer. Expected values are never here.
# - A child cannot start processes or threads, which could outlive it. With `file_mb=0` it cannot write files.
# - The sandbox has no /proc and denies ptrace and limits on other processes. A child can only kill or stop its parent;
#   then the remaining jobs get another run (see `Judge._run`).
# An answer is one line of printable ASCII. A child without an answer has crashed; its later cases count as crashed too.
# TOGETHER: no children, for programs of this package alone.
HARNESS = """\
import json, os, resource, sys, types

read, write, dumps, loads = os.read, os.write, json.dumps, json.loads  # kept, whatever a program patches

def attempt(function, *arguments):
    try:
        value = function(*arguments)
        dumps(value)
        return ["value", value]
    except BaseException as error:
        return ["error", type(error).__name__]

def load(source, name):
    space = {"__name__": "solution"}
    types.FunctionType(compile(source, "solution", "exec"), space)()
    return space[name] if name in space else missing(name)

def missing(name):
    raise NameError(name)

def answering(source, name):  # what answers every case, also if there is no such function
    try:
        function = load(source, name)
    except BaseException as error:
        failed = ["error", type(error).__name__]
        return lambda *arguments: failed
    return lambda *arguments: attempt(function, *arguments)
"""
APART = """
def be_child(orders, results):
    for descriptor in (0, 1, 2):
        os.close(descriptor)
        os.open(os.devnull, os.O_RDWR)  # as the same number, the lowest that is free
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    answer = None
    while size := int(read(orders, WIDTH) or 0):
        data = b""
        while len(data) < size:
            data += read(orders, size - len(data))
        order = loads(data)
        if answer is None:
            answer = answering(*order)
        else:
            write(results, dumps(answer(*order)).encode()[:MOST_BYTES] + b"\\n")

def give(orders, start, size):
    os.write(orders, b"%*d" % (WIDTH, size))
    while size:
        sent = os.sendfile(orders, 0, start, size)
        start, size = start + sent, size - sent

def hear(results, buffer):
    count = 0
    while count < len(buffer) and (more := os.readv(results, [buffer[count:]])):
        count += more
        if 10 in buffer[:count]:
            break
    whole = count > 1 and buffer[count - 1] == 10 and 10 not in buffer[:count - 1]
    for index in range(count - 1):
        if not 32 <= buffer[index] < 127:
            buffer[index] = 63
    os.write(1, buffer[:count] if whole else b"\\n")
    buffer[:count] = bytes(count)
    return count if whole else 0

def judge(start, program, cases):
    (ours, results), (orders, theirs) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ours)
            os.close(theirs)
            be_child(orders, results)
        finally:
            os._exit(0)
    os.close(orders)
    os.close(results)
    answered, left = 0, MOST_BYTES
    with memoryview(bytearray(MOST_BYTES + 1)) as buffer:
        try:
            give(theirs, start, program)
            for size in cases:
                start, program = start + program, size
                give(theirs, start, program)
                count = hear(ours, buffer[:left + 1])
                answered, left = answered + 1, left - count
                if not count:
                    break
        except BrokenPipeError:
            pass
    os.close(theirs)
    os.close(ours)
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.write(1, b"\\n" * (len(cases) - answered))
"""
TOGETHER = """
def judge(start, program, cases):
    left, answer = MOST_BYTES, answering(*loads(os.pread(0, program, start)))
    for index, size in enumerate(cases):
        start, program = start + program, size
        line = dumps(answer(*loads(os.pread(0, size, start)))).encode()
        if len(line) > left:
            os.write(1, b"\\n" * (len(cases) - index))
            return
        os.write(1, line + b"\\n")
        left -= len(line) + 1
"""
EVERY_JOB = """
os.write(1, b"ready\\n")
size = int(os.pread(0, WIDTH, 0))
start = WIDTH + size
for program, *cases in json.loads(os.pread(0, size, WIDTH)):
    judge(start, program, cases)
    start += program + sum(cases)
"""
WIDTH = 12  # characters of an encoded size


@dataclass(frozen=True)
class Case:
    """Arguments and the expected value, all JSON."""

    args: tuple[Any, ...]
    want: Any


def _same(got: Any, want: Any) -> bool:
    """Equal in value and JSON type: 1 is not true."""
    return json.dumps(got) == json.dumps(want)


Key = tuple[str, str, tuple[str, ...]]
"""A program, its function's name, and the arguments of each case as JSON."""


def _key(program: str, name: str, cases: Sequence[Case]) -> Key:
    return program, name, tuple(json.dumps(case.args) for case in cases)


class Judge:
    """Evaluates programs in a sandbox. One judge serves many environments. Thread-safe.

    Values are cached by (program, name, arguments) in a bounded table. They are stored as JSON, because Python objects
    can take twenty times the memory. A program that reads the clock or draws random numbers gets its first result
    again: retries gain nothing. Timeouts depend on the machine too and are not cached.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._memo: Memo[Key, str] = Memo()
        self._open: dict[Key, Future[list[Any]]] = {}  # keys that a caller waits for
        self._asked: dict[Key, Future[list[Any]]] = {}  # the part of `_open` that no run has taken
        self._lock = threading.Lock()  # guards the three tables
        self._running = threading.Lock()  # one sandbox run at a time
        self.runs = 0

    def values(self, program: str, name: str, cases: Sequence[Case]) -> list[Any]:
        """`["value", v]` or `["error", kind]` per case. Raises GradingError on a failure of the sandbox.

        Calls from other threads during a sandbox run are batched into the next run.
        """
        key = _key(program, name, cases)
        with self._lock:
            if (kept := self._memo.get(key)) is not None:
                return list(json.loads(kept))
            if key not in self._open:
                self._open[key] = self._asked[key] = Future()
            found = self._open[key]
        if not found.done():
            with self._running:
                with self._lock:  # popped before the run: a program that breaks the sandbox must not spoil later runs
                    # The own future comes last: another caller may have a newer future for the same key.
                    batch = {**dict(list(self._asked.items())[: BATCH - 1]), key: found}
                    for asked in batch:
                        self._asked.pop(asked, None)
                self._run(batch)
        return found.result()

    def prefill(self, jobs: Iterable[tuple[str, str, Sequence[Case]]]) -> None:
        """Evaluate many (program, name, cases) in one sandbox run."""
        keys = [_key(*job) for job in jobs]
        with self._lock:
            missing: dict[Key, Future[list[Any]]] = {key: Future() for key in self._unknown(keys)}
            self._open.update(missing)
        with self._running:
            self._run(missing)

    def prefill_own(self, jobs: Iterable[tuple[str, str, Sequence[Case]]]) -> None:
        """Evaluate programs that this package wrote, never others: in one sandbox run without a child for each, which
        is many times as fast. What such a run does not complete stays unknown."""
        keys = [_key(*job) for job in jobs]
        with self._lock:
            wanted = self._unknown(keys)
        if wanted:
            with self._running:
                found, _ = self._evaluate(wanted, TOGETHER)
            with self._lock:
                for key, values in zip(wanted, found, strict=False):
                    self._keep(key, values)

    def _unknown(self, keys: Sequence[Key]) -> list[Key]:
        """Those without a value that nobody waits for, each once. Call with the lock held."""
        return [key for key in dict.fromkeys(keys) if key not in self._memo and key not in self._open]

    def _run(self, batch: Mapping[Key, Future[list[Any]]]) -> None:
        """Evaluate what is unknown. If a run ends early, its answers are kept, the program that was running is tried
        alone, and the others continue without it. If the sandbox fails, the remaining futures stay unset."""
        left = [key for key, found in batch.items() if not found.done()]
        alone = False
        try:
            while left:
                tried = left[:1] if alone else left
                values, result = self._evaluate(tried)
                last = not values and (len(tried) == 1 or result.killed_reason == "wall")  # it had the run to itself
                if last:
                    values = [[["error", TIMEOUT if result.timed_out else "crash"]] * len(tried[0][2])]
                alone = not last and len(values) < len(tried)
                for key, found in zip(tried, values, strict=False):
                    self._settle(key, batch[key], found, lasting=not last or result.killed_reason != "wall")
                left = left[len(values) :]
        finally:
            with self._lock:
                for key in left:
                    self._open.pop(key, None)

    def _settle(self, key: Key, future: Future[list[Any]], values: list[Any], lasting: bool) -> None:
        future.set_result(values)
        with self._lock:
            self._open.pop(key, None)
            if lasting:
                self._keep(key, values)

    def _keep(self, key: Key, values: list[Any]) -> None:
        """Call with the lock held."""
        kept = json.dumps(values)
        self._memo.put(key, kept, sum(map(sys.getsizeof, (key[0], *key[2], kept))))

    def _evaluate(self, keys: Sequence[Key], way: str = APART) -> tuple[list[list[Any]], SandboxResult]:
        """The values of the first keys, as many as the run completed, and the run's result."""
        jobs = [(json.dumps([program, name]), *cases) for program, name, cases in keys]
        sizes = json.dumps([[len(part) for part in job] for job in jobs])
        stdin = f"{len(sizes):{WIDTH}}{sizes}" + "".join(part for job in jobs for part in job)  # ASCII throughout
        source = f"WIDTH, MOST_BYTES = {WIDTH}, {MOST_BYTES}\n{HARNESS}{way}{EVERY_JOB}"
        most = sum(MOST_BYTES + len(cases) + 1 for _, _, cases in keys)
        result = self._sandbox.run_python(source, NO_FILES, stdin, 1 + most // 1024)
        self.runs += 1
        if not result.stdout.startswith("ready\n"):  # printed before any program runs
            why = result.killed_reason or result.stderr.strip()[-200:] or f"exit {result.exit_code}"
            raise GradingError(f"the harness did not start in the sandbox ({why}); are its limits too small?")
        return _read_values(result.stdout.removeprefix("ready\n"), [len(cases) for _, _, cases in keys]), result

    def grade(self, program: str, name: str, cases: Sequence[Case]) -> list[str | None]:
        """Per case a short complaint, or None for a pass. Sees only the code and the tests."""
        complaints: list[str | None] = []
        for case, (kind, got) in zip(cases, self.values(program, name, cases), strict=True):
            call = f"{name}({','.join(map(repr, case.args))})"
            if kind == "error":
                complaints.append(f"{call}: {str(got)[:20]}")
            else:
                same = _same(got, case.want)
                complaints.append(None if same else f"{call}={repr(got)[:20]} want {case.want!r}")
        return complaints


def _read_values(stdout: str, counts: Sequence[int]) -> list[list[Any]]:
    """The harness's output as [kind, value] pairs of the complete jobs. Output of a job is untrusted: a line that is
    not a pair counts as a crash in that case."""
    lines = stdout.split("\n")[:-1]
    ends = [end for end in itertools.accumulate(counts) if end <= len(lines)]
    return [[_read_pair(line) for line in lines[end - count : end]] for end, count in zip(ends, counts, strict=False)]


def _read_pair(line: str) -> list[Any]:
    try:
        pair = json.loads(line) if len(line) <= MOST_BYTES else None
    except (ValueError, RecursionError):
        pair = None
    return pair if isinstance(pair, list) and _is_pair(pair) else ["error", "crash"]


def _is_pair(pair: list[Any]) -> bool:
    """Whether a pair is valid: an error must be a class name, a value must not be nested too deep."""
    if len(pair) != 2:
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
    """The judge that families share unless given another. Raises GradingError on a machine that cannot isolate code.

    A program gets one second of CPU time and five seconds of wall time; one that takes five is asleep. Hanging programs
    run one after the other: 16 of them (`ENV_THREADS`), twice, must end within an environment's time (`env_seconds`).
    """
    return Judge(Sandbox(Limits(cpu_s=1, wall_s=5.0, memory_mb=128, processes=2, file_mb=0, output_kb=64)))
