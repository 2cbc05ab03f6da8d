"""Rooms for agents as their users see them: files in and out, limits, cancelling, workers."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import ConfigError, GradingError
from glm5.sandbox import agent_request, environment, starter
from glm5.sandbox.agent_room import AgentRun, run_agent
from glm5.sandbox.agent_workers import AgentWorkers
from glm5.sandbox.cancel import CancelToken
from glm5.sandbox.room import Limits
from tests.rooms import needs_rooms, rooms_left

pytestmark = needs_rooms
LIMITS = Limits(cpu_s=20, wall_s=20.0, memory_mb=256, processes=16, file_mb=4, output_kb=16)
SESSION = {"base_path": "/sessions/a/v1", "api_key": "sk-a"}
Run = Callable[..., AgentRun]


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    """A Unix socket that echoes."""
    folder = tempfile.mkdtemp(prefix="gateway-")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen(64)

        def echo(one: socket.socket) -> None:
            with one:
                while chunk := one.recv(65536):
                    one.sendall(chunk)

        def serve() -> None:
            while True:
                try:
                    one, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=echo, args=(one,), daemon=True).start()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"{folder}/socket"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    os.unlink(f"{folder}/socket")
    os.rmdir(folder)


@pytest.fixture
def run(gateway: str) -> Run:
    def go(command: str | list[str], files: Any = None, limits: Limits = LIMITS, **options: Any) -> AgentRun:
        words = ["bash", "-c", command] if isinstance(command, str) else command
        return run_agent(words, files or {}, gateway_socket=gateway, limits=limits, **{**SESSION, **options})

    return go


def in_python(source: str) -> list[str]:
    return ["python3", "-c", source]


def test_a_command_with_its_files_and_variables(run: Run) -> None:
    files: dict[str, str | bytes] = {
        "sub/a.txt": "é",
        "raw": bytes(range(256)),
        "go.sh": "#!/bin/sh\ncat sub/a.txt > sub/b\n",
    }
    script = "./go.sh && rm raw && echo $OPENAI_BASE_URL $ANTHROPIC_BASE_URL $GLM5_API_KEY $MINE; yes | head -1; exit 3"
    found = run(script, files, env={"MINE": "1"})
    url = "http://127.0.0.1:8100/sessions/a"
    assert (found.exit_code, found.stdout, found.stderr) == (3, f"{url}/v1 {url} sk-a 1\ny\n", "")
    assert found.killed_reason is None and found.files["sub/b"] == "é".encode()
    assert sorted(found.files) == ["go.sh", "sub/a.txt", "sub/b"]
    assert run("echo out > /dev/stdout; echo err > /dev/stderr").stderr == "err\n"
    assert run(in_python("print(open('raw', 'rb').read() == bytes(range(256)))"), files).stdout == "True\n"


def test_bytes_pass_unchanged_and_many_connections_at_once(run: Run) -> None:
    source = """
import os, socket, threading
def one(size):
    data = os.urandom(size)
    with socket.create_connection(("127.0.0.1", 8100)) as made:
        sender = threading.Thread(target=lambda: (made.sendall(data), made.shutdown(socket.SHUT_WR)))
        sender.start()
        back = b""
        while chunk := made.recv(65536): back += chunk
        sender.join()
    print(back == data)
threads = [threading.Thread(target=one, args=(size,)) for size in (0, 1, 65536, 1 << 22)]
for thread in threads: thread.start()
for thread in threads: thread.join()
held = [socket.create_connection(("127.0.0.1", 8100)) for _ in range(100)]  # more than are forwarded at a time
for one in held[:60]: one.close()
held[-1].sendall(b"late")
print(held[-1].recv(10))
"""
    found = run(in_python(source))
    assert found.stdout == "True\n" * 4 + "b'late'\n", found


def test_what_is_read_back(run: Run, tmp_path: Path) -> None:
    """Regular files only, whatever their names, modes and sizes; links are not followed."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    source = f"""
