"""Runs a program of the policy on many inputs in one sandbox run, each input in a process of its own.

The sandbox gets the program and the inputs only; what comes out is compared outside of it, so a program must compute
what is expected. Values that JSON has not, such as tuples and sets, keep their type.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from glm5.errors import GradingError
from glm5.sandbox.sandbox import NO_FILES, Limits, Sandbox

Mode = Literal["call", "stdin"]
CASE_S = 6
"""Seconds of one input."""
MOST_S = 1800.0
"""Seconds of all inputs together: enough for the processor time of 256."""
MOST_SHOWN = 1 << 18
"""Bytes of one output."""
FAILED: Any = object()
"""What stands for the output of a program that failed, or took too long."""

HARNESS = """\
import json, os, resource, select, signal, sys, time, types

order = json.loads(sys.stdin.read())
source, name, mode, seconds, most = order["program"], order["name"], order["mode"], order["seconds"], order["most"]

def tagged(value):
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else {"float": repr(value)}
    if isinstance(value, list):
        return [tagged(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [tagged(one) for one in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((tagged(one) for one in value), key=repr)}
    if isinstance(value, dict):
        return {"dict": sorted(([tagged(key), tagged(one)] for key, one in value.items()), key=repr)}
    return {"other": repr(value)[:1000]}

def made(value):
    if isinstance(value, list):
        return [made(one) for one in value]
    if not isinstance(value, dict):
        return value
    (kind, data), = value.items()
    if kind == "dict":
        return {made(key): made(one) for key, one in data}
    return {"complex": complex, "tuple": tuple, "set": set}[kind](made(data))

def play(case, out):
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    signal.alarm(2 * seconds)
    space = {"__name__": "__main__" if mode == "stdin" else "solution"}
    with open("case", "w+", encoding="utf-8") as given:
        if mode == "stdin":
            given.write(case)
            given.flush()
        given.seek(0)
        os.dup2(given.fileno(), 0)
    os.dup2(out if mode == "stdin" else os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdin, sys.stdout = os.fdopen(0, encoding="utf-8"), os.fdopen(1, "w", encoding="utf-8")
    types.FunctionType(compile(source, "solution", "exec"), space)()
    if mode == "stdin":
        sys.stdout.flush()
        return
    found = space[name] if name in space else getattr(space["Solution"](), name)
    data = json.dumps(tagged(found(*made(case)))).encode()
    while data:
        data = data[os.write(out, data):]

for case in order["cases"]:
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(here)
            os.close(3)
            play(case, there)
            code = 0
        except SystemExit as error:
            sys.stdout.flush()
            code = 0 if mode == "stdin" and error.code in (None, 0) else 1
        except BaseException:
            pass
        finally:
            os._exit(code)
    os.close(there)
    data, end = b"", time.monotonic() + 2 * seconds + 1  # also for a program that ignores its alarm
    late = False
    while len(data) <= most and not late:
        late = not select.select([here], [], [], max(0, end - time.monotonic()))[0]
        chunk = b"" if late else os.read(here, 65536)
        if not chunk:
            break
        data += chunk
    os.close(here)
    ended = 0
    while not ended:
        late = late or time.monotonic() > end
        if late or len(data) > most:
            os.kill(child, 9)
        ended, status = os.waitpid(child, 0 if late or len(data) > most else os.WNOHANG)
        if not ended:
            time.sleep(0.001)
    status = os.waitstatus_to_exitcode(status)
    late = late or status in (-signal.SIGXCPU, -signal.SIGALRM)
    good = status == 0 and not late and len(data) <= most
    os.write(3, (json.dumps(data.decode("utf-8", "replace") if good else False if late else None) + "\\n").encode())
    if late or not (good or order["trusted"]):
        break
"""


def outputs(
    program: str,
    cases: Sequence[Any],
    mode: Mode,
    name: str = "",
    *,
    trusted: bool = False,
    wall_s: float | None = None,
) -> list[Any]:
    """What a program gives for each case: with "call" the tagged value of its function `name` for a list of arguments,
    with "stdin" what it prints for a text. FAILED for a failure and for what comes after it.

    A `trusted` program goes on after a failure; if it takes too long or a case is not run, that is a GradingError, as
    it is if the sandbox fails. `wall_s` is for all cases, by default what each may take alone, at most MOST_S.
    """
    wall_s = wall_s or min(30.0 + len(cases) * (2 * CASE_S + 2), MOST_S)
    limits = Limits(cpu_s=60 + len(cases), wall_s=wall_s, memory_mb=1024, processes=4, file_mb=16, output_kb=1 << 15)
    sent = [_tagged(case) for case in cases] if mode == "call" else list(cases)
    order = {"program": program, "name": name, "mode": mode, "seconds": CASE_S, "most": MOST_SHOWN, "cases": sent}
    order["trusted"] = trusted
    source = "import os\nos.dup2(1, 3)\nos.set_inheritable(3, False)\n" + HARNESS
    done = Sandbox(limits).run_python(source, NO_FILES, json.dumps(order))
    if not done.stdout and done.exit_code not in (0, None) and done.killed_reason is None:
        raise GradingError(f"the harness did not start in the sandbox: {done.stderr.strip()[-200:]}")
    lines = done.stdout.split("\n")[:-1][: len(cases)]
    found: list[Any] = []
    for line in lines:
        try:
            said = json.loads(line)
            if trusted and said is False:
                raise GradingError(
                    f"input {len(found) + 1} of {len(cases)} took too long: the machine may be too busy."
                )
            found.append(FAILED if said is None or said is False else said if mode == "stdin" else json.loads(said))
        except (ValueError, RecursionError):
            found.append(FAILED)
    missing = len(cases) - len(found)
    if missing and trusted:
        reason = f"{done.killed_reason} limit" if done.killed_reason else "the harness ended"
        raise GradingError(f"{missing} of {len(cases)} inputs were not run ({reason}): the machine may be too busy.")
    return found + [FAILED] * missing


def _tagged(value: Any) -> Any:
    """A value as the harness reads it."""
    if isinstance(value, dict):
        return {"dict": [[_tagged(key), _tagged(one)] for key, one in value.items()]}
    if isinstance(value, tuple | set):
        return {type(value).__name__: [_tagged(one) for one in value]}
    if isinstance(value, complex):
        return {"complex": str(value)}
    return [_tagged(one) for one in value] if isinstance(value, list) else value


def same_value(got: Any, want: Any, tolerance: float = 0.0, sequences: bool = False) -> bool:
    """Whether tagged values are equal, numbers within a tolerance. `sequences`: a tuple may stand for a list."""
    if sequences:
        got, want = untupled(got), untupled(want)
    if isinstance(got, int | float) and isinstance(want, int | float):
        if got == want or tolerance <= 0:
            return bool(got == want)
        try:
            return abs(got - want) <= tolerance + 1e-7 * abs(want)
        except OverflowError:  # an integer beyond all floats
            return False
    if isinstance(got, list) and isinstance(want, list):
        return len(got) == len(want) and all(
            same_value(a, b, tolerance, sequences) for a, b in zip(got, want, strict=True)
        )
    if isinstance(got, dict) and isinstance(want, dict):
        return got.keys() == want.keys() and all(same_value(got[k], want[k], tolerance, sequences) for k in want)
    return type(got) is type(want) and bool(got == want)


def untupled(value: Any) -> Any:
    """The members of a tagged tuple as a list; other values as they are."""
    return value["tuple"] if isinstance(value, dict) and set(value) == {"tuple"} else value


def same_text(got: str, want: str) -> bool:
    """Whether two outputs have the same lines of the same words, numbers by value."""
    ours, theirs = ([line.split() for line in text.strip().splitlines()] for text in (got, want))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _same_word(got: str, want: str) -> bool:
    if got == want:
        return True
    try:
        return Decimal(got) == Decimal(want)
    except InvalidOperation:
        return False
