"""Rooms in containers: the contract of rooms in namespaces, on an engine if this machine has one that runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5.errors import ConfigError, GradingError
from glm5.sandbox.cancel import CancelToken
from glm5.sandbox.container import VARIABLE, ContainerEnvironment, chosen_engine, open_environment
from glm5.sandbox.environment import NamespaceEnvironment, RoomFileError, RoomLimits
from glm5.tasks.harbor.folder import TaskFolder
from glm5.tasks.harbor.trial import TaskRoom, command_agent, oracle
from tests.sandbox.images import NAME, make_image
from tests.tasks.harbor.tasks import make_task

SMALL = RoomLimits(memory_mb=128, processes=32, disk_mb=16, output_kb=16)


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """The first engine that runs a container of our image, which is removed in the end."""
    if os.geteuid() != 0:
        pytest.skip("rooms in containers need root")
    reasons = []
    for program in ("podman", "docker"):
        if shutil.which(program) is None:
            reasons.append(f"{program} is not installed")
            continue
        try:
            with ContainerEnvironment(program=program, image=make_image(program)):
                pass
            yield program
            return
        except subprocess.CalledProcessError as error:
            reasons.append(f"{program} cannot import an image: {error.stderr.decode(errors='replace')[-300:]}")
        except GradingError as error:
            reasons.append(str(error))
        finally:
            subprocess.run([program, "rmi", "--force", NAME], capture_output=True)
    pytest.skip("; ".join(reasons))


@pytest.fixture(scope="module")
def room(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerEnvironment]:
    folder = tmp_path_factory.mktemp("tree")
    folder.chmod(0o755)
    (folder / "file").write_text("1")
    (folder / "link").symlink_to("file")
    with ContainerEnvironment({"/app": folder}, program=engine, image=NAME, read_only=[folder], limits=SMALL) as room:
        yield room


def own(engine: str, *words: str) -> str:
    return subprocess.run([engine, *words], check=True, capture_output=True, text=True).stdout


def test_the_engine_is_chosen_by_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert chosen_engine() is None and type(open_environment(mode="root")) is NamespaceEnvironment
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "podman:own:1")
    with pytest.raises(ConfigError, match="podman is not on the PATH"):
        chosen_engine()
    (tmp_path / "podman").write_text("#!/bin/sh\necho no >&2\nexit 125\n")
    (tmp_path / "podman").chmod(0o755)
    assert chosen_engine() == ("podman", "own:1")
    with pytest.raises(GradingError, match=r"podman run: no$" if os.geteuid() == 0 else "need root"):
        open_environment().start()
    monkeypatch.setenv(VARIABLE, "podman")
    with pytest.raises(ConfigError, match="needs an image"):
        open_environment()
    monkeypatch.setenv(VARIABLE, "lxc")
    with pytest.raises(ConfigError, match='not "lxc"'):
        chosen_engine()


@pytest.mark.slow
def test_programs(room: ContainerEnvironment) -> None:
    heard = list[tuple[str, bytes]]()
    line = "cat; echo $A; cat file; echo no >&2; exit 3"
    strange = "x\ny,z=1 \"'"
    done = room.exec(line, cwd="/app", env={"A": strange}, stdin=b"in\n", on_output=lambda *part: heard.append(part))
    assert (done.exit_code, done.stderr, done.stopped) == (3, b"no\n", None)
    assert done.stdout == b"in\nx y,z=1 \"'\n1" and ("stderr", b"no\n") in heard
    assert room.exec(["echo", "--help", "$(id)", "; ls"]).stdout == b"--help $(id) ; ls\n"
    assert room.exec(["no-such-program"]).exit_code == 127
    assert room.exec("sleep 4321 & echo started").stdout == b"started\n"
    assert b"4321" in room.exec("cat /proc/[0-9]*/cmdline").stdout
    assert room.clear() and b"4321" not in room.exec("cat /proc/[0-9]*/cmdline").stdout
    with room.terminal(cwd="/app") as terminal:
        terminal.write(b"tty; echo $((20 + 3)); stty size\n")
        seen = b""
        while b"40 160" not in seen:
            seen += (new := terminal.read(2.0))
            assert new, seen
        assert b"/dev/pts/" in seen and b"23" in seen


@pytest.mark.slow
def test_agents_cannot_change_the_system(room: ContainerEnvironment) -> None:
    line = "for f in / /usr /etc /usr/bin /var; do touch $f/x && echo $f; done; kill -9 1; cat /proc/1/environ; id -u"
    assert room.exec(line).stdout == b"1000\n"
    assert room.exec("grep CapEff /proc/self/status").stdout.split() == [b"CapEff:", b"0" * 16]
    assert room.exec("cat < /dev/tcp/127.0.0.1/1; ls /sys/class/net").stdout == b"lo\n"
    assert room.exec(f"cat {room._shown[0]}/file; echo 2 > {room._shown[0]}/file").stdout == b"1"
    assert Path(room._shown[0], "file").read_text() == "1"
    room.exec("ln -s /etc/passwd /app/out; mkfifo /app/fifo; ln -s /etc /app/folder")
    for path in ("/app/out", "/app/folder/passwd", "/app/link"):
        with pytest.raises(RoomFileError):
            room.download(path)
    room.upload({"/app/out": b"new", "/app/deep/script": b"#!/bin/sh\necho $0\n"})
    assert room.exec(["/app/deep/script"]).stdout == b"/app/deep/script\n"
    assert room.exec("cat /etc/passwd /app/out").stdout.endswith(b"new")
    with pytest.raises(RoomFileError):
        room.upload({"/app/folder/x": b""})


@pytest.mark.slow
def test_limits(room: ContainerEnvironment) -> None:
    room.exec("sleep 4321 & echo")
    started = time.monotonic()
    line = "python3 -c 'import os, time; os.environ.clear(); time.sleep(99)'"
    done = room.exec(["env", "-i", "/bin/sh", "-c", f"{line} & {line}"], timeout_s=1)
    assert (done.exit_code, done.stopped) == (-signal.SIGKILL, "wall") and time.monotonic() - started < 30
    found = room.exec("cat /proc/[0-9]*/cmdline").stdout
    assert b"4321" in found and b"sleep(99)" not in found  # services of other sessions live on
    assert room.exec("cat /dev/zero").stopped == "output"
    assert room.exec("python3 -c 'bytearray(500 << 20)'").stopped == "memory"
    assert room.exec("cat /dev/zero > /app/big").stopped == "disk"
    assert room.exec("for i in 1 2 3 4; do head -c 9000000 /dev/zero > /app/$i; done; sleep 60").stopped == "disk"
    room.exec("rm /app/big /app/[1-4]")
    assert b"fork" in room.exec("f() { f | f & }; f; sleep 2", timeout_s=20).stderr
    assert room.clear()
    token = CancelToken()
    token.cancel()
    with pytest.raises(GradingError, match="interrupted"):
        room.exec("sleep 99", token=token)
    token.close()
    assert room.exec("echo fine").stdout == b"fine\n"


@pytest.mark.slow
def test_snapshots_and_verifiers(room: ContainerEnvironment, engine: str) -> None:
    room.exec("echo 1 > /app/a; echo 1 > /tmp/a; mkdir /home/tests; rm -rf /app/b; sleep 4321 & echo")
    before = room.snapshot()
    room.exec("echo 2 > /app/a; ln -s /app /tmp/link; mkdir /app/tests; echo x > /app/tests/conftest.py")
    files = {"/app/tests/test.sh": b"#!/bin/sh\nls /app/tests /tmp; cat /app/a; cat /proc/[0-9]*/cmdline\n"}
    for _ in range(2):
        with room.verifier(files, writable=["/app/tests"]) as judge:
            done = judge.exec(["env", "/app/tests/test.sh"])
            assert done.stdout.startswith(b"/app/tests:\ntest.sh\n\n/tmp:\n2\n") and b"4321" not in done.stdout
        with pytest.raises(GradingError, match="not open"):
            room.exec("true")
        room.restore(before)
        assert room.exec("cat /app/a /tmp/a; ls /app/tests").stdout == b"1\n1\n"
        room.exec("echo 2 > /app/a; mkdir /app/tests")
    room.restore(before)
    images = own(engine, "images", "--quiet", "--filter", f"reference=localhost/{room._room}")
    assert len(images.split()) <= 2  # those of verifiers go


@pytest.mark.slow
def test_a_task_and_what_is_left(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, engine)
    dockerfile = f"FROM {NAME}\nENV WORD=hello\nCOPY word /data/\nRUN echo $WORD >> /data/word\nWORKDIR /app\n"
    folder = make_task(tmp_path, environment__Dockerfile=dockerfile, environment__word="")
    with TaskRoom(TaskFolder.read(folder)) as task:
        assert task.trial(oracle).reward == 1.0
        assert task.trial(command_agent("echo $WORD | diff - /data/word; cp /data/word out.txt")).reward == 1.0
        cheat = "rm -rf /logs; ln -s /app /logs; mkdir -p /app/verifier; echo 1 > /app/verifier/reward.txt"
        assert task.trial(command_agent(cheat)).reward == 0.0
        assert isinstance(task.room, ContainerEnvironment)
        name, image = task.room._room, task.room._image
    assert name not in own(engine, "ps", "--all") and name not in own(engine, "images")
    own(engine, "rmi", image)


@pytest.mark.slow
def test_a_container_ends_with_its_caller(engine: str) -> None:
    code = f"""
import time
from glm5.sandbox.container import ContainerEnvironment
room = ContainerEnvironment(program={engine!r}, image={NAME!r})
room.start()
room.exec("sleep 999 & echo")
print(room._name, flush=True)
time.sleep(999)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        name = caller.stdout.readline().strip()
        assert name in own(engine, "ps")
        caller.kill()
    deadline = time.monotonic() + 30
    while name in own(engine, "ps", "--all"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
