"""The sandbox under attack. Each test is a real attempt, judged from outside wherever it could leave a trace."""

from __future__ import annotations

import errno
import os
import signal
import socket
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import ConfigError, GradingError
from glm5.sandbox import Job, Limits, Sandbox, programs, sandbox_available
from glm5.sandbox import launcher as sandbox_launcher
from glm5.sandbox import room as sandbox_room
from glm5.sandbox import sandbox as sandbox_module

pytestmark = pytest.mark.skipif(sandbox_available() is None, reason="this machine cannot isolate programs")

QUICK = Limits(cpu_s=2, wall_s=10.0, memory_mb=128, processes=4, file_mb=4, output_kb=16)


@pytest.fixture(scope="module")
def box() -> Sandbox:
    return Sandbox(QUICK)


def run(box: Sandbox, source: str) -> str:
    result = box.run_python(textwrap.dedent(source))
    assert result.exit_code == 0, result
    return result.stdout


def test_plain_program_sees_its_files_and_stdin(box: Sandbox) -> None:
    source = "import sys, sub.helper\nprint(sub.helper.x, open('data.txt').read(), sys.stdin.read())"
    result = box.run_python(
        "import sys; sys.path.insert(0, '.')\n" + source,
        files={"sub/helper.py": "x = 7\n", "data.txt": "é\n"},
        stdin="in",
    )
    assert (result.exit_code, result.stdout, result.stderr) == (0, "7 é\n in\n", "")
    assert not result.timed_out and result.killed_reason is None


def test_failure_is_reported_as_it_is(box: Sandbox) -> None:
    result = box.run_python("import sys\nprint('out')\nsys.stderr.write('err')\nsys.exit(3)")
    assert (result.exit_code, result.stdout, result.stderr, result.killed_reason) == (3, "out\n", "err", None)
    assert "ZeroDivisionError" in box.run_python("1/0").stderr
    assert box.run_python("import os; os.abort()").killed_reason == "signal SIGABRT"


