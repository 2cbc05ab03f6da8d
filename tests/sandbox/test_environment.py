"""Environments: file trees, programs, limits, snapshots, verifier rooms; as root and in a user namespace."""

from __future__ import annotations

import http.server
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5.errors import ConfigError, GradingError
from glm5.sandbox import agent_watch, environment
from glm5.sandbox.environment import (
    NamespaceEnvironment,
    RoomFileError,
    RoomLimits,
    environment_mechanism,
    python_files,
)
from glm5.sandbox.room import interpreter
from glm5.sandbox.room_files import RoomFiles
from tests.rooms import needs_rooms

pytestmark = needs_rooms
SMALL = RoomLimits(memory_mb=256, processes=32, disk_mb=16, cpu_s=20, output_kb=16)
SHARED = """import mmap, time
with open("/dev/zero", "r+b") as file:
    x = mmap.mmap(file.fileno(), 90 << 20)
x.write(b"x" * (90 << 20))
time.sleep(20)"""
ZEROS = (  # a private mapping without reserve that is only read takes memory for page tables alone
    "import mmap, time; n = 160 << 10; x = mmap.mmap(-1, n << 21, 0x4022, mmap.PROT_READ);"
    "sum(x[i << 21] for i in range(n)); time.sleep(20)"
)

CROWD = """
import os, time
try:
    for _ in range(99):
        if not os.fork():
            time.sleep(9)
except OSError:
    time.sleep(0.6)
    os._exit(1)
time.sleep(1)
os._exit(1)
"""


@pytest.fixture(params=["root", "user"])
def mode(request: pytest.FixtureRequest) -> str:
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("only root")
    return str(request.param)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "a.txt").write_text("one\n")
    (tmp_path / "tree" / "deep" / "b.txt").write_text("two\n")
    (tmp_path / "tree" / "private.txt").write_text("three\n")
    (tmp_path / "tree" / "private.txt").chmod(0o600)
    return tmp_path / "tree"


@pytest.fixture
def room(tree: Path, mode: str) -> Iterator[NamespaceEnvironment]:
    with NamespaceEnvironment({"/app": tree}, writable=["/logs"], limits=SMALL, mode=mode) as made:
        yield made


def said(room: NamespaceEnvironment, command: str, **options: object) -> str:
    run = room.exec(command, **options)  # type: ignore[arg-type]
    assert run.exit_code == 0, run
    return run.stdout.decode()


def test_programs_change_a_copy_of_the_tree(room: NamespaceEnvironment, tree: Path) -> None:
    run = room.exec(
        "cat a.txt private.txt; echo more >> a.txt; rm deep/b.txt; touch /new; echo to err >&2; exit 3", cwd="/app"
    )
    assert (run.exit_code, run.stdout, run.stderr, run.stopped) == (3, b"one\nthree\n", b"to err\n", None)
    assert said(room, "cat a.txt; ls deep; ls /new", cwd="/app") == "one\nmore\n/new\n"
    assert (tree / "a.txt").read_text() == "one\n" and (tree / "deep" / "b.txt").exists()
    assert room.exec(["cat"], stdin=b"typed").stdout == b"typed"
    assert said(room, 'echo "$HOME $X"; cd; touch here', env={"X": "y"}) == "/home/agent y\n"
    assert room.exec(["no-such-program"]).exit_code == 127
    assert room.exec("true", cwd="/nowhere").exit_code == 127


def test_what_a_room_must_not_show(room: NamespaceEnvironment, tree: Path) -> None:
    package = Path(__file__).parents[2]
    probe = f"""
    import os, socket
    paths = {[str(tree), str(package), "/root/.bashrc", "/etc/shadow", "/sys/kernel"]!r}
    found = [path for path in paths if os.path.exists(path)]
    calls = dict(write=lambda: os.mkdir("/usr/lib/x"), user=lambda: os.setuid(0), root=lambda: os.chroot("."),
                 device=lambda: os.mknod("/x", 0o20666, 1), memory=lambda: open("/proc/1/mem", "rb"),
                 network=lambda: socket.create_connection(("1.1.1.1", 443), 5))
    for name, call in calls.items():
        try:
            call()
        except OSError:
            continue
        found.append(name)
    found += [number for number in range(3, 99) if os.path.exists(f"/proc/self/fd/{{number}}")]
    os.kill(1, 9)
    print(found, os.path.exists("/proc/1"))
    """
    run = room.exec([interpreter(), "-I", "-c", textwrap.dedent(probe)])
    assert run.stdout == b"[] True\n", run
    assert said(room, "id -u") != "0\n"


