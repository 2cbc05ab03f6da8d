"""Agents that try to get out of their room, or to use more than they may. Judged from outside where it leaves a trace.

Every program prints BREACH when it reached its goal.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from glm5.sandbox import agent_room
from glm5.sandbox.agent_room import AgentRun, run_agent
from glm5.sandbox.room import Limits
from tests.rooms import needs_rooms

pytestmark = needs_rooms
LIMITS = Limits(cpu_s=20, wall_s=20.0, memory_mb=128, processes=12, file_mb=4, output_kb=16)
REPOSITORY = Path(agent_room.__file__).parents[2]

PRELUDE = """
import ctypes, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
print("uid", os.getuid(), flush=True)

def attempt(what, function, *arguments):
    try:
        value = function(*arguments)
    except (OSError, MemoryError, ImportError, LookupError, ValueError):
        return None
    print("BREACH", what, repr(value)[:300], flush=True)
    return value

def calls(table):
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    for name, (numbers, arguments) in table.items():
        if libc.syscall(numbers[column], *arguments) != -1:
            print("BREACH", name, flush=True)
"""

QUIET = {
    "tcp": """
        for address in (("1.1.1.1", 443), ("169.254.169.254", 80), ("127.0.0.1", @TCP@), ("10.0.0.1", 22)):
            attempt("tcp", socket.create_connection, address, 2)
        attempt("own address", socket.create_connection, (socket.gethostname(), @TCP@), 2)
    """,
    "udp_and_names": """
        for family, address in ((socket.AF_INET, ("1.1.1.1", 53)), (socket.AF_INET6, ("2606:4700:4700::1111", 53))):
            attempt("udp", lambda: socket.socket(family, socket.SOCK_DGRAM).sendto(b"x", address))
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", @UDP@))  # its own loopback
        attempt("name", socket.getaddrinfo, "example.com", 80)
    """,
    "unix_sockets_of_the_host": """
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            for path in ("@FOLDER@/unix", "@FOLDER@/gateway", "\\0@ABSTRACT@", "/var/run/docker.sock", "/dev/log"):
                attempt("unix", lambda: socket.socket(socket.AF_UNIX, kind).connect(path))
    """,
    "sockets_of_other_kinds": """
        for family, kind, protocol in ((16, 3, 0), (16, 2, 9), (17, 3, 0), (2, 3, 1), (2, 2, 1), (40, 1, 0), (38, 5, 0),
                                       (29, 3, 1), (30, 5, 0), (44, 3, 0), (2, 5, 0), (2, 1, 132), (2, 1, 262),
                                       (1, 5, 0), (2, 1 | 0x800, 255)):
            attempt((family, kind, protocol), socket.socket, family, kind, protocol)
        many = ctypes.c_long(16 + (1 << 32))  # the kernel reads 32 bits of each argument
        calls({"netlink": ((41, 198), (many, 3, 0)), "raw": ((41, 198), (2, many, 0)), "icmp": ((41, 198), (2, 2, 1))})
    """,
    "the_interfaces": """
        import fcntl, struct
        plain = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for name in (b"eth0", b"tunl0", b"sit0", b"lo"):
            attempt("flags", fcntl.ioctl, plain, 0x8914, struct.pack("16sh22x", name, 1 | 0x100))
        routes = open("/proc/self/net/route").read().splitlines()[1:]
        if routes: print("BREACH", routes)
    """,
    "a_gateway_of_its_own": """
        attempt("port", lambda: socket.create_server(("127.0.0.1", 8100)))
        server = socket.create_server(("127.0.0.1", 0))  # it may listen inside
        socket.create_connection(server.getsockname(), 2)
    """,
    "files_of_the_host": """
        for path in ("@FOLDER@/canary", "/etc/shadow", "/root/.ssh", "/home", "/var", "/run", "/sys/kernel", "/dev/mem",
                     "/dev/tty", "/dev/kmsg", "@REPOSITORY@/tests"):
            attempt("see", os.stat, path)
        for name in os.listdir("/root") if os.path.exists("/root") else ():  # on the way to the interpreter
            if not sys.prefix.startswith("/root/" + name): print("BREACH", name)
        sys.path[:0] = ["@REPOSITORY@"]
        attempt("import", __import__, "glm5")
        for folder in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/proc", sys.prefix, os.path.dirname(os.__file__)):
            attempt("create", lambda: open(folder + "/planted.pth", "x"))
        for path in ("/etc/passwd", "/etc/hosts", "/usr/bin/env", sys.executable):
            attempt("write", open, path, "a")
            attempt("remove", os.remove, path)
    """,
    "proc_of_the_host": """
        for name in ("kcore", "kallsyms", "sys", "sysrq-trigger", "keys", "cmdline", "net", "timer_list", "kmsg"):
            attempt("proc", os.stat, "/proc/" + name)
        seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if len(seen) > 3 or max(seen) > 50: print("BREACH", seen)
        for name in ("environ", "mem", "maps", "auxv", "stack", "ns/net", "io", "oom_score_adj"):
            attempt(name, open, f"/proc/1/{name}", "r+")
        for name in ("environ", "mem", "maps", "ns/net"):
            attempt(name, lambda: open(f"/proc/1/{name}", "rb").read(8))
        for name in ("fd", "root", "cwd", "map_files"):
            attempt(name, os.listdir, f"/proc/1/{name}")
        attempt("spared", lambda: (lambda s: (s.write("-1000"), s.flush()))(open("/proc/self/oom_score_adj", "w")))
    """,
    "ptrace_and_memory": """
        child = os.fork()
        if child == 0: time.sleep(30); os._exit(0)
        here = ctypes.create_string_buffer(8)
        vector = (ctypes.c_void_p * 2)(ctypes.addressof(here), 8)
        for pid in (1, child):
            for request in (16, 0x4206):
                if libc.ptrace(request, pid, None, None) != -1: print("BREACH ptrace", pid)
            if libc.process_vm_readv(pid, vector, 1, vector, 1, 0) != -1: print("BREACH vm", pid)
        calls({"pidfd_getfd": ((438, 438), (os.pidfd_open(1), 1, 0))})
        os.kill(child, 9)
    """,
    "memory_of_the_program_that_started_it": """
        here, me = ctypes.create_string_buffer(b"right"), os.getpid()
        if os.fork() == 0:
            for pid in (me, os.getpid()):
                for name in ("mem", f"task/{pid}/mem", "clear_refs", "fd/../mem", "root/proc/self/mem"):
                    for mode in (os.O_RDWR, os.O_WRONLY):
                        attempt(name, os.open, f"/proc/{pid}/{name}", mode)
            vector = (ctypes.c_void_p * 2)(ctypes.addressof(here), 8)
            if libc.process_vm_writev(me, vector, 1, vector, 1, 0) != -1: print("BREACH vm", flush=True)
            os._exit(0)
        os.wait()
        if here.value != b"right": print("BREACH", here.value)
        open("/dev/stderr", "w").close(); open("/proc/self/fd/1", "w").close()  # these are pipes
    """,
    "privileges": """
        for attempt_ in (lambda: os.setuid(0), lambda: os.setgroups([]), lambda: os.chroot("."), lambda: os.nice(-5),
                         lambda: os.mknod("node", 0o60666, os.makedev(254, 0)), lambda: os.sched_setaffinity(0, {0})):
            attempt("privilege", attempt_)
        for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):
            if libc.unshare(flag) != -1: print("BREACH unshare", flag)
        if libc.setns(os.open("/proc/self/ns/net", os.O_RDONLY), 0) != -1: print("BREACH setns")
        for kind in (b"tmpfs", b"proc", b"sysfs"):
            if libc.mount(b"x", b"/box", kind, 0, None) != -1: print("BREACH mount")
        if libc.umount2(b"/proc", 2) != -1 or libc.umount2(b"/tmp", 2) != -1: print("BREACH umount")
        zero = ctypes.create_string_buffer(256)
        calls({"bpf": ((321, 280), (0, zero, 128)), "perf_event_open": ((298, 241), (zero, 0, -1, -1, 0)),
               "userfaultfd": ((323, 282), (1,)), "keyctl": ((250, 219), (0, -3, 1)),
               "io_uring": ((425, 425), (8, zero)), "memfd_create": ((319, 279), (b"x", 0)),
               "shmget": ((29, 194), (0, 4096, 0o1600)),
               "clone3": ((435, 435), (zero, 64)), "mq_open": ((240, 180), (b"x", 0o102, 0o600, 0)),
               "prlimit": ((302, 261), (1, 0, None, zero)), "mmap": ((9, 222), (0, 4096, 3, 0x21, -1, 0)),
               "mmap3": ((9, 222), (0, 4096, 3, 0x23, -1, 0))})
    """,
    "limits": """
        import resource
        for name in ("DATA", "CPU", "NPROC", "FSIZE", "NOFILE", "CORE", "MEMLOCK"):
            which = getattr(resource, "RLIMIT_" + name)
            attempt(name, resource.setrlimit, which, (resource.getrlimit(which)[1] + 1,) * 2)
            attempt(name, resource.setrlimit, which, (-1, -1))
    """,
    "signals": """
        for number in range(1, 65):
            for pid in (1, @VICTIM@):
                try: os.kill(pid, number)
                except OSError: pass
        attempt("pidfd", os.pidfd_open, @VICTIM@)
    """,
    "descriptors": """
        for descriptor in range(3, 1500):
            attempt("descriptor", os.fstat, descriptor)
        known = {"PATH", "HOME", "TMPDIR", "LANG", "USER", "MINE"}
        known |= {f"{name}_{what}" for name in ("OPENAI", "ANTHROPIC", "GLM5") for what in ("BASE_URL", "API_KEY")}
        if set(os.environ) != known: print("BREACH", dict(os.environ))
        if os.environ["MINE"] != "1" or sys.stdin.read(): print("BREACH")
    """,
}  # fmt: skip

# name -> (program, the reasons it may have been ended for)
LOUD: dict[str, tuple[Any, ...]] = {
    "fork_bomb": ("while True:\n    try: os.fork()\n    except OSError: pass", "wall", "cpu"),
    "fork_bomb_of_bash": ("os.execvp('bash', ['bash', '-c', ':(){ :|:& };: 2>/dev/null; sleep 100'])", "wall", "cpu"),
    "too_many_processes": (
        "for _ in range(50):\n    try:\n        if os.fork() == 0: time.sleep(60); os._exit(0)\n"
        "    except OSError: time.sleep(1); sys.exit(1)", "processes",
    ),
    "memory_in_one_piece": ("x = bytearray(1 << 30)", None),
    "memory_bit_by_bit": ("x = []\nwhile True: x.append(b'x' * (1 << 16))", "memory"),
    "memory_of_many": (
        "for _ in range(3): os.fork()\nx = bytearray(os.urandom(1 << 20) * 24)\ntime.sleep(60)", "memory",
    ),
    "memory_hidden_in_files": ("f = open('/dev/shm/x', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()", "disk"),
    "one_large_file": ("f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))", "disk"),
    "many_files": ("for i in range(64): open(f'f{i}', 'wb').write(bytes(1 << 20))", "disk"),
    "files_without_number": ("i = 0\nwhile True: os.close(os.open(f'/tmp/f{i}', 65)); i += 1", "disk", None),
    "endless_output": ("while True: os.write(1, b'x' * 65536)", "output"),
    "endless_errors": ("while True: os.write(2, b'x' * 4096)", "output"),
    "busy": ("while True: pass", "cpu"),
    "busy_children": ("os.fork(); os.fork()\nwhile True: pass", "cpu"),
    "sleeping": ("time.sleep(600)", "wall"),
    "stopped": ("import signal; os.kill(os.getpid(), signal.SIGSTOP)", "wall"),
    "ignoring_signals": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)", "wall",
    ),
    "many_connections": (
        "held = []\nwhile True:\n    try: held.append(socket.create_connection(('127.0.0.1', 8100), 1))\n"
        "    except OSError: time.sleep(600)", "wall",
    ),
    "many_descriptors": ("while True: os.dup(1)", None),
    "segmentation_fault": ("ctypes.string_at(0)", "signal SIGSEGV"),
}  # fmt: skip


@dataclass
class Host:
    """What the agents are after, and a gateway that accepts and says nothing."""

    canary: str
    folder: Path
    tcp: socket.socket
    udp: socket.socket
    unix: socket.socket
    abstract: socket.socket
    gateway: socket.socket
    victim: subprocess.Popen[bytes]
    rooms: Path

    def run(self, source: str, limits: Limits = LIMITS, **options: Any) -> AgentRun:
        words = {
            "FOLDER": self.folder, "TCP": self.tcp.getsockname()[1], "UDP": self.udp.getsockname()[1],
            "ABSTRACT": self.abstract.getsockname()[1:].decode(), "VICTIM": self.victim.pid, "REPOSITORY": REPOSITORY,
        }  # fmt: skip
        for word, value in words.items():
            source = source.replace(f"@{word}@", str(value))
        run = run_agent(
            ["python3", "main.py"],
            {"main.py": PRELUDE + textwrap.dedent(source)},
            gateway_socket=str(self.folder / "gateway"),
            base_path="/sessions/a/v1",
            api_key="k",
            env={"MINE": "1"},
            limits=limits,
            **options,
        )
        self.check(run)
        return run

    def check(self, run: AgentRun) -> None:
        said = run.stdout + run.stderr
        assert self.canary not in said and "BREACH" not in said, said
        assert (self.folder / "canary").read_text() == self.canary
        for server in (self.tcp, self.udp, self.unix, self.abstract):
            with pytest.raises(BlockingIOError):
                server.recv(10) if server is self.udp else server.accept()
        assert self.victim.poll() is None
        assert left_over(run.stdout) == [] and list(self.rooms.iterdir()) == []


def left_over(stdout: str) -> list[str]:
    """Live processes of the identity that the agent had; every room of root's has its own."""
    first = stdout.partition("\n")[0].split()
    if os.geteuid() or first[:1] != ["uid"] or int(first[1]) < 1_000_000_000:
        return []
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:
            continue
        if f"\nUid:\t{first[1]}\t" in text:
            found.append(text)
    return found


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = Path(tempfile.mkdtemp(prefix="canary-"))
    folder.chmod(0o777)
    canary, word = f"canary-{secrets.token_hex(12)}", secrets.token_hex(6)
    (folder / "canary").write_text(canary)
    (folder / "canary").chmod(0o666)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as gateway,
    ):
        udp.bind(("127.0.0.1", 0))
        unix.bind(str(folder / "unix"))
        abstract.bind(f"\0{word}")
        gateway.bind(str(folder / "gateway"))
        for listener in (unix, abstract):
            listener.listen()
        gateway.listen(512)
        for one in (tcp, udp, unix, abstract):
            one.setblocking(False)
        (folder / "unix").chmod(0o777)
        victim = subprocess.Popen(["sleep", "3000"])
        rooms = tmp_path_factory.mktemp("rooms")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(rooms))
            yield Host(canary, folder, tcp, udp, unix, abstract, gateway, victim, rooms)
        victim.kill()
        victim.wait()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("name", QUIET)
def test_nothing_comes_out_and_nothing_changes(host: Host, name: str) -> None:
    run = host.run(QUIET[name])
    assert (run.exit_code, run.killed_reason, run.stderr) == (0, None, ""), run


@pytest.mark.long
@pytest.mark.parametrize("name", LOUD)
def test_every_limit_is_the_agents_failure(host: Host, name: str) -> None:
    source, *reasons = LOUD[name]
    limits = replace(LIMITS, wall_s=0.6 if "wall" in reasons else 20.0, cpu_s=1 if reasons == ["cpu"] else 20)
    started = time.monotonic()
    run = host.run(source, limits)
    assert run.exit_code != 0 and run.killed_reason in reasons, run
    assert time.monotonic() - started < 15 and len(run.stdout) <= 16 << 10
    assert run.killed_reason == "disk" or "main.py" in run.files
    assert sum(map(len, run.files.values())) <= 4 << 20
