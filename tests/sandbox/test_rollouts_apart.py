"""Agents that try to reach other rollouts: the next one of their worker, or those in other rooms."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5.errors import GradingError
from glm5.sandbox import agent_room
from glm5.sandbox.agent_workers import AgentWorkers
from glm5.sandbox.room import Limits
from tests.rooms import needs_rooms

pytestmark = needs_rooms
LIMITS = Limits(cpu_s=20, wall_s=20.0, memory_mb=256, processes=12, file_mb=4, output_kb=16)
REPOSITORY = Path(agent_room.__file__).parents[2]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[str]:
    """A Unix socket that says nothing; the agents' modules lie beside it."""
    tmp_path.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "gateway"))
        listener.listen(512)
        yield str(tmp_path / "gateway")


SENDER = """
import fcntl, os, re, secrets, socket, tempfile
log, pair, (read, write) = tempfile.TemporaryFile(), socket.socketpair(), os.pipe()
source, null = open(__file__), open(os.devnull, "w")
print("imported")

def send(task):
    if task == "output":
        for stream in (1, 2):
            fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, 1 << 20)
            os.set_blocking(stream, False)
            os.write(stream, b"MESSAGE" * 140_000)
        os._exit(0)
    if task == "flags":
        for stream in (1, 2):
            fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, 4096)
            os.set_blocking(stream, False)
    if task == "descriptors":
        for send in (log.write, pair[0].send, lambda data: os.write(write, data)):
            try: send(b"MESSAGE")
            except OSError: pass
        log.flush()
        source.read()
        null.write("x" * 10000)
    if task == "result":
        return "MESSAGE-" + secrets.token_hex(16)

def receive():
    for stream in (1, 2):
        yield os.get_blocking(stream) and fcntl.fcntl(stream, fcntl.F_GETPIPE_SZ) == 65536
    pair[1].setblocking(False)
    os.set_blocking(read, False)
    for receive in (log.read, lambda: pair[1].recv(9), lambda: os.read(read, 9)):
        log.seek(0)
        try: yield not receive()
        except OSError: yield True
    yield source.read().endswith("# the end\\n")
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            if " rw" in line:
                start, end = (int(word, 16) for word in line.split()[0].split("-"))
                memory.seek(start)
                yield not re.search(rb"MESSAG[E]-[0-9a-f]{32}", memory.read(end - start))

def play(base_url, api_key, task):
    return send(task) if task else str(list(receive()))
# the end
"""


@pytest.mark.parametrize("way", ["output", "flags", "descriptors", "result"])
def test_a_rollout_sends_nothing_to_the_next_of_its_worker(gateway: str, tmp_path: Path, way: str) -> None:
    (tmp_path / "sender.py").write_text(SENDER)
    ends = (-9, "output") if way == "output" else (0, None)
    with AgentWorkers("sender:play", gateway_socket=gateway, path=[tmp_path], limits=LIMITS) as workers:
        for _ in range(4):
            for task in (way, None):
                run = workers.run({}, task=task, base_path="/sessions/a/v1", api_key="k")
                assert (run.exit_code, run.killed_reason) == (ends if task else (0, None)), run
                if way != "output":
                    assert (run.stdout, run.stderr) == ("", ""), run
            assert run.result is not None and "False" not in run.result and run.stdout == ""
        assert [played for _, played in workers._free] == [8]


def test_a_rollout_that_leaves_too_many_files_costs_its_worker(gateway: str, tmp_path: Path) -> None:
    source = """
import os
def play(base_url, api_key, task):
    found = len(os.listdir("/tmp"))
    for i in range(task):
        os.close(os.open(f"/tmp/{i}", os.O_CREAT | os.O_WRONLY))
    return str(found)
"""
    (tmp_path / "litter.py").write_text(source)
    with AgentWorkers("litter:play", gateway_socket=gateway, path=[tmp_path], limits=LIMITS) as workers:
        found, kept = [], []
        for task in (1000, 0, 25_000, 0):
            found.append(workers.run({}, task=task, base_path="/sessions/a/v1", api_key="k").result)
            kept.append([played for _, played in workers._free])
    assert len(set(found)) == 1 and kept == [[1], [2], [], [1]]


SWAPPER = """
import os, threading

def swap():
    while True:
        for name in ("/box/folder", "/tmp/folder"):
            try:
                os.rename(name, name + ".old")
                os.symlink("@OUTSIDE@", name)
                os.unlink(name)
                os.rename(name + ".old", name)
            except OSError:
                pass

threading.Thread(target=swap, daemon=True).start()

def play(base_url, api_key, task):
    for top in ("/box", "/tmp"):
        os.makedirs(top + "/folder/deep", exist_ok=True)
        for number in range(40):
            open(f"{top}/folder/secret{number}", "w").close()
"""


def test_a_worker_that_moves_links_about_reaches_nothing_outside(gateway: str, tmp_path: Path) -> None:
    """Its threads are alive while files are read back and removed."""
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    for number in range(40):
        (outside / f"secret{number}").write_text("secret")
    (tmp_path / "swapper.py").write_text(SWAPPER.replace("@OUTSIDE@", str(outside)))
    before = {path: path.stat().st_mode for path in outside.rglob("*")}
    with AgentWorkers("swapper:play", gateway_socket=gateway, path=[tmp_path], limits=LIMITS) as workers:
        for _ in range(12):
            with contextlib.suppress(GradingError):
                run = workers.run({}, base_path="/sessions/a/v1", api_key="k")
                assert b"secret" not in run.files.values()
    assert {path: path.stat().st_mode for path in outside.rglob("*")} == before


FLOOD = """
import resource, sys, threading
from glm5 import process
from glm5.sandbox.agent_room import run_agent
from glm5.sandbox.room import Limits

process._WANTED_FILES = 256
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
hostile = '''
import socket, time
held, end = [], time.time() + 2
while time.time() < end:
    try: held.append(socket.create_connection(("127.0.0.1", 8100), 0.2))
    except OSError: time.sleep(0.1)
'''
honest = '''
import socket, time
time.sleep(1)
socket.create_connection(("127.0.0.1", 8100)).sendall(b"x")
'''
ends = []

def one(source):
    limits = Limits(cpu_s=20, wall_s=20, memory_mb=128, processes=8, file_mb=4, output_kb=16)
    session = {"gateway_socket": sys.argv[1], "base_path": "/sessions/a/v1", "api_key": "k"}
    ends.append(run_agent(["python3", "-c", source], {}, limits=limits, **session).exit_code)

threads = [threading.Thread(target=one, args=(source,)) for source in [hostile] * 4 + [honest]]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(ends)
"""


@pytest.mark.long
def test_agents_that_hold_connections_take_none_from_other_rooms(gateway: str) -> None:
    """With few file descriptors for all rooms of a process."""
    command = [sys.executable, "-c", FLOOD, gateway]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(REPOSITORY)})
    assert (ran.stdout, ran.stderr) == (f"{[0] * 5}\n", "")