@pytest.mark.parametrize(
    ("command", "stopped"),
    [
        ("sleep 30", "wall"),
        ("yes", "output"),
        ("python3 -c 'x = bytearray(300 << 20)'", None),
        (
            "for i in 1 2 3 4; do python3 -c 'import time; x = bytearray(90 << 20); time.sleep(20)' & done; wait",
            "memory",
        ),
        (f"for i in 1 2 3 4; do python3 -c '{SHARED}' & done; wait", "memory"),
        (f"python3 -c '{ZEROS}'", "memory"),
        ("head -c 40M /dev/zero > /tmp/x", "disk"),
        ("head -c 40M /dev/zero > /dev/shm/x", "disk"),
        ("kill -SEGV $$", "signal SIGSEGV"),
        (f"python3 -c '{CROWD}'", "processes"),
    ],
)
def test_limits_are_the_programs_failure(room: NamespaceEnvironment, command: str, stopped: str | None) -> None:
    run = room.exec(command, timeout_s=0.5 if stopped == "wall" else 20.0)
    assert run.stopped == stopped and run.exit_code != 0
    assert len(run.stdout) <= SMALL.output_kb << 10
    room.exec("rm -f /tmp/x /dev/shm/x")
    room.clear()
    assert said(room, "echo fine") == "fine\n"


def test_no_program_flushes_the_machines_disks(room: NamespaceEnvironment) -> None:
    """The kernel would refuse a file that is not open; it is not asked."""
    code = "import ctypes; libc = ctypes.CDLL(None); print(libc.syncfs(-1), libc.fsync(-1)); libc.sync()"
    assert said(room, f"python3 -c '{code}'; /bin/sync && echo done") == "0 0\ndone\n"


def test_a_file_that_many_processes_map_is_no_memory(room: NamespaceEnvironment) -> None:
    """Together they map more than the limit, but of one file, for which the room's disk has a limit."""
    code = 'import mmap, time; x = mmap.mmap(open("/tmp/x", "r+b").fileno(), 0); bytes(x); time.sleep(1)'
    run = room.exec(
        f"head -c 14M /dev/zero > /tmp/x; for i in $(seq 22); do python3 -c '{code}' & done; wait; echo all"
    )
    assert run.stdout == b"all\n" and run.stopped is None, run