import os, socket
os.symlink({str(secret)!r}, "link"); os.symlink("/etc/passwd", "passwd"); os.symlink("/", "root"); os.symlink("x", "x")
os.mkfifo("fifo"); socket.socket(socket.AF_UNIX).bind("socket")
os.mkdir("closed"); open("closed/file", "w").write("in"); os.chmod("closed/file", 0); os.chmod("closed", 0)
open(b"\\xff\\n;'$(x)".decode("utf-8", "surrogateescape"), "w").write("odd")
open("n" * 255, "w").write("long"); open("...", "w").write("dots"); open(" ", "w").write("space")
open("one", "w").write("1"); os.link("one", "two")
for name in ("sparse", "sparse2"): os.truncate(os.open(name, os.O_CREAT | os.O_RDWR), 4 << 20)
top = os.getcwd()
for _ in range(1200):
    os.mkdir("d" * 20); os.chdir("d" * 20)
open("deep", "w").close()
"""
    found = run(in_python(source))
    assert (found.exit_code, found.stderr) == (0, "")
    assert found.files == {
        "closed/file": b"in", "\udcff\n;'$(x)": b"odd", "n" * 255: b"long", "...": b"dots", " ": b"space",
        "one": b"1", "two": b"1",
    }  # fmt: skip
    assert found.left_out == ("sparse", "sparse2")


def test_a_daemon_does_not_outlive_the_agent(run: Run, tmp_path: Path) -> None:
    source = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: open("late", "a").write("x"); time.sleep(0.01)
    os._exit(0)
os.wait(); time.sleep(0.1)
"""
    found = run(in_python(source))
    assert found.exit_code == 0 and "late" in found.files
    assert not rooms_left()


def test_a_cancelled_agent_ends_at_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    token = CancelToken()
    timer = threading.Timer(0.4, token.cancel)
    timer.start()
    started = time.monotonic()
    with pytest.raises(GradingError, match="interrupted"):
        run("sleep 100 & sleep 100", token=token)
    assert time.monotonic() - started < 3
    with pytest.raises(GradingError, match="interrupted"):
        run("true", token=token)
    timer.join()
    token.close()
    assert not rooms_left() and list(tmp_path.iterdir()) == []