def test_network_is_closed_even_on_loopback(box: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        source = f"""
            import socket
            for family, address in ((socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
                                    (socket.AF_INET, ("1.1.1.1", 53)), (40, (2, 1)), (socket.AF_UNIX, "\\0x")):
                try:
                    s = socket.socket(family, socket.SOCK_STREAM)
                    s.settimeout(1)
                    s.connect(address)
                    print("open", family)
                except OSError as e:
                    print("closed", e.errno)
        """
        assert run(box, source) == f"closed {errno.EPERM}\n" * 4
        with pytest.raises(BlockingIOError):
            server.accept()


def test_only_the_box_is_writable(box: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    source = f"""
        import os, sys
        targets = [{str(tmp_path / "x")!r}, "/x", "/etc/x", "/usr/lib/x", "/dev/x", os.path.dirname(os.__file__) + "/x",
                   os.__file__, sys.executable, "/etc/ld.so.cache"]
        for target in targets:
            try:
                open(target, "a").write("x")
                print("wrote", target)
            except OSError:
                pass
        open("x", "w").write("x")
        print(sorted(os.listdir(".")))
    """
    assert run(box, source) == "['main.py', 'x']\n"
    assert not (tmp_path / "x").exists()
    assert run(box, "import os; print(os.listdir('.'))") == "['main.py']\n"


def test_secrets_are_out_of_sight(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    repository = str(Path(sandbox_module.__file__).parent)
    source = f"""
        import os
        for path in ("/etc/shadow", "/etc/passwd", {str(secret)!r}, {repository!r}, "/home", "/proc/self", "/sys",
                     "/root/.bashrc", "/var", "/run"):
            if os.path.lexists(path):
                print("visible", path)
        try:
            import glm5
            print("imported", glm5)
        except ImportError:
            pass
        print(sorted(k for k in os.environ if k not in ("PATH", "HOME", "TMPDIR", "LC_CTYPE")))
        for name in os.listdir("/dev"):
            if name not in ("null", "urandom"): print(name)
        for fd in range(3, 256):
            try:
                os.fstat(fd); print("descriptor", fd)
            except OSError:
                pass
    """
    assert run(box, source) == "[]\n"


def test_symbolic_links_do_not_lead_out(box: Sandbox) -> None:
    source = """
        import os
        os.symlink("/etc/shadow", "a"); os.symlink("/", "b"); os.symlink("../../../../..", "c")
        os.mkdir("d"); os.rename("d", "e")
        for path in ("a", "b/etc/shadow", "c/etc/shadow", "c/work", "b/proc/1/root/etc/shadow"):
            print(os.path.exists(path), end=" ")
        for attempt in (lambda: os.chroot("e"), lambda: os.link("/usr/lib", "f"),
                        lambda: os.mknod("g", 0o60666, os.makedev(254, 0))):
            try:
                attempt(); print("worked")
            except OSError:
                print("refused", end=" ")
    """
    assert run(box, source).split() == ["False"] * 5 + ["refused"] * 3


def test_it_holds_no_privileges(box: Sandbox) -> None:
    source = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(os.getuid() != 0, os.getgroups() in ([], [65534]))
        for attempt in (lambda: os.setuid(0), lambda: os.setgroups([]), lambda: os.nice(-5)):
            try:
                attempt(); print("worked")
            except OSError:
                pass
        print(libc.unshare(0x10000000), libc.mount(b"x", b"/box", b"tmpfs", 0, None), libc.umount2(b"/box", 2))
        print(libc.ptrace(16, 1, None, None), libc.syscall(319, b"x", 0), libc.prctl(23, 0, 0, 0, 0) <= 0)
        print(os.path.ismount("/box"))
    """
    assert run(box, source) == "True True\n-1 -1 -1\n-1 -1 True\nTrue\n"


def test_fork_bomb_stops_at_the_process_limit(box: Sandbox) -> None:
    source = """
        import os, time
        born = 0
        for _ in range(200):
            try:
                pid = os.fork()
            except BlockingIOError:
                break
            if pid == 0:
                time.sleep(60); os._exit(0)
            born += 1
        print(born)
    """
    assert 0 < int(run(box, source)) <= QUICK.processes + 1
    bomb = Sandbox(Limits(wall_s=0.5, processes=4)).run_python(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    )
    assert bomb.timed_out


def test_two_runs_do_not_share_a_process_count(box: Sandbox) -> None:
    source = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: time.sleep(1); os._exit(0)\nprint('fine')"
    assert [r.stdout for r in box.run_many([Job(source)] * 2)] == ["fine\n"] * 2


@pytest.mark.parametrize(
    ("ranges", "own"),
    [
        ("0 0 4294967295\n", 1_000_000_000 + os.getpid()),
        ("0 1000 1\n1 100000 65536\n", 20_000 + os.getpid() % 40_000),
        ("0 1000 1\n", 65534),
    ],
    ids=["all", "container", "one"],
)
def test_every_run_has_an_identity_of_its_own(tmp_path: Path, ranges: str, own: int) -> None:
    """With a common one, programs that run side by side share a process count, and the second cannot start."""
    path = tmp_path / "map"
    path.write_text(ranges)
    assert sandbox_launcher.sandbox_uid(True, (str(path), str(path))) == own


def test_memory_bombs(box: Sandbox) -> None:
    assert "MemoryError" in box.run_python("x = bytearray(10**9)").stderr
    disk = box.run_python("for i in range(99):\n    open(str(i), 'wb').write(bytes(1 << 20))")
    assert disk.exit_code == 1 and "No space left" in disk.stderr
    assert "File too large" in box.run_python("open('x', 'wb').truncate(1 << 30)").stderr
    inodes = "import os\nfor i in range(10**6): os.mkdir(str(i))"
    assert box.run_python(inodes).exit_code != 0


def test_infinite_loops_end() -> None:
    busy = Sandbox(Limits(cpu_s=1, wall_s=20.0)).run_python("while True: pass")
    assert (busy.timed_out, busy.killed_reason, busy.exit_code) == (True, "cpu", -signal.SIGXCPU)
    asleep = Sandbox(Limits(wall_s=0.5)).run_python("import time; print('hi', flush=True); time.sleep(99)")
    assert (asleep.timed_out, asleep.killed_reason, asleep.stdout) == (True, "wall", "hi\n")


def test_flood_of_output_is_cut(box: Sandbox) -> None:
    flood = box.run_python("import sys\nfor _ in range(100): sys.stdout.write('x' * 2**20)")
    assert flood.killed_reason == "output" and flood.stdout == "x" * QUICK.output_kb * 1024
    assert not flood.timed_out


def test_a_flood_before_anybody_listens_is_the_programs(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the start and the flood may be there together; the sandbox has not failed then."""
    finish = programs.Run.finish

    def late(run: Any, *rest: Any) -> Any:
        assert run.selector.select(30)
        time.sleep(0.2)
        return finish(run, *rest)

    monkeypatch.setattr(programs.Run, "finish", late)
    result = box.run_python("print('x' * 60_000, flush=True)")
    assert result.killed_reason == "output" and len(result.stdout) == 16 * 1024


def test_parents_and_strangers_cannot_be_killed(box: Sandbox) -> None:
    source = f"""
        import os, signal
        for pid in (1, -1, os.getppid(), {os.getpid()}, -{os.getpgrp()}):
            for sig in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
                try:
                    os.kill(pid, sig)
                except OSError:
                    pass
        print("alive")
    """
    assert run(box, source) == "alive\n"


def test_nothing_survives_the_run(box: Sandbox) -> None:
    """A daemon that left the session holds stdout open; the run ends all the same, because its world ends."""
    source = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(9999)\nprint('parent')"
    result = box.run_python(source)
    assert (result.exit_code, result.stdout, result.timed_out) == (0, "parent\n", False)


def test_results_come_in_order(box: Sandbox) -> None:
    jobs = [Job(f"import time; time.sleep({0.2 if i == 0 else 0}); print({i})") for i in range(5)]
    assert [result.stdout for result in box.run_many(jobs)] == [f"{i}\n" for i in range(5)]


def test_no_temporary_folder_is_left(box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    box.run_python("print(1)")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "main.py"])
def test_file_names_stay_inside(box: Sandbox, name: str) -> None:
    with pytest.raises(ConfigError, match="relative path"):
        box.run_python("pass", files={name: "x"})


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="memory_mb"):
        Limits(memory_mb=0)


def test_refuses_without_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "_probe", lambda: (None, "unshare: Operation not permitted"))
    assert sandbox_available() is None
    with pytest.raises(GradingError, match="unshare: Operation not permitted"):
        Sandbox()


def test_broken_sandbox_is_not_the_programs_fault(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, links, hidden = sandbox_room.view()
    monkeypatch.setattr(sandbox_room, "view", lambda: ((*shown, "/nowhere/at/all"), links, hidden))
    with pytest.raises(GradingError, match="did not start"):
        box.run_python("print(1)")