def test_memory_between_calls_is_watched_too(room: NamespaceEnvironment) -> None:
    """Nobody waits for these programs: one grows after its caller has left, one is typed into a terminal."""
    grow = "import time; time.sleep(0.3); x = bytearray(90 << 20); time.sleep(60)"
    line = f"for i in 1 2 3 4; do setsid python3 -c '{grow}' & done"
    room.exec(line)
    for _ in range(2):
        deadline = time.monotonic() + 20.0
        while (left := list(agent_watch.tree(room._pid))[1:]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left
        terminal = room.terminal()
        terminal.write(f"{line}\n".encode())
    terminal.close()
    room.clear()
    assert said(room, "echo fine") == "fine\n"


def test_services_live_on_until_they_are_cleared(room: NamespaceEnvironment) -> None:
    started = time.monotonic()
    serve = "setsid python3 -m http.server 9000 --bind 127.0.0.1 >/dev/null 2>&1 & sleep 60 & echo started"
    assert said(room, serve, cwd="/app") == "started\n"
    assert time.monotonic() - started < 30
    fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9000/a.txt', timeout=9).read())"
    script = f'for i in $(seq 100); do python3 -c "{fetch}" 2>/dev/null && exit; sleep 0.1; done; exit 1'
    assert said(room, script) == "b'one\\n'\n"
    room.clear()
    assert room.exec(["python3", "-c", fetch]).exit_code != 0


def test_snapshots(room: NamespaceEnvironment) -> None:
    room.upload({"/app/a.txt": b"changed", "/logs/x/y": b"log"})
    first = room.snapshot()
    said(room, "rm -r /app/deep /logs/x; mv /app/a.txt /app/b.txt; mkdir /app/new; setsid sleep 99 &")
    second = room.snapshot()
    room.restore(first)
    assert said(room, "cat /app/a.txt; ls /app /logs/x") == "changed/app:\na.txt\ndeep\nprivate.txt\n\n/logs/x:\ny\n"
    room.restore(second)
    assert said(room, "cat /app/b.txt; ls /app /logs") == "changed/app:\nb.txt\nnew\nprivate.txt\n\n/logs:\n"
    other = NamespaceEnvironment(limits=SMALL)
    with other, pytest.raises(GradingError, match="another environment"):
        other.restore(second)


def test_files_are_moved_from_outside_and_links_are_never_followed(room: NamespaceEnvironment, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    said(
        room,
        f"cd /app; ln -s {secret} link; ln -s /app here; mkfifo pipe; mkdir folder; truncate -s 15M large",
    )
    for path in (
        "/app/link",
        "/app/here/a.txt",
        "/app/pipe",
        "/app/folder",
        "/app/large",
        "/app/none",
        "/../../app/link",
        "/proc/1/mem",
    ):
        with pytest.raises(RoomFileError, match="of the room"):
            room.download(path, limit=1 << 20)
    assert room.download("/app/../app/a.txt") == b"one\n"
    said(room, "rm /app/large")
    assert sorted(room.download_tree("/app")) == ["a.txt", "deep/b.txt", "private.txt"]
    with pytest.raises(RoomFileError, match="more than 5 bytes"):
        room.download_tree("/app", limit=5)
    room.upload({"/app/link": b"#!/bin/sh\necho mine\n"})
    assert (said(room, "/app/link"), secret.read_text()) == ("mine\n", "secret")
    with pytest.raises(RoomFileError):
        room.upload({"/app/here/x": b""})
    (tmp_path / "up" / "in").mkdir(parents=True)
    (tmp_path / "up" / "in" / "f").write_bytes(b"up")
    (tmp_path / "up" / "l").symlink_to(secret)
    room.upload_tree(tmp_path / "up", "/data/up")
    assert said(room, "cd /data; find . | sort; cat up/in/f; echo x >> up/in/f") == ".\n./up\n./up/in\n./up/in/f\nup"


def test_a_folder_that_may_only_be_listed_looks_empty(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut" / "file").touch()
    (tmp_path / "open").touch()
    (tmp_path / "shut").chmod(0o444)
    files = RoomFiles(os.open(tmp_path, os.O_RDONLY), None)
    try:
        if os.geteuid() == 0:
            os.chmod(tmp_path, 0o755)
            os.seteuid(65534)
        found = [entry.path for entry in files.entries("/")]
    finally:
        os.seteuid(os.getuid())
        os.close(files.root)
        (tmp_path / "shut").chmod(0o755)
    assert found == ["/open", "/shut"]


def test_a_terminal_of_a_room_never_becomes_ours() -> None:
    """A process that leads a session gets the first terminal that it opens, and ends when that does."""
    program = """
import os
from glm5.sandbox.room_files import RoomFileError, RoomFiles
program, terminal = os.openpty()
try:
    RoomFiles(os.open("/", os.O_RDONLY), None).read(os.ttyname(terminal), 1)
except RoomFileError as error:
    print(error)
print(open("/proc/self/stat").read().rpartition(")")[2].split()[4])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, start_new_session=True)
    refusal, owned = done.stdout.splitlines()
    assert (refusal.endswith("is not a regular file."), owned) == (True, "0")


def test_a_path_of_many_folders(tmp_path: Path) -> None:
    files = RoomFiles(os.open(tmp_path, os.O_RDONLY), None)
    deep = "/d" * 1500 + "/file"
    files.write(deep, b"here")
    assert files.read(deep, 9) == b"here"
    with pytest.raises(RoomFileError, match="too long"):
        files.write("/d" * 3000 + "/file", b"")
    os.close(files.root)
    subprocess.run(["/bin/rm", "-rf", str(tmp_path / "d")], check=True)  # too deep for Python's own


def test_at_its_due_time_a_program_ends_whatever_its_limit(room: NamespaceEnvironment) -> None:
    room.due = time.monotonic() + 0.5
    run = room.exec("for i in 1 2 3 4 5 6 7 8; do while :; do :; done & done; wait", timeout_s=60)
    assert (run.stopped, run.seconds < 10) == ("wall", True)


def test_the_verifier_room(room: NamespaceEnvironment) -> None:
    said(
        room,
        "ln -s /etc /tests; ln -s /app/a.txt /logs/reward.txt; echo agent > /tmp/x; echo done > /app/a.txt",
    )
    said(room, "setsid sh -c 'while true; do echo 1 > /logs/reward.txt; echo bad > /app/a.txt; done' >/dev/null 2>&1 &")
    agent = said(room, "id -u")
    room.exec("echo done > /app/a.txt")
    room.clear()
    said(room, "echo done > /app/a.txt")
    with room.verifier({"/tests/t.sh": b"#!/bin/sh\ncat /app/a.txt; ls /logs /tmp; echo 1 > /logs/reward.txt\n"},
                       writable=["/tests", "/logs"]) as judge:  # fmt: skip
        assert judge.exec("/tests/t.sh").stdout == b"done\n/logs:\n\n/tmp:\n"
        assert judge.download("/logs/reward.txt", 10) == b"1\n"
        assert judge.exec("ps | wc -l; test -d /tests -a ! -L /tests").exit_code == 0
        if room._mode == "root":
            assert judge.exec("id -u").stdout.decode() != agent
        judge.exec("echo judged > /app/a.txt")
    with pytest.raises(GradingError, match="not open"):
        room.exec("true")


FILL = """
import os, sys
try:
    if sys.argv[1] == "files":
        for number in range(99999):
            open(f"/tmp/{number}", "x").close()
    for number in range(999):
        with open(f"/tmp/full{number}", "wb", buffering=0) as full:
            full.write(bytes(1 << 20))
            full.write(b"x")
except OSError as error:
    print(error.errno)
"""


@pytest.mark.parametrize("what", ["files", "bytes"])
def test_an_agent_that_leaves_no_space_keeps_no_verifier_out(mode: str, what: str) -> None:
    with NamespaceEnvironment(limits=RoomLimits(disk_mb=4), mode=mode) as room:
        start = room.snapshot()
        assert said(room, f"python3 -c '{FILL}' {what}") == "28\n"
        room.snapshot()
        assert "write error" in room.exec("for i in $(seq 3000); do echo $i > /tmp/x$i; done").stderr.decode()
        with room.verifier({"/tests/t": bytes(2 << 20)}) as judge:
            assert judge.exec("wc -c < /tests/t").stdout == b"2097152\n"
        room.restore(start)
        assert said(room, "head -c 3M /dev/zero > /tmp/y; ls /tmp") == "y\n"


def test_an_agent_that_leaves_strange_folders_breaks_nothing(mode: str, tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("here")
    tool = str(tmp_path.resolve() / "tool")
    top = "/".join(tool.split("/")[:3])  # made in /tmp for the mount
    deep = "import os\nfor _ in range(2000):\n    os.mkdir('d')\n    os.chdir('d')\n"
    with NamespaceEnvironment(read_only=[tool], limits=SMALL, mode=mode) as room:
        assert said(room, f"mv {top} /tmp/away; mkdir -p {tool}/x") == ""
        start = room.snapshot()
        assert said(room, f"python3 -c {shlex.quote(deep)}; cat {tool}", cwd="/home/agent") == "here"
        with room.verifier() as judge:
            assert judge.exec(["/bin/cat", tool]).stdout == b"here"
        room.restore(start)
        assert said(room, "ls /home/agent") == ""


def test_a_verifier_runs_programs_of_the_machine(room: NamespaceEnvironment, tmp_path: Path) -> None:
    change = "import os; open('/etc/ld.so.preload', 'w').write('/x.so')\n"
    places = [place for place in ("/usr", "/usr/local") if place != sys.base_prefix]
    change += f"for d in {places}: open(d + '/pyvenv.cfg', 'w').write('home = /opt/bin')\n"
    image = [f"lib/python{sys.version_info[0]}{sys.version_info[1]}.zip", "bin/pybuilddir.txt", "bin/Modules"]
    change += f"for f in {image}: open('/usr/local/' + f, 'w')\n"  # an image's Python looks there for its library
    change += "for d in ('/bin', '/lib64'): os.rename(d, '/old' + d[1:]); os.mkdir(d); open(d + '/sh', 'w')"
    assert room.exec(["/usr/bin/env", "python3", "-c", change]).exit_code == 0
    with room.verifier() as judge:
        look = "readlink /bin; cat /etc/ld.so.preload /usr/pyvenv.cfg /usr/local/pyvenv.cfg; cd /usr/local; ls "
        look += " ".join(image)
        assert judge.exec(["/bin/sh", "-c", look]).stdout == b"usr/bin\n"
    assert python_files("/usr/bin/python3", "/usr", "/usr/local") == []
    (tmp_path / "bin").mkdir()
    found = python_files(f"{tmp_path}/bin/python3", str(tmp_path), str(tmp_path))
    assert found == sorted([f"{tmp_path}/bin/python3", os.path.dirname(os.__file__)])


def test_what_the_machine_has_in_usr_local_is_its_own_for_a_verifier(room: NamespaceEnvironment) -> None:
    """In images of a language its programs lie there. What an agent adds stays."""
    files = (Path(folder, name) for folder, _, names in os.walk("/usr/local") for name in names)
    path = next((path for path in files if path.is_file() and os.access(path, os.R_OK)), None)
    change = "mkdir -p /usr/local/bin; echo new > /usr/local/bin/more; echo x > /usr/local/bin/more2"
    said(room, f"{change}; {f'rm {path}; mkdir {path}' if path else 'true'}")
    with room.verifier() as judge:
        assert judge.exec("cat /usr/local/bin/more; rm /usr/local/bin/more2; ls /usr/local/bin/more*").stdout == (
            b"new\n/usr/local/bin/more\n"
        )
        assert path is None or judge.exec(["/usr/bin/cmp", str(path), "-"], stdin=path.read_bytes()).exit_code == 0


def test_too_many_snapshots_are_refused_and_the_room_goes_on(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "MOST_LAYERS", 2)
    with NamespaceEnvironment(limits=SMALL, mode=mode) as room:
        first = room.snapshot()
        room.snapshot()
        with pytest.raises(GradingError, match="restore an earlier snapshot"):
            room.snapshot()
        assert said(room, "echo fine") == "fine\n"
        room.restore(first)
        room.snapshot()


def test_our_own_package_is_hidden_and_nothing_can_be_left_there(mode: str) -> None:
    repository = Path(environment.__file__).parents[2]
    with NamespaceEnvironment(read_only=[repository.parent], writable=["/logs"], limits=SMALL, mode=mode) as room:
        assert room.exec(f"ls -A {repository}; touch {repository}/x").stdout == b""
        assert room.exec(f"touch {repository}/x").exit_code != 0
        with room.verifier() as judge:
            listed = judge.exec(f"ls -A {repository} && ls -A /logs")
            assert (listed.exit_code, listed.stdout) == (0, b"")


def test_what_is_shown_of_a_hidden_folder(mode: str) -> None:
    """If glm5 is installed beside the machine's Python, the test runners of the SWE tasks lie in what is hidden."""
    package = Path(environment.__file__).parents[1]
    shown = package / "tasks/swe/in_room"
    with NamespaceEnvironment(read_only=[package.parents[1], shown], limits=SMALL, mode=mode) as room:
        seen = room.exec(f"ls {package} {package}/tasks {shown}/runner.py; touch {package}/x {shown}/x").stdout.decode()
        assert seen.split() == [f"{shown}/runner.py", f"{package}:", "tasks", f"{package}/tasks:", "swe"]
        assert room.exec(f"touch {package}/x || touch {package}/tasks/x || touch {shown}/x").exit_code != 0


def test_shown_paths_below_fresh_folders_stay(tmp_path: Path, mode: str) -> None:
    (tmp_path / "tool").write_text("here")
    assert str(tmp_path).startswith("/tmp/")
    with NamespaceEnvironment(read_only=[tmp_path], limits=SMALL, mode=mode) as made:
        assert said(made, f"cat {tmp_path}/tool") == "here"
        with made.verifier() as judge:
            assert judge.exec(["/bin/cat", f"{tmp_path}/tool"]).stdout == b"here"


def test_after_the_verifier_a_snapshot_comes_back(room: NamespaceEnvironment) -> None:
    before = room.snapshot()
    with room.verifier({"/app/a.txt": b"judge"}):
        pass
    room.restore(before)
    assert said(room, "cat /app/a.txt") == "one\n"


def test_the_gateway_is_reached_and_nothing_else(mode: str) -> None:
    class Hello(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        fetch = "import sys, urllib.request as u; print(u.urlopen('http://127.0.0.1:' + sys.argv[1], timeout=9).read())"
        with NamespaceEnvironment(gateway=("127.0.0.1", port), limits=SMALL, mode=mode) as room:
            assert room.exec(["python3", "-c", fetch, "8100"]).stdout == b"b'hello'\n"
            assert room.exec(["python3", "-c", fetch, str(port)]).exit_code != 0
            with room.verifier() as judge:
                assert judge.exec(["python3", "-c", fetch, "8100"]).exit_code != 0
        server.shutdown()


def test_a_terminal(room: NamespaceEnvironment) -> None:
    with room.terminal(columns=100, rows=30, cwd="/app") as terminal:
        terminal.write(b"stty size; tty; echo $((6 * 7))\n")
        seen = b""
        while b"42\r\n" not in seen:
            seen += terminal.read(0.2)
        assert b"30 100" in seen and b"/dev/pts/" in seen
        terminal.write(b"sleep 300 &\ncat\n")
        terminal.read(0.3)
    assert said(room, "sleep 0.3; ps -e -o comm= | grep -c '^sleep$' || true") in ("0\n", "1\n")


def test_a_program_that_stops_others_before_they_start(mode: str) -> None:
    """What it stops between fork and execution must not hold up the room."""
    stop = """
import os
if os.fork():
    os._exit(0)
os.setsid()
while True:
    for pid in range(os.getpid() + 1, os.getpid() + 40):
        try:
            os.kill(pid, 19)
        except OSError:
            pass
"""
    with NamespaceEnvironment(limits=SMALL, mode=mode) as room:
        room.exec(["python3", "-c", stop])
        for _ in range(3):
            assert room.exec(["true"], timeout_s=1.0).exit_code in (0, 127, -9)
        room.clear()
        assert said(room, "echo fine") == "fine\n"


def test_several_layers_and_strange_names(tmp_path: Path, mode: str) -> None:
    for name, text in (("top:,", "top"), ("low er\\", "low")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same").write_text(text)
        (tmp_path / name / text).write_text(text)
    with NamespaceEnvironment({"/w": [tmp_path / "top:,", tmp_path / "low er\\"]}, limits=SMALL, mode=mode) as room:
        assert said(room, "cd /w; ls; cat same") == "low\nsame\ntop\ntop"


@pytest.mark.parametrize("path", ["relative", "/", "/usr", "/a/../b", "/etc"])
def test_trees_that_are_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="environment"):
        NamespaceEnvironment({path: tmp_path})


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    code = """
    import sys, time
    from glm5.sandbox.environment import NamespaceEnvironment
    with NamespaceEnvironment() as room:
        room.exec("setsid sleep 7777 >/dev/null 2>&1 &")
        print(room._keeper.pid, flush=True)
        room.exec("sleep 7777")
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    keeper = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and os.path.exists(f"/proc/{keeper}"):
        time.sleep(0.05)
    left = [pid for pid in os.listdir("/proc") if pid.isdigit() and b"7777" in _command(pid)]
    assert (os.path.exists(f"/proc/{keeper}"), left, list(tmp_path.iterdir())) == (False, [], [])
    parent.stdout.close()


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_the_mechanism_is_tried_before_use() -> None:
    assert environment_mechanism() == ("root" if os.geteuid() == 0 else "user")