def test_packages_of_the_caller_are_read_only(run: Run, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    package = tmp_path / "packages" / "theirs"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("x = 7")
    (tmp_path / "other").write_text("unseen")
    source = f"""
import os, sys
sys.path.insert(0, {str(package.parent)!r})
import theirs
print(theirs.x, os.listdir({str(tmp_path)!r}))
try: open({str(package / "new")!r}, "w")
except OSError as error: print(error.errno)
"""
    found = run(in_python(source), read_only=[package.parent])
    assert found.stdout == "7 ['packages']\n30\n", found
    link = tmp_path / "link"
    link.symlink_to(package.parent)
    assert run(["ls", str(link)], read_only=[link]).stdout == "theirs\n"
    if os.geteuid() == 0:
        package.parent.chmod(0o700)
        with pytest.raises(GradingError, match="may not read"):
            run("true", read_only=[package.parent])


def test_our_own_package_is_hidden(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifiers and hidden tests are in it, also if it is installed beside the agent's packages."""
    tmp_path.chmod(0o755)
    package = tmp_path / "site-packages" / "glm5" / "sandbox"
    package.mkdir(parents=True)
    (package / "secret.py").write_text("")
    monkeypatch.setattr(agent_request, "PACKAGE", package.parent)
    found = run(["ls", str(package.parents[1]), str(package.parent)], read_only=[package.parents[1]])
    assert "glm5\n" in found.stdout and "sandbox" not in found.stdout, found


def test_nothing_stays_open(run: Run) -> None:
    run("true")
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        run("true")
        with pytest.raises(GradingError):
            run(["nothing"])
    assert len(os.listdir("/proc/self/fd")) <= len(before)  # what earlier tests left may be closed meanwhile


def test_what_the_caller_may_not_ask_for(run: Run, tmp_path: Path) -> None:
    for name in ("/etc/x", "../x", "a/../../x", "", "nul\0"):
        with pytest.raises(ConfigError, match="agent file"):
            run("true", {name: ""})
    for path in ("/", "/tmp", "/proc/1", "/etc", "/dev/shm", "/box", str(tmp_path / "none")):
        with pytest.raises(ConfigError, match="path"):
            run("true", read_only=[path])
    for variable in ({"": "x"}, {"a=b": "x"}, {"a": "\0"}):
        with pytest.raises(ConfigError, match="variable"):
            run("true", env=variable)
    with pytest.raises(ConfigError, match="base_path"):
        run("true", base_path="http://x")
    with pytest.raises(ConfigError, match="command"):
        run([])
    with pytest.raises(ConfigError, match="file_mb"):
        run("true", limits=replace(LIMITS, file_mb=0))


def test_a_room_that_cannot_be_used_is_no_verdict(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GradingError, match="start of nothing"):
        run(["nothing"])
    with pytest.raises(GradingError, match="start of"):
        run(["./data"], {"data": "x"})
    with pytest.raises(GradingError, match=r"No space left|failed"):
        run("true", {"large": bytes(5 << 20)})
    monkeypatch.setattr(starter, "interpreter", lambda: "/nonexistent")
    monkeypatch.setattr(environment, "STARTER", starter.Starter())
    with pytest.raises(GradingError, match="cannot start"):
        run("true")


def test_killed_agents_keep_their_files_for_grading(run: Run) -> None:
    found = run("echo half > done; sleep 100", limits=replace(LIMITS, wall_s=0.4))
    assert (found.exit_code, found.killed_reason, found.files) == (-9, "wall", {"done": b"half\n"})


FUNCTION = """
import json, os, random, subprocess, sys, time
imported = open("/proc/self/stat").read().split()[0]

def play(base_url, api_key, task):
    print(json.dumps([os.listdir("."), os.listdir("/tmp"), base_url, api_key, os.environ.get("MINE")]))
    for folder in (".", "/tmp"):
        with open(f"{folder}/left", "w") as stream: stream.write(str(random.random()))
    if task == "worker": return imported
    if task == "raise": raise ValueError("of the agent")
    if task == "exit": sys.exit(5)
    if task == "sleep": subprocess.Popen(["sleep", "100"], start_new_session=True); time.sleep(100)
    if task == "daemon" and os.fork() == 0: time.sleep(100)
    if task == "kill the worker": os.kill(os.getppid(), 9); time.sleep(100)
    if task == "stop the worker": os.kill(os.getppid(), 19); os._exit(0)
    if task == "change the worker": open(f"/proc/{os.getppid()}/mem", "r+b")
    if task == "look at the worker": print(os.listdir(f"/proc/{os.getppid()}/fd"))
    if task == "long": return "x" * 100000
    if task == "deep":
        for _ in range(1200): os.mkdir("d" * 20); os.chdir("d" * 20)
    if task == "move the package": os.rename("/tmp/" + __file__.split("/")[2], "/tmp/away")
    if task == "many": return [subprocess.Popen(["sleep", "100"], start_new_session=True) for _ in range(8)] and None
"""


@pytest.fixture
def workers(gateway: str, tmp_path: Path) -> Iterator[AgentWorkers]:
    tmp_path.chmod(0o755)
    (tmp_path / "theirs.py").write_text(FUNCTION)
    limits = replace(LIMITS, wall_s=0.6)
    with AgentWorkers("theirs:play", gateway_socket=gateway, path=[tmp_path], env={"MINE": "1"}, limits=limits) as made:
        yield made
    assert not rooms_left()


def play(workers: AgentWorkers, task: str, **options: Any) -> AgentRun:
    return workers.run({"a": "1"}, task=task, **{**SESSION, **options})


def found_empty(run: AgentRun) -> bool:
    """The agent began with its own files, its own session, and nothing of others; the package may lie in /tmp."""
    box, temporary, *rest = json.loads(run.stdout.splitlines()[0])
    return box == ["a"] and "left" not in temporary and rest == ["http://127.0.0.1:8100/sessions/a/v1", "sk-a", "1"]


def test_a_worker_plays_many_rollouts_and_each_finds_it_empty(workers: AgentWorkers) -> None:
    tasks = ("worker", "raise", "exit", "daemon", "many", "sleep", "long", "change the worker", "look at the worker")
    runs = {task: play(workers, task) for task in tasks}
    assert play(workers, "worker").result == runs["worker"].result
    assert len({run.files["left"] for run in runs.values()}) == len(tasks)  # random numbers of their own
    for run in runs.values():
        assert found_empty(run) and sorted(run.files) == ["a", "left"]
    ends = {task: (run.exit_code, run.killed_reason) for task, run in runs.items() if run.exit_code}
    assert ends == {
        "raise": (1, None), "exit": (5, None), "sleep": (-9, "wall"), "change the worker": (1, None),
        "look at the worker": (1, None),
    }  # fmt: skip
    assert "ValueError: of the agent" in runs["raise"].stderr and "Read-only" in runs["change the worker"].stderr
    assert runs["long"].result == "x" * 32768 and runs["exit"].result is None


@pytest.mark.long
def test_the_import_does_not_count_as_cpu_time_of_a_rollout(gateway: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    busy = (
        "import time\nwhile time.process_time() < 2.2: pass\ndef play(base_url, api_key, task):\n    while task: pass"
    )
    (tmp_path / "busy.py").write_text(busy)
    limits = replace(LIMITS, cpu_s=1)
    with AgentWorkers("busy:play", gateway_socket=gateway, path=[tmp_path], limits=limits) as workers:
        runs = [workers.run({}, task=task, **SESSION) for task in (0, 1, 0)]  # type: ignore[arg-type]
        assert [run.killed_reason for run in runs] == [None, "cpu", None] and len(workers._free) == 1


@pytest.mark.long
@pytest.mark.parametrize("task", ["kill the worker", "stop the worker", "deep", "move the package"])
def test_a_worker_that_cannot_go_on_is_replaced(workers: AgentWorkers, task: str) -> None:
    first = play(workers, "worker").result
    assert first is not None
    found = play(workers, task)
    assert (found.exit_code != 0) == task.endswith("worker") and "a" in found.files
    after = play(workers, "worker")
    assert after.exit_code == 0 and found_empty(after)


def test_workers_are_replaced_after_their_number_of_rollouts(workers: AgentWorkers) -> None:
    workers._rollouts = 2
    rooms = []
    for _ in range(4):
        play(workers, "worker")
        rooms.append([id(room) for room, _ in workers._free])
    assert [len(one) for one in rooms] == [1, 0, 1, 0]


def test_a_worker_that_died_while_it_waited_is_replaced(workers: AgentWorkers) -> None:
    play(workers, "worker")
    ((room, _),) = workers._free
    os.kill(room._pid, 9)
    time.sleep(0.1)
    assert play(workers, "worker").exit_code == 0


def test_a_cancelled_rollout_ends_its_worker(workers: AgentWorkers) -> None:
    play(workers, "worker")
    token = CancelToken()
    timer = threading.Timer(0.2, token.cancel)
    timer.start()
    with pytest.raises(GradingError, match="interrupted"):
        play(workers, "sleep", token=token)
    timer.join()
    token.close()
    assert workers._free == [] and play(workers, "worker").exit_code == 0


def test_workers_side_by_side_do_not_see_each_other(workers: AgentWorkers) -> None:
    runs: list[AgentRun] = []
    threads = [threading.Thread(target=lambda: runs.append(play(workers, "worker"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [run.exit_code for run in runs] == [0] * 4 and len(workers._free) <= 2


def test_an_agent_that_cannot_be_imported_is_an_error_of_the_environment(gateway: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "broken.py").write_text("1/0")
    for agent, why in (("none:f", "No module"), ("broken:f", "ZeroDivisionError"), ("json:none", "no attribute")):
        with AgentWorkers(agent, gateway_socket=gateway, path=[tmp_path], limits=LIMITS) as workers:
            with pytest.raises(GradingError, match=why):
                workers.run({}, **SESSION)  # type: ignore[arg-type]
