"""Environments in containers of Podman or Docker, behind the class of rooms: `GLM5_ROOMS=podman` or `docker`.

What differs from rooms in namespaces:

- Programs are those of an image, not of this machine. It needs /bin/bash, coreutils, and python3 if the tests do.
- Agents and verifiers run as user 1000, without capabilities. They may write to the folders at the top of the container
  but those of the system (`SYSTEM`) and not to the top itself, so no start-up files need to be put right.
- Folders are copied in at the start. A snapshot is an image.
- Memory, number of processes and network are the engine's (`--memory`, `--pids-limit`, `--network none`). "processes"
  is not reported. `disk_mb` is of what was written since the last snapshot, measured once a second or less often.
- A program that a signal ended has exit code 128 plus its number. There is no gateway.

The engine must run on this machine and we must be root: files move through `/proc/PID/root`, from outside and without
following links, and processes are killed from outside. A container ends with its caller. Tried with Podman 4.3.1 and
runc 1.1.5; the same command lines are Docker's, but no engine of Docker has run them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import resource
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, GradingError
from glm5.sandbox.clock import START_S
from glm5.sandbox.container_processes import ContainerProcesses, variables
from glm5.sandbox.dockerfile_build import MOST_TOLD, BuildError, File
from glm5.sandbox.environment import NamespaceEnvironment, RoomLimits, Trees
from glm5.sandbox.forward import Address
from glm5.sandbox.limits import LIMITS
from glm5.sandbox.programs import environment_of
from glm5.sandbox.room import inside, interpreter
from glm5.sandbox.room_files import RoomFiles

VARIABLE = "GLM5_ROOMS"
USER, NOBODY = "1000", "65534:65534"
CLEAN = ("--env", "LD_PRELOAD=", "--env", "LD_LIBRARY_PATH=")  # an image may name folders that agents write
BUILD_S = 900.0  # to build or download an image, or to copy folders
SYSTEM = re.compile(r"/*|/(bin|boot|dev|etc|lib\w*|proc|sbin|sys|usr(?!/src/))(/.*)?")
# Process 1. It reaps orphans, and ends when its standard input does. `-p`: bash takes nothing from its environment.
FIRST = "echo ready; while read -r _; do :; done"
OWN = """set -e; uid=$1; shift
case $(</etc/passwd) in *":x:$uid:"*) ;; *) echo "agent:x:$uid:$uid::/home/agent:/bin/bash" >> /etc/passwd ;; esac
for folder in /*; do
    case $folder in
        /bin|/boot|/dev|/etc|/lib*|/opt|/proc|/run|/sbin|/sys|/usr|/var) ;;
        *) [ -L "$folder" ] || chown -fRhP "$uid:$uid" -- "$folder" || : ;;
    esac
done
chown -fRhP "$uid:$uid" -- "$@" || :
chown "$uid:$uid" /opt /run; chmod 1777 /tmp"""  # what is shown read-only cannot be owned
FRESH = 'set -e; uid=$1; shift; /bin/rm -rf -- "$@"; mkdir -p -- "$@"; chown "$uid:$uid" -- "$@"; chmod 1777 /tmp'


def chosen_engine() -> tuple[str, str] | None:
    """The program and the image of `GLM5_ROOMS=PROGRAM[:IMAGE]`, or None for rooms in namespaces. Raises ConfigError
    if the program is another one or is not installed."""
    text = os.environ.get(VARIABLE) or "namespaces"
    program, _, image = text.partition(":")
    if text == "namespaces":
        return None
    if program not in ("podman", "docker"):
        raise ConfigError(f'{VARIABLE} is "namespaces", "podman[:IMAGE]" or "docker[:IMAGE]", not "{text}".')
    if shutil.which(program) is None:
        raise ConfigError(f"{VARIABLE}={text}: the program {program} is not on the PATH; is it installed?")
    return program, image


def open_environment(trees: Trees | None = None, **options: Any) -> NamespaceEnvironment:
    """An environment as `GLM5_ROOMS` says. The arguments are those of `NamespaceEnvironment`."""
    chosen = chosen_engine()
    if chosen is None:
        return NamespaceEnvironment(trees, **options)
    if not chosen[1]:
        raise ConfigError(f"{VARIABLE}: this needs an image with your tools; write {VARIABLE}={chosen[0]}:IMAGE.")
    return ContainerEnvironment(trees, program=chosen[0], image=chosen[1], **options)


class ContainerEnvironment(NamespaceEnvironment):
    """See `NamespaceEnvironment`, and this module for what differs.

    `image` is used as it is. Without one, `start` builds it from `context`, the files of a folder with a Dockerfile;
    RUN commands then have the engine's network. The image stays in the engine's store, for the next start. `workdir` is
    that of the image. Raises BuildError if it cannot be built, GradingError if the engine fails.
    """

    machine = False

    def __init__(
        self,
        trees: Trees | None = None,
        *,
        program: str = "podman",
        image: str = "",
        context: Mapping[str, File] | None = None,
        build_s: float = BUILD_S,
        read_only: Sequence[str | Path] = (),
        writable: Sequence[str] = (),
        hidden: Sequence[str] = (),  # of this machine, which a container does not show
        limits: RoomLimits = LIMITS,
        gateway: Address | None = None,
    ) -> None:
        if gateway is not None:
            raise ConfigError(f"rooms in {program} have no gateway; unset {VARIABLE}.")
        self._set_up({}, limits, None, program)
        self._image, self._context, self._build_s = image, dict(context or {}), build_s
        self._trees = [(p, [f] if isinstance(f, str | Path) else list(f)) for p, f in (trees or {}).items()]
        self._writable, self._shown = writable, [os.path.realpath(path) for path in read_only]
        if bad := [path for path in self._shown if ":" in path or not os.path.exists(path)]:
            raise ConfigError(f"the read-only path {bad[0]} of an environment does not exist, or has a colon.")
        self._room = f"glm5-room-{secrets.token_hex(8)}"
        self._images = set[int]()  # the layers that have been committed
        self._client: subprocess.Popen[bytes] | None = None
        self.workdir = "/"

    def start(self) -> None:
        if self._client is not None:
            raise GradingError("the environment runs already.")
        if os.geteuid() != 0:
            raise GradingError(f"rooms in {self._mode} need root: their files are read and written from outside.")
        self._image = self._image or self._built()
        try:
            self._open(())
            self.workdir = self._engine("image", "inspect", "--format", "{{.Config.WorkingDir}}", self._image) or "/"
            places = [*(path for path, _ in self._trees), *self._writable, "/home/agent", self.workdir]
            for place in places:
                os.close(self.files.folder(place.strip("/")))
            for path, folders in self._trees:
                for folder in reversed(folders):
                    self._engine("cp", f"{os.path.realpath(folder)}/.", f"{self._name}:{path}", seconds=BUILD_S)
            self._as_root(OWN, *(place for place in places if not SYSTEM.fullmatch(place)))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._end()
        while self._images:
            self._forget(max(self._images))  # a layer before what it lies on

    def _built(self) -> str:
        """The image of the context; that of an earlier start if it is the same."""
        files = [(name, file.data.hex(), file.executable) for name, file in sorted(self._context.items())]
        tag = f"localhost/glm5-task:{hashlib.sha256(json.dumps(files).encode()).hexdigest()[:32]}"
        with contextlib.suppress(GradingError):
            self._engine("image", "inspect", "--format", "{{.Id}}", tag)
            return tag
        with tempfile.TemporaryDirectory(prefix="glm5-image-") as folder:
            for name, file in self._context.items():
                place = Path(folder, name)
                (place if name.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
                if not name.endswith("/"):
                    place.write_bytes(file.data)
                    place.chmod(0o755 if file.executable else 0o644)
            try:
                self._engine("build", "--quiet", "--tag", tag, folder, seconds=self._build_s)
            except GradingError as error:
                raise BuildError("run", f"the image cannot be built: {error}") from error
        return tag

    def _open(self, below: tuple[int, ...], fresh: Sequence[str] = (), judge: bool = False) -> None:
        """A new container: of the image, or of the files that layer `below[0]` had at its end."""
        if below and below[0] not in self._images:
            label = ("--change", "LABEL glm5=room")
            self._engine("commit", "--pause=false", *label, self._name, self._layer_image(below[0]), seconds=BUILD_S)
            self._images.add(below[0])
        self._end()
        for layer in sorted(self._images - {*below, *self._kept}, reverse=True):
            self._forget(layer)
        self._newest += 1
        self._layer, self._below = self._newest, below
        image, mark = self._layer_image(below[0]) if below else self._image, f"GLM5_ROOM_MARK={secrets.token_hex(16)}"
        command = [self._mode, "run", "--interactive", "--rm", *self._flags(fresh), "--name", self._name, "--env", mark]
        command += ["--entrypoint", "/bin/bash", image, "-p", "-c", FIRST]
        with tempfile.TemporaryFile() as errors:
            pipe, place = subprocess.PIPE, "/proc"  # conmon writes a file "oom" where it can
            client = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True, cwd=place
            )
            self._client, out = client, client.stdout
            assert out is not None
            if not select.select([out], [], [], BUILD_S)[0] or out.read(1) != b"r":
                client.kill()
                errors.seek(0)
                raise GradingError(f"{self._mode} run: {_last(errors.read())}")
        form = "{{.State.Pid}} {{json .GraphDriver.Data}}"
        first, _, data = self._engine("container", "inspect", "--format", form, self._name).partition(" ")
        if mark not in variables(int(first)):
            raise GradingError(f"{self._mode}: the containers run on another machine; rooms need them on this one.")
        try:
            self._processes = ContainerProcesses(int(first), (json.loads(data) or {}).get("UpperDir", ""))
            root = os.open(f"/proc/{first}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise GradingError(f"{self._mode}: the files of a container cannot be reached: {error}.") from error
        self._stack.callback(os.close, root)
        self._pid, self._files = int(first), RoomFiles(root, int(USER))
        if judge:
            self._as_root(FRESH, *fresh)

    def _flags(self, fresh: Sequence[str]) -> Iterator[str]:
        limits = self.limits
        yield from ("--network", "none", "--hostname", "room", "--user", NOBODY, "--workdir", "/", "--cap-drop", "ALL")
        yield from ("--cap-add", "CHOWN", "--cap-add", "DAC_OVERRIDE", "--cap-add", "FOWNER")  # for `OWN` and `FRESH`
        yield from ("--security-opt", "no-new-privileges", "--memory", f"{limits.memory_mb}m")
        yield from ("--shm-size", f"{max(1, limits.memory_mb // 4)}m", "--pids-limit", str(limits.processes + 8))
        yield from ("--ulimit", f"cpu={limits.cpu_s}", "--ulimit", f"fsize={limits.disk_mb << 20}")
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # an engine's own default may be more than we may have
        files = min(files, 1 << 20) if files != resource.RLIM_INFINITY else 1 << 20
        yield from ("--ulimit", f"nofile={files}:{files}", "--ulimit", "nproc=4096:4096")
        for path in (path for path in self._shown if not inside(path, fresh)):
            yield from ("--volume", f"{path}:{path}:ro")

    @property
    def _name(self) -> str:
        return f"{self._room}-{self._layer}"

    def _layer_image(self, layer: int) -> str:
        return f"localhost/{self._room}:{layer}"

    def _forget(self, layer: int) -> None:
        self._images.discard(layer)
        with contextlib.suppress(GradingError):
            self._engine("rmi", self._layer_image(layer))

    def _close(self) -> tuple[int, ...]:
        if self._client is None or not self.clear():
            raise GradingError("the environment has not been started, has been stopped, or cannot be ended.")
        self._leave()
        return (self._layer, *self._below)

    def _end(self) -> None:
        """End the container."""
        self._leave()
        client, self._client = self._client, None
        if client is None or client.stdin is None or client.stdout is None:
            return
        client.stdin.close()
        client.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(START_S)
        if client.poll() is None:
            client.kill()
        with contextlib.suppress(GradingError):
            self._engine("rm", "--force", self._name)

    def _engine(self, *words: str, seconds: float = START_S) -> str:
        """The output of an engine's command. Raises GradingError."""
        try:
            done = subprocess.run([self._mode, *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GradingError(f"{self._mode} {words[0]}: {error}") from error
        if done.returncode != 0:
            raise GradingError(f"{self._mode} {words[0]}: {_last(done.stderr)}")
        return done.stdout.decode(errors="replace").strip()

    def _as_root(self, script: str, *places: str) -> None:
        """Run a script of ours, before any program of an agent runs in the container."""
        words = ["exec", "--user", "0:0", *CLEAN, self._name, "/bin/bash", "-p", "-c", script, "bash", USER, *places]
        self._engine(*words, seconds=BUILD_S)

    def _start(
        self,
        argv: Sequence[str],
        cwd: str,
        environment: Mapping[str, str],
        streams: Sequence[int],
        terminal: bool = False,
        limits: Mapping[str, int] | None = None,
    ) -> int:
        if self._files is None:
            raise GradingError("the room is not open.")
        command = [self._mode, "exec", "--interactive", "--user", f"{USER}:{USER}", "--workdir", cwd]
        command += ["--tty"] if terminal else []
        for name, value in environment.items():
            if (name, value) != ("PATH", environment_of(None)["PATH"]):  # an image has its own
                command += ["--env", f"{name}={value}"]
        # Graders name this machine's Python. Here the image's stands for it.
        command += [self._name, "python3" if argv[0] == interpreter() else argv[0], *argv[1:]]
        status, theirs = os.pipe()
        stdin, stdout, stderr = streams
        try:
            client = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)
        except OSError as error:  # too long for a command line
            with os.fdopen(theirs, "wb") as stream:
                stream.write(f"error {error.strerror}\n".encode())
            return status
        threading.Thread(target=self._report, args=(client, theirs), daemon=True).start()
        return status

    def _report(self, client: subprocess.Popen[bytes], status: int) -> None:
        """Write on `status` what process 1 of a room would."""
        processes, kills, full = self._processes, self._processes.memory_kills(), False
        with os.fdopen(status, "wb", buffering=0) as stream, contextlib.suppress(BrokenPipeError):
            stream.write(b"started %d\n" % processes.session(client))
            while client.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    client.wait(1.0)
                if client.returncode is None and processes.wrote_more(self.limits.disk_mb << 20):
                    full = processes.clear()
            if not processes.alive():
                return  # the container is gone, and with it the end of the program
            peak = self.limits.memory_mb << 10 if processes.memory_kills() > kills else 0
            number = signal.SIGXFSZ if full else client.returncode - 128
            if number in (signal.SIGXCPU, signal.SIGXFSZ):
                stream.write(b"signal %d %d\n" % (number, peak))
            else:
                stream.write(b"exit %d %d\n" % (client.returncode, peak))

    def _kill(self, session: int) -> None:
        self._processes.kill(session)

    def clear(self) -> bool:
        return self._processes.clear()

    def _ask(self, message: bytes, most: int = 0) -> tuple[bytes, list[int]]:
        return b"", list(os.openpty())  # only terminals ask


def _last(errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return " ".join(lines[-3:])[-MOST_TOLD:] or "it ended without a message."
