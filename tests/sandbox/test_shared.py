"""What programs share with each other and with the machine: names of signals, locks, caches, load, and time itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from glm5.errors import GradingError
from glm5.sandbox import Job, Limits, Sandbox, SandboxResult, clock, environment, sandbox_available
from glm5.sandbox import sandbox as sandbox_module
from glm5.sandbox.limits import ExecResult

needs_sandbox = pytest.mark.skipif(sandbox_available() is None, reason="this machine cannot isolate programs")
LIMITS = Limits(cpu_s=2, wall_s=8.0, memory_mb=128, processes=4, file_mb=4, output_kb=16)
IGNORED = {17, 18, 23, 28}  # CHLD, CONT, URG, WINCH do nothing unless asked to
STOPPING = {19, 20, 21, 22}


# --- every end of a program is a result


def verdict(code: int) -> SandboxResult:
    return sandbox_module._verdict(ExecResult(code, b"out", b"", None, 0.1), 0.1)


@pytest.mark.parametrize("number", range(1, 65))
def test_every_signal_has_a_name_and_a_result(number: int) -> None:
    result = verdict(-number)
    assert (result.exit_code, result.stdout) == (-number, "out")
    reason = result.killed_reason or ""
    assert reason == "cpu" if number == 24 else reason.startswith("signal SIG")


def test_every_exit_code_is_a_result() -> None:
    for code in range(256):
        assert (verdict(code).exit_code, verdict(code).killed_reason) == (code, None)


@needs_sandbox
@pytest.mark.parametrize("action", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_program_may_end_by_any_signal(action: signal.Handlers) -> None:
    # Python handles 2, 13 and 25; 32 and 33 are the C library's own, and whether they are ignored is inherited. Of the
    # real-time signals behind them, the kernel treats all alike.
    numbers = [number for number in (*range(1, 32), 34, 35, 64) if number not in STOPPING | {2, 13, 25}]
    jobs = [Job(f"import os; os.kill(os.getpid(), {number})") for number in numbers]
    before = signal.signal(signal.SIGHUP, action)  # nohup ignores it
    try:
        results = Sandbox(LIMITS).run_many(jobs)
    finally:
        signal.signal(signal.SIGHUP, before)
    for number, result in zip(numbers, results, strict=True):
        assert result.exit_code == (0 if number in IGNORED else -number), (number, result)
        assert bool(result.killed_reason) == (number not in IGNORED)


@needs_sandbox
def test_a_program_may_end_with_any_status() -> None:
    statuses = {
        "sys.exit()": 0, "sys.exit(None)": 0, "sys.exit('text')": 1, "sys.exit(256)": 0, "sys.exit(-1)": 255,
        "sys.exit(2**80)": 255, "sys.exit(True)": 1, "sys.exit([])": 1, "os._exit(-3)": 253, "os._exit(511)": 255,
        "raise KeyboardInterrupt": -2, "raise SystemExit(SystemExit(4))": 1, "sys.exit(1.5)": 1,
    }  # fmt: skip
    results = Sandbox(LIMITS).run_many([Job(f"import os, sys\n{line}") for line in statuses])
    assert {line: result.exit_code for line, result in zip(statuses, results, strict=True)} == statuses


# --- shared files are no meeting place


@needs_sandbox
def test_locks_on_shared_files_neither_hold_nor_show() -> None:
    """One program locks every way it can, another looks for the locks, and the machine outside takes its own."""
    holder = """
        import fcntl, os, time
        f = open(os.__file__)
        for attempt in (lambda: fcntl.flock(f, fcntl.LOCK_EX), lambda: fcntl.lockf(f, fcntl.LOCK_SH),
                        lambda: fcntl.fcntl(f, 37, b"\\0" * 32), lambda: fcntl.fcntl(f, 1024, fcntl.F_RDLCK)):
            try: attempt()
            except OSError: pass
        time.sleep(1.0)
    """
    seeker = """
        import fcntl, os, struct, time
        f = open(os.__file__)
        asked = struct.pack("hhlli", fcntl.F_WRLCK, 0, 0, 0, 0)
        for _ in range(10):
            try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError: print("BREACH flock")
            except OSError: pass
            for command in (fcntl.F_GETLK, 36):
                try: found = fcntl.fcntl(f, command, asked)
                except OSError: continue
                if found[:2] != struct.pack("h", fcntl.F_UNLCK): print("BREACH lock seen")
            time.sleep(0.08)
    """
    host = """
        import fcntl, os, time
        for _ in range(10):
            with open(os.__file__) as f:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.fcntl(f, fcntl.F_GETLK, bytes(32))
            time.sleep(0.08)
    """
    with subprocess.Popen([sys._base_executable, "-c", textwrap.dedent(host)]) as outside:  # type: ignore[attr-defined]
        first, second = Sandbox(LIMITS).run_many([Job(textwrap.dedent(holder)), Job(textwrap.dedent(seeker))])
    assert outside.returncode == 0, "a program made the machine wait"
    assert (first.exit_code, second.exit_code, second.stdout) == (0, 0, "")


@needs_sandbox
def test_the_machine_can_neither_be_watched_nor_slowed() -> None:
    program = """
        import ctypes, fcntl, mmap, os
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(os.__file__, os.O_RDONLY)
        def attempt(what, function):
            try: function()
            except (OSError, AttributeError): return
            print("BREACH", what)
        def call(what, result):
            if result != -1: print("BREACH", what)
        attempt("load", os.getloadavg)
        attempt("cached?", lambda: os.preadv(descriptor, [bytearray(8)], 0, os.RWF_NOWAIT))
        attempt("fadvise", lambda: os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED))
        attempt("dnotify", lambda: fcntl.fcntl(os.open("/usr/lib", os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS))
        call("sysinfo", libc.sysinfo(ctypes.create_string_buffer(256)))
        call("inotify", libc.inotify_init1(0))
        call("fanotify", libc.fanotify_init(0, 0))
        if libc.syncfs(-1) != 0: print("BREACH syncfs")  # the kernel would refuse it; it is not asked
        call("readahead", libc.readahead(descriptor, ctypes.c_long(0), ctypes.c_size_t(4096)))
        view = mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
        attempt("pageout", lambda: view.madvise(21))
        for number in ((27, 232), (277, 84)):
            call(number, libc.syscall(number[os.uname().machine == "aarch64"], 0, 0, 0, 0))
        for path in ("/proc/loadavg", "/proc/stat", "/proc/self/stat", "/proc/pressure", "/sys/fs/cgroup"):
            attempt(path, lambda: os.stat(path))
    """
    result = Sandbox(LIMITS).run_python(textwrap.dedent(program))
    assert (result.exit_code, result.stdout) == (0, ""), result


@needs_sandbox
def test_ordinary_programs_notice_nothing() -> None:
    program = """
        import fcntl, mmap, os, shelve, sqlite3, tempfile
        with tempfile.NamedTemporaryFile(dir=".") as f:
            f.write(b"x" * 4096); f.flush(); os.fsync(f.fileno()); fcntl.lockf(f, fcntl.LOCK_EX)
            with mmap.mmap(f.fileno(), 0) as view: view[0] = 65; view.flush()
            os.sync(); f.seek(0); print(f.read(2))
        for _ in range(2):
            with sqlite3.connect("x.db") as db:
                db.execute("create table if not exists t (a)"); db.execute("insert into t values (3)")
            print(db.execute("select count(*) from t").fetchone())
            db.close()
        with tempfile.TemporaryDirectory() as folder: print(os.listdir(folder))
        print(os.preadv(os.open(os.__file__, 0), [bytearray(8)], 0))
    """
    result = Sandbox(LIMITS).run_python(textwrap.dedent(program))
    assert (result.exit_code, result.stdout) == (0, "b'Ax'\n(1,)\n(2,)\n[]\n8\n"), result


# --- time that the machine took is not the program's


@pytest.fixture
def busy() -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    yield
    for burner in burners:
        burner.kill()
        burner.wait()


@needs_sandbox
def test_a_busy_machine_does_not_fail_the_start(busy: None) -> None:
    """The wall limit is shorter than building the room takes; it is the program's, so only the program can hit it."""
    box = Sandbox(Limits(cpu_s=2, wall_s=0.02, memory_mb=128, processes=2, file_mb=0))
    for _ in range(3):
        result = box.run_python("import time\ntime.sleep(60)")
        assert (result.killed_reason, result.timed_out) == ("wall", True)


class Waits:
    """What the kernel says of the time that a room waited for a core, call by call."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def __call__(self, pid: int) -> float:
        return self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]


def test_waiting_for_a_core_is_given_back_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(clock, "waited_for_a_core", Waits(0.25, 0.75, 1.0, 1000.0))  # 0.25 s before it started
    left = clock.Clock(1, 2.0).left
    now[0] += 1
    assert left() == 1.0
    now[0] += 1
    assert left() == 0.5  # it waited half a second
    now[0] += 0.5
    assert left() == 0.25
    now[0] += 0.25
    assert left() == clock.MOST_STRETCH * 2.0 - 0.75
    now[0] += 60
    assert left() < 0


def test_the_kernel_is_asked_for_the_whole_tree() -> None:
    assert 0 <= clock.waited_for_a_core(os.getpid()) < 1e6
    assert clock.waited_for_a_core(2**22 + 1) == 0


@needs_sandbox
def test_a_start_that_takes_too_long_is_tried_once_more_and_never_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    box, started, real = Sandbox(LIMITS), [], environment.NamespaceEnvironment._hear

    def hear(room: environment.NamespaceEnvironment, expected: str, most: int = 0) -> tuple[list[str], list[int]]:
        if expected == "ready":
            started.append(1)
            if len(started) <= late:
                raise environment.StartedTooLate("not in time")
        return real(room, expected, most)

    monkeypatch.setattr(environment.NamespaceEnvironment, "_hear", hear)
    late = 1
    assert box.run_python("print(1)").stdout == "1\n" and len(started) == 2
    started.clear()
    late = 9
    with pytest.raises(GradingError, match="did not start within"):
        box.run_python("print(1)")
    assert len(started) == 2
