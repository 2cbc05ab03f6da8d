"""Programs that try to get out of the sandbox, one per test.

Every program prints BREACH when it reached its goal, and every test looks from outside as well: at a planted canary, at
listening sockets, at a process that must live, at processes that must be gone. The wanted end is part of the table.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import ConfigError, GradingError
from glm5.sandbox import programs, trial
from glm5.sandbox import sandbox as sandbox_module
from glm5.sandbox.sandbox import Job, Limits, Sandbox, SandboxResult, sandbox_available

needs_sandbox = pytest.mark.skipif(sandbox_available() is None, reason="this machine cannot isolate programs")
ROOT = os.geteuid() == 0
LIMITS = Limits(cpu_s=2, wall_s=8.0, memory_mb=128, processes=4, file_mb=4, output_kb=16)
BRIEF = Limits(cpu_s=1, wall_s=0.35, memory_mb=128, processes=4, file_mb=4, output_kb=16)
REPOSITORY = Path(sandbox_module.__file__).parents[2]
HELD = "exit 0"

PRELUDE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
print("uid", os.getuid(), flush=True)

def attempt(what, function, *arguments):
    '''The value, said to be a breach, when nothing forbids it.'''
    try:
        value = function(*arguments)
    except (OSError, MemoryError, ImportError, LookupError, ValueError):
        return None
    print("BREACH", what, repr(value)[:300], flush=True)
    return value

def call(what, number, *arguments):
    if libc.syscall(number, *arguments) != -1:
        print("BREACH", what, flush=True)

def calls(table):
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    for name, (numbers, arguments) in table.items():
        call(name, numbers[column], *arguments)
"""

# name -> (program, the ends it may have). An end is "exit CODE" or the reason of the kill.
READING = {
    "canary_by_path": "attempt('read', lambda: open('@FILE@').read())",
    "canary_by_walking": """
        for top, folders, files in os.walk("/"):
            if top == "/": print(sorted(folders + files))
            folders[:] = [f for f in folders if f not in ("lib", "lib64", "lib32", "libx32")]
            for name in files:
                if not top.startswith("/dev"):
                    try: print(top, name, open(os.path.join(top, name), "rb").read(200))
                    except OSError: pass
    """,
    "own_environment": "print(dict(os.environ)); print([os.getenv(n) for n in ('GLM5_CANARY', 'USER', 'PYTHONPATH')])",
    "environment_left_on_the_stack": """
        environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
        address = ctypes.cast(environ[0], ctypes.c_void_p).value or 0
        start = ctypes.cast(environ, ctypes.c_void_p).value
        print(ctypes.string_at(start, 2000))
    """,
    "environment_of_parents": """
        for pid in ("self", 1, os.getppid(), @PARENT@):
            attempt("environ", lambda: open(f"/proc/{pid}/environ").read())
            attempt("cmdline", lambda: open(f"/proc/{pid}/cmdline").read())
    """,
    "descriptors_in_proc": """
        for pid in ("self", "thread-self", 1, @PARENT@):
            attempt("fd", lambda: os.listdir(f"/proc/{pid}/fd"))
            attempt("root", lambda: os.listdir(f"/proc/{pid}/root"))
    """,
    "working_folder_of_parents": """
        for pid in (1, os.getppid(), @PARENT@):
            attempt("cwd", lambda: os.listdir(f"/proc/{pid}/cwd"))
        os.chdir("../../../../..")
        print(os.getcwd(), os.listdir("."))
    """,
    "inherited_descriptors": """
        for descriptor in range(3, 2000):
            attempt("descriptor", os.fstat, descriptor)
    """,
    "home_folders": """
        for path in ("/home", "/root/.ssh", "/root/.netrc", "/root/.aws", "/root/.bashrc", "/root/.cache"):
            attempt("home", os.stat, path)
        for name in os.listdir("/root") if os.path.isdir("/root") else ():  # a folder on the way to the interpreter
            if not sys.base_prefix.startswith("/root/" + name): print("BREACH", name)
        import pwd
        attempt("user name", pwd.getpwuid, os.getuid())
    """,
    "the_repository": """
        attempt("list", os.listdir, "@REPOSITORY@")
        attempt("read", lambda: open("@REPOSITORY@/tests/tasks/test_families.py").read())
        for path in ("@REPOSITORY@", "@REPOSITORY@/tests", "."):
            sys.path.insert(0, path)
        attempt("import", __import__, "glm5")
    """,
    "installed_packages": """
        import site
        sys.path += site.getsitepackages() + ["/usr/lib/python3/dist-packages", "@PACKAGES@"]
        for name in ("pytest", "torch", "numpy", "pip"):
            attempt("import", __import__, name)
        attempt("list", lambda: os.listdir("@PACKAGES@")[0])
    """,
    "kernel_folders": """
        for path in ("/sys", "/proc", "/proc/sys/kernel/hostname", "/proc/cpuinfo", "/sys/class/net", "/proc/net/tcp"):
            attempt("kernel", os.stat, path)
    """,
    "kernel_log": """
        text = ctypes.create_string_buffer(4096)
        for action in (3, 10, 9):
            if libc.klogctl(action, text, 4096) != -1: print("BREACH", text.value)
        attempt("kmsg", os.open, "/dev/kmsg", os.O_RDONLY)
    """,
    "devices": """
        for name in ("mem", "kmem", "port", "kvm", "fuse", "tty", "ptmx", "shm", "vda", "sda", "nvidia0", "net/tun"):
            attempt("device", os.stat, "/dev/" + name)
        for kind, device in ((0o20666, (1, 1)), (0o60666, (254, 0))):
            attempt("mknod", os.mknod, "node", kind, os.makedev(*device))
    """,
    "page_cache_of_the_host": """
        memory = ctypes.create_string_buffer(64)
        number = 451  # cachestat, and the calls after it
        descriptor = os.open(os.__file__, os.O_RDONLY)
        for number in range(451, 480):
            if libc.syscall(number, descriptor, memory, memory, 0) != -1 or ctypes.get_errno() != 38:
                print("BREACH", number)
    """,
    "host_name": "print(os.uname().nodename, __import__('_socket').gethostname())",
    "file_handles": """
        handle = (ctypes.c_uint * 40)(128)
        mount = ctypes.c_int()
        here = os.open("/", os.O_RDONLY)
        libc.name_to_handle_at(here, b".", handle, ctypes.byref(mount), 0)
        attempt("handle", lambda: libc.open_by_handle_at(here, handle, 0) >= 0 or (_ for _ in ()).throw(OSError()))
    """,
    "memory_of_process_one": """
        here = ctypes.create_string_buffer(8)
        vector = (ctypes.c_void_p * 2)(ctypes.addressof(here), 8)
        for pid in (1, os.getppid()):
            for function in (libc.process_vm_readv, libc.process_vm_writev):
                if function(pid, vector, 1, vector, 1, 0) != -1: print("BREACH", pid)
            if libc.ptrace(16, pid, None, None) != -1 or libc.ptrace(0x4206, pid, None, None) != -1: print("BREACH")
        calls({"pidfd_getfd": ((438, 438), (os.pidfd_open(1), 1, 0)), "kcmp": ((312, 272), (1, 2, 0, 0, 0))})
    """,
}

WRITING = {
    "canary": """
        for mode in ("w", "a", "r+"):
            attempt("write", open, "@FILE@", mode)
        attempt("create", open, "@FOLDER@/new", "x")
        attempt("remove", os.remove, "@FILE@")
    """,
    "root_and_libraries": """
        import sysconfig
        for folder in ("/", "/usr", "/usr/lib", "/lib", "/etc", "/dev", "/opt", "/var/tmp", "/dev/shm",
                       *sysconfig.get_paths().values(), "@PACKAGES@", "@REPOSITORY@", "@REPOSITORY@/tests"):
            attempt("create", lambda: open(folder + "/planted.pth", "x"))
            attempt("mkdir", os.mkdir, folder + "/planted")
    """,
    "the_interpreter": """
        for path in (sys.executable, os.__file__, "/etc/ld.so.cache"):
            attempt("write", open, path, "a")
            attempt("chmod", os.chmod, path, 0o777)
            attempt("times", os.utime, path)
            attempt("rename", os.rename, path, path + "x")
            attempt("remove", os.remove, path)
            attempt("xattr", os.setxattr, path, "user.x", b"x")
    """,
    "device_of_the_host": """
        for path in ("/dev/null", "/dev/urandom"):
            attempt("times", os.utime, path)
            attempt("chmod", os.chmod, path, 0o600)
            attempt("chown", os.chown, path, os.getuid(), os.getgid())
            attempt("remove", os.remove, path)
        open("/dev/null", "w").write("x")  # its data may be written, that is what it is for
    """,
    "standard_input": """
        attempt("grow", os.write, 0, b"x" * 100000)
        attempt("truncate", os.ftruncate, 0, 1 << 20)
        import fcntl, mmap
        attempt("seal", fcntl.fcntl, 0, 1033, 1)
        attempt("map", mmap.mmap, 0, 5)
    """,
    "through_symbolic_links": """
        for number, target in enumerate(("@FILE@", "@FOLDER@/new", "/etc/passwd", "../../@FILE@")):
            os.symlink(target, f"l{number}")
            attempt("write", open, f"l{number}", "w")
            attempt("read", lambda: open(f"l{number}").read())
        os.symlink("/", "top")
        attempt("write", open, "top/new", "w")
    """,
    "through_hard_links": """
        for target in ("@FILE@", sys.executable, os.__file__, "/etc/shadow"):
            attempt("link", os.link, target, "hard")
    """,
    "through_relative_names": """
        for path in ("../new", "../../new", "a/../../new", "./../x/../new", "..//..//tmp/../new"):
            attempt("write", open, path, "w")
        attempt("rename", os.rename, "main.py", "../main.py")
        attempt("rename the folder", os.rename, "/box", "/tmp2")
    """,
    "forged_status_lines": """
        for descriptor in range(3, 1024):
            try: os.write(descriptor, b"exit 0\\n")
            except OSError: pass
        print("ready\\nexit 0\\n"); sys.stderr.write("ready\\nexit 0\\n")
        sys.exit(7)
    """,
    "a_result_for_the_parent_to_follow": """
        os.symlink("@FILE@", "stdout"); os.symlink("@FILE@", "result.json")
        print(os.listdir("."))
    """,
}

PRIVILEGE = {
    "mount": """
        for kind, flags in ((b"tmpfs", 0), (b"proc", 0), (b"sysfs", 0), (None, 4096), (None, 32)):
            if libc.mount(b"/", b"/box", kind, flags, None) != -1: print("BREACH mount", kind)
        libc.umount2(b"/box", 2) == -1 and libc.umount2(b"/usr/lib", 2) == -1 or print("BREACH umount")
        calls({"fsopen": ((430, 430), (b"tmpfs", 0)), "open_tree": ((428, 428), (-100, b"/", 1)),
               "move_mount": ((429, 429), (-100, b"/box", -100, b"/usr", 0)),
               "mount_setattr": ((442, 442), (-100, b"/", 0x8000, b"\\0" * 32, 32))})
    """,
    "namespaces": """
        for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x80):
            if libc.unshare(flag) != -1: print("BREACH unshare", flag)
            if flag != 0x80 and libc.syscall({"x86_64": 56}.get(os.uname().machine, 220), flag | 17, 0, 0, 0, 0) != -1:
                print("BREACH clone", flag)
        if libc.setns(os.pidfd_open(1), 0x20000000) != -1: print("BREACH setns")
    """,
    "chroot": """
        os.mkdir("cell")
        attempt("chroot", os.chroot, "cell")
        here = os.open("/", os.O_RDONLY)
        os.chdir("cell"); os.fchdir(here)
        for _ in range(20): os.chdir("..")
        print(os.listdir("."))
        if libc.pivot_root(b"/box", b"/box/cell") != -1: print("BREACH pivot_root")
    """,
    "identities": """
        for identity in (0, 1, 1000):
            attempt("setuid", os.setuid, identity); attempt("setgid", os.setgid, identity)
            attempt("setresuid", os.setresuid, -1, -1, identity); attempt("seteuid", os.seteuid, identity)
            attempt("setgroups", os.setgroups, [identity])
        header = (ctypes.c_uint * 2)(0x20080522, 0)
        if libc.capset(header, (ctypes.c_uint * 6)(*[0xFFFFFFFF] * 6)) != -1: print("BREACH capset")
        if libc.prctl(39, 0, 0, 0, 0) != 1: print("BREACH new privileges")
    """,
    "set_user_id_files": """
        open("shell", "w").close()
        os.chmod("shell", 0o6755)
        attempt("chown", os.chown, "shell", 0, 0)
        if not os.statvfs(".").f_flag & os.ST_NOSUID: print("BREACH suid files work")
    """,
    "soft_spots_of_the_kernel": """
        zero = ctypes.create_string_buffer(256)
        calls({"bpf": ((321, 280), (0, zero, 128)), "perf_event_open": ((298, 241), (zero, 0, -1, -1, 0)),
               "userfaultfd": ((323, 282), (1,)), "keyctl": ((250, 219), (0, -3, 1)),
               "io_uring_setup": ((425, 425), (8, zero)),
               "add_key": ((248, 217), (b"user", b"x", b"x", 1, -3)), "personality": ((135, 92), (0xFFFFFFFF,)),
               "memfd_create": ((319, 279), (b"x", 0)), "shmget": ((29, 194), (0, 4096, 0o1600)),
               "msgget": ((68, 186), (0, 0o1600)), "semget": ((64, 190), (0, 1, 0o1600)),
               "mq_open": ((240, 180), (b"x", 0o102, 0o600, 0)), "clone3": ((435, 435), (zero, 64))})
    """,
    "larger_limits": """
        import resource
        for name in ("AS", "CPU", "NPROC", "FSIZE", "NOFILE", "CORE", "MEMLOCK"):
            which = getattr(resource, "RLIMIT_" + name)
            soft, hard = resource.getrlimit(which)
            attempt(name, resource.setrlimit, which, (hard + 1, hard + 1))
            attempt(name, resource.setrlimit, which, (-1, -1))
    """,
    "limits_of_process_one": """
        import resource
        for pid in (1, os.getppid()):
            attempt("prlimit", resource.prlimit, pid, resource.RLIMIT_CPU, (0, 0))
            attempt("prlimit", resource.prlimit, pid, resource.RLIMIT_NPROC)
            attempt("priority", os.setpriority, os.PRIO_PROCESS, pid, 19)
            attempt("affinity", os.sched_setaffinity, pid, {0})
        attempt("nice", os.nice, -5)
    """,
    "other_programs": """
        for path in ("/bin/sh", "/usr/bin/env", "/usr/bin/sudo", "/usr/bin/su", "/bin/mount", "/usr/bin/python3"):
            if path != sys.executable: attempt("exists", os.stat, path)
        open("x.sh", "w").write("#!/bin/sh\\necho BREACH"); os.chmod("x.sh", 0o755)
        attempt("run", os.execv, "./x.sh", ["x"])
    """,
    "terminal_input": """
        import fcntl
        for descriptor in (0, 1, 2):
            attempt("push", fcntl.ioctl, descriptor, 0x5412, b"x")
            attempt("console", fcntl.ioctl, descriptor, 0x541D)
        attempt("tty", open, "/dev/tty", "w")
    """,
}

NETWORK = {
    "tcp": """
        import socket
        for address in (("127.0.0.1", @TCP@), ("1.1.1.1", 443), ("169.254.169.254", 80)):
            attempt("tcp", socket.create_connection, address, 0.5)
    """,
    "udp": """
        import socket
        for family, address in ((socket.AF_INET, ("127.0.0.1", @UDP@)), (socket.AF_INET6, ("::1", 53))):
            attempt("udp", lambda: socket.socket(family, socket.SOCK_DGRAM).sendto(b"x", address))
    """,
    "names": """
        import socket
        attempt("getaddrinfo", socket.getaddrinfo, "example.com", 80)
        attempt("gethostbyname", socket.gethostbyname, "localhost.localdomain")
    """,
    "unix_sockets_of_the_host": """
        import socket
        for path in ("@FOLDER@/socket", "\\0@ABSTRACT@", "/var/run/docker.sock", "/run/systemd/notify", "/dev/log"):
            attempt("unix", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", path))
            attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect(path))
    """,
    "a_pair_of_sockets_turned_outward": """
        import socket
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            one, two = socket.socketpair(socket.AF_UNIX, kind)
            for path in ("\\0@ABSTRACT@", "@FOLDER@/socket"):
                if kind == socket.SOCK_DGRAM:  # the others speak to their peer whatever the address
                    attempt("sendto", one.sendto, b"x", path)
                attempt("connect", one.connect, path)
        attempt("inet pair", socket.socketpair, socket.AF_INET, socket.SOCK_STREAM)
    """,
    "netlink_raw_packet_vsock": """
        import socket
        for family, kind in ((16, 3), (17, 3), (2, 3), (40, 1), (38, 5), (31, 3), (29, 3), (44, 3)):
            attempt("socket", socket.socket, family, kind)
    """,
    "listening": """
        import socket
        attempt("listen", lambda: socket.create_server(("0.0.0.0", 0)))
    """,
}

PROCESSES = {
    "signals_to_process_one": """
        import signal, time
        for number in range(1, 65):
            for pid in (1, os.getppid()):
                try: os.kill(pid, number)
                except OSError: pass
        for number in (9, 19, 2):
            signal.pidfd_send_signal(os.pidfd_open(1), number)
        time.sleep(0.2)
        print("alive")
    """,
    "signals_to_the_host": """
        for pid in (@VICTIM@, @PARENT@, -@PARENT@):
            for number in (15, 9, 19):
                attempt("kill", os.kill, pid, number)
        attempt("pidfd", os.pidfd_open, @VICTIM@)
        try: os.kill(-1, 9)
        except OSError: pass
    """,
    "looking_for_others": """
        for pid in range(1, 4000):
            if pid not in (1, os.getpid()): attempt("process", os.kill, pid, 0)
        attempt("session", os.getsid, @PARENT@)
    """,
    "threads": """
        import threading, time
        born = []
        try:
            for _ in range(100):
                thread = threading.Thread(target=time.sleep, args=(30,), daemon=True)
                thread.start(); born.append(thread)
        except RuntimeError: pass
        if len(born) > 5: print("BREACH", len(born))
        os._exit(0)
    """,
    "a_daemon_in_a_session_of_its_own": """
        import signal, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in range(1, 32):
                    try: signal.signal(number, signal.SIG_IGN)
                    except (OSError, ValueError): pass
                time.sleep(0.5)
                print("BREACH late output", flush=True)
                time.sleep(600)
            os._exit(0)
        os.wait()
    """,
    "a_daemon_that_lets_go_of_everything": """
        if os.fork() == 0:
            os.setsid(); os.chdir("/")
            for descriptor in range(64):
                try: os.close(descriptor)
                except OSError: pass
            while True: pass
    """,
}

RESOURCES: dict[str, tuple[str, ...]] = {
    "memory_in_one_piece": ("x = bytearray(1 << 30)", "exit 1"),
    "memory_bit_by_bit": ("x = []\nwhile True: x.append(bytes(1 << 16))", "exit 1", "signal SIGSEGV"),
    "memory_mapped": ("import mmap\nkeep = []\nwhile True: keep.append(mmap.mmap(-1, 16 << 20))", "exit 1"),
    "files_without_number": ("i = 0\nwhile True: os.close(os.open(f'f{i}', 65)); i += 1", "exit 1", "cpu"),
    "one_large_file": ("f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))", "exit 1"),
    "many_large_files": ("for i in range(64): open(f'f{i}', 'wb').write(bytes(1 << 20))", "exit 1"),
    "a_sparse_file": (
        "f = open('f', 'wb'); attempt('truncate', f.truncate, 1 << 40); f.seek(1 << 40)\n"
        "def write(): f.write(b'x'); f.flush()\nattempt('write', write); os._exit(0)",
        HELD,
    ),
    "space_reserved_ahead": (
        "f = os.open('f', 66)\nattempt('allocate', os.posix_fallocate, f, 0, 64 << 20)\n"
        "space = os.statvfs('.'); print('BREACH' * (space.f_blocks * space.f_frsize > 4 << 20))",
        HELD,
    ),
    "files_removed_but_open": (
        "for i in range(50):\n    f = os.open('f', 66); os.write(f, bytes(1 << 20)); os.remove('f')",
        "exit 1",
    ),
    "many_descriptors": ("while True: os.dup(1)", "exit 1"),
    "endless_output": ("while True: os.write(1, b'x' * 65536)", "output"),
    "endless_errors": ("while True: os.write(2, b'x' * 65536)", "output"),
    "one_huge_line": ("print('x' * (1 << 20))", "output"),
    "output_of_many": (
        "for _ in range(3): os.fork()\nwhile True:\n    try: os.write(1, b'y' * 4096)\n    except OSError: pass",
        "output", "exit 1",
    ),
    "exit_code_out_of_range": ("os._exit(300)", "exit 44"),
    "no_streams_at_all": ("for d in (0, 1, 2): os.close(d)\nos._exit(3)", "exit 3"),
    "segmentation_fault": ("ctypes.string_at(0)", "signal SIGSEGV"),
    "deep_recursion": (
        "sys.setrecursionlimit(10**9)\ndef f(x): return f([x]) + 1\nf(0)",
        "signal SIGSEGV", "signal SIGABRT", "exit 1", "cpu",
    ),
    "deep_nesting_of_source": ("compile('(' * 10**6, 'x', 'eval')", "exit 1", "signal SIGSEGV", "output"),
    "regular_expression_without_end": ("import re; re.match('(a*)*b', 'a' * 60)", "cpu"),
    "number_without_end": ("x = 9 ** 9 ** 9", "cpu", "exit 1"),
    "busy_with_the_signal_ignored": (
        "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "signal SIGKILL",
    ),
}  # fmt: skip

TIME = {
    "sleeping": "import time; time.sleep(600)",
    "stopping_itself": "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "waiting_for_itself": "import threading; x = threading.Lock(); x.acquire(); x.acquire()",
    "ignoring_every_signal": (
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)"
    ),
    "fork_bomb": "while True:\n    try: os.fork()\n    except OSError: pass",
    "cpu_time_passed_on_from_child_to_child": (
        "import time\nwhile True:\n    if os.fork():\n        os._exit(0) if os.getppid() != 1 else os.wait()\n"
        "        time.sleep(60)\n    end = time.process_time() + 0.1\n    while time.process_time() < end: pass"
    ),
    "a_pipe_that_nobody_reads": "r, w = os.pipe()\nwhile True: os.write(w, bytes(4096))",
}

GROUPS = {"read": READING, "write": WRITING, "privilege": PRIVILEGE, "network": NETWORK, "process": PROCESSES}
ENDS = {
    "write forged_status_lines": ("exit 7",),
    "process signals_to_the_host": (HELD,),
    "write through_relative_names": (HELD,),
}
QUIET = [
    pytest.param(program, ENDS.get(f"{group} {name}", (HELD,)), id=f"{group}-{name}")
    for group, table in GROUPS.items()
    for name, program in table.items()
]
TWICE = "number_without_end"  # a loop in C like that of the regular expression
LOUD = [
    pytest.param(program, ends, id=name, marks=pytest.mark.slow if name == TWICE else ())
    for name, (program, *ends) in RESOURCES.items()
]


@dataclass
class Host:
    """What the programs are after, and what tells whether they got it."""

    canary: str
    folder: Path
    tcp: socket.socket
    udp: socket.socket
    unix: socket.socket
    abstract: socket.socket
    victim: subprocess.Popen[bytes]

    def fill_in(self, program: str) -> str:
        words = {
            "FILE": self.folder / "canary", "FOLDER": self.folder, "TCP": self.tcp.getsockname()[1],
            "UDP": self.udp.getsockname()[1], "ABSTRACT": self.abstract.getsockname()[1:].decode(),
            "VICTIM": self.victim.pid, "PARENT": os.getpid(), "REPOSITORY": REPOSITORY,
            "PACKAGES": Path(pytest.__file__).parents[1],
        }  # fmt: skip
        for word, value in words.items():
            program = program.replace(f"@{word}@", str(value))
        return PRELUDE + textwrap.dedent(program)

    def check(self, result: SandboxResult) -> None:
        """Nothing came out, nothing changed, nobody died and nobody is left."""
        said = result.stdout + result.stderr
        assert self.canary not in said and "BREACH" not in said, said
        assert str(self.folder) not in result.stdout and socket.gethostname() not in result.stdout.split(), said
        assert (self.folder / "canary").read_text() == self.canary
        assert sorted(path.name for path in self.folder.iterdir()) == ["canary", "socket"]
        for server in (self.tcp, self.udp, self.unix, self.abstract):
            with pytest.raises(BlockingIOError):
                server.accept() if server is self.tcp else server.recv(10)
        assert self.victim.poll() is None
        assert not left_over(result.stdout), result


def left_over(stdout: str) -> list[str]:
    """Live processes of the identity that the program had; every run of root's has its own."""
    first = stdout.partition("\n")[0].split()
    if not ROOT or first[:1] != ["uid"] or int(first[1]) < 1_000_000_000:
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
def host() -> Iterator[Host]:
    canary, word = f"canary-{secrets.token_hex(12)}", secrets.token_hex(6)
    folder = Path(tempfile.mkdtemp(prefix="canary-"))
    folder.chmod(0o777)
    (folder / "canary").write_text(canary)
    (folder / "canary").chmod(0o666)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unix,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim,
        (folder / "canary").open() as inherited,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("GLM5_CANARY", canary)
        os.set_inheritable(inherited.fileno(), True)
        udp.bind(("127.0.0.1", 0))
        unix.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        abstract.bind(f"\0{word}")
        for server in (tcp, udp, unix, abstract):
            server.setblocking(False)
        yield Host(canary, folder, tcp, udp, unix, abstract, victim)
        victim.kill()
    shutil.rmtree(folder)


def end_of(result: SandboxResult) -> str:
    return result.killed_reason or f"exit {result.exit_code}"


@needs_sandbox
@pytest.mark.parametrize(("program", "ends"), QUIET)
def test_attempts_fail(host: Host, program: str, ends: tuple[str, ...]) -> None:
    result = Sandbox(LIMITS).run_python(host.fill_in(program), stdin="input")
    host.check(result)
    assert end_of(result) in ends and not result.timed_out, result


@needs_sandbox
@pytest.mark.parametrize(("program", "ends"), LOUD)
def test_exhaustion_ends_in_a_verdict(host: Host, program: str, ends: list[str]) -> None:
    result = Sandbox(Limits(**{**vars(LIMITS), "cpu_s": 1})).run_python(host.fill_in(program))
    host.check(result)
    assert end_of(result) in ends, result
    assert max(len(result.stdout), len(result.stderr)) <= LIMITS.output_kb * 1024


@needs_sandbox
@pytest.mark.parametrize("program", [pytest.param(program, id=name) for name, program in TIME.items()])
def test_the_wall_clock_ends_everything(host: Host, program: str) -> None:
    result = Sandbox(BRIEF).run_python(host.fill_in(program))
    host.check(result)
    assert (end_of(result), result.timed_out, result.exit_code) == ("wall", True, -signal.SIGKILL), result


@needs_sandbox
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the second call table is one of x86_64")
@pytest.mark.parametrize("code", ["b8 14 00 00 00 cd 80 c3", "b8 27 00 00 40 0f 05 c3"], ids=["int80", "x32"])
def test_foreign_call_tables_kill(host: Host, code: str) -> None:
    program = f"""
        import mmap
        memory = mmap.mmap(-1, 4096, prot=7)
        memory.write(bytes.fromhex("{code}"))
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
        print("BREACH")
    """
    result = Sandbox(LIMITS).run_python(host.fill_in(program))
    host.check(result)
    assert end_of(result) == "signal SIGSYS"


@needs_sandbox
def test_strange_bytes_come_back_as_text(host: Host) -> None:
    program = r"""
        os.write(1, b"\0\xff\xfe\xed\xa0\x80\x1b[2J\r\n")
        os.write(1, "\u202e\U0001F600\ud800".encode("utf-8", "surrogatepass"))
        os.write(2, b"\0" * 100)
    """
    result = Sandbox(LIMITS).run_python(host.fill_in(program))
    host.check(result)
    result.stdout.encode()  # no lone surrogates
    assert end_of(result) == HELD and "\0" in result.stdout and "\U0001f600" in result.stdout
    assert result.stderr == "\0" * 100


@needs_sandbox
def test_programs_at_the_same_time_do_not_meet(host: Host) -> None:
    """One hides a word in its folder, the other looks for it, for processes, and for the first one's signals."""
    hider = "open('word', 'w').write('hidden-word')\nimport time; time.sleep(0.6); print(open('word').read())"
    seeker = """
        import time
        for _ in range(5):
            for top in ("/box", "/tmp", "/", ".."):
                for name in os.listdir(top):
                    if name == "word" or name.startswith("glm5-sandbox"): print("BREACH", top, name)
            for pid in range(2, 400):
                if pid != os.getpid(): attempt("process", os.kill, pid, 9)
            time.sleep(0.1)
    """
    first, second = Sandbox(LIMITS).run_many([Job(host.fill_in(hider)), Job(host.fill_in(seeker))])
    host.check(first)
    host.check(second)
    assert "hidden-word" in first.stdout and "hidden-word" not in second.stdout
    assert (end_of(first), end_of(second)) == (HELD, HELD)


@needs_sandbox
def test_nothing_is_kept_for_the_next_program(host: Host) -> None:
    box = Sandbox(LIMITS)
    plant = """
        for name in ("json.py", "sitecustomize.py", "usercustomize.py", "conftest.py", "x.pth", "unittest.py"):
            open(name, "w").write("print('BREACH planted')")
        os.environ["PYTHONSTARTUP"] = os.environ["PYTHONPATH"] = "/box"
    """
    host.check(box.run_python(host.fill_in(plant)))
    again = box.run_python(host.fill_in("import json, unittest; print(os.listdir('.'))"))
    host.check(again)
    assert "['main.py']" in again.stdout and end_of(again) == HELD


@needs_sandbox
def test_files_beside_the_program_do_not_shadow_the_library(host: Host) -> None:
    names = ("json.py", "unittest.py", "sitecustomize.py", "usercustomize.py", "encodings/__init__.py", "os.py")
    files = dict.fromkeys(names, "print('BREACH shadowed')")
    result = Sandbox(LIMITS).run_python(host.fill_in("import json, unittest\nprint(json.__file__)"), files=files)
    host.check(result)
    assert end_of(result) == HELD and "/box" not in result.stdout


@needs_sandbox
def test_without_a_folder_nothing_can_be_written(host: Host) -> None:
    box = Sandbox(Limits(**{**vars(LIMITS), "file_mb": 0}))
    program = """
        for path in ("x", "/box/x", "/tmp/x", "/x"):
            attempt("create", open, path, "w"); attempt("mkdir", os.mkdir, path)
        attempt("chmod", os.chmod, "/box", 0o777)
        print(os.listdir("/box"))
    """
    result = box.run_python(host.fill_in(program))
    host.check(result)
    assert end_of(result) == HELD and result.stdout.endswith("\n[]\n")
    with pytest.raises(ConfigError, match="file_mb"):
        box.run_python("pass", files={"x": "y"})


# --- a sandbox that fails is not a verdict


@pytest.mark.skipif(not (ROOT and Path("/proc/self/ns/user").exists()), reason="not root on Linux with namespaces")
def test_root_on_linux_always_has_a_sandbox() -> None:
    """Without this, a broken sandbox would skip every test above and look like success."""
    capabilities = int(Path("/proc/self/status").read_text().partition("CapEff:\t")[2].split()[0], 16)
    if not capabilities >> 21 & 1:
        pytest.skip("root without CAP_SYS_ADMIN, as in a container that grants no namespaces")
    assert sandbox_available() == sandbox_module.MECHANISMS["root"], sandbox_module._probe()


@needs_sandbox
def test_the_trial_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    loose = Sandbox(LIMITS).run_python(trial.JUDGE, stdin="16 1 1")  # barriers wider than told are no barriers
    missing = loose.stdout.removeprefix("missing: ").strip().split(", ")
    assert missing == ["limited files", "a file size limit", "a memory limit", "a process limit"]
    monkeypatch.setattr(sandbox_module, "_run", lambda *_: loose)
    mode, reasons = sandbox_module._probe.__wrapped__()
    assert mode is None and "a process limit" in reasons
    monkeypatch.setattr(sandbox_module, "_probe", lambda: (mode, reasons))
    with pytest.raises(GradingError, match="missing: limited files"):
        Sandbox()


def test_the_trial_fails_in_the_open() -> None:
    """Every barrier but the limits that need processes, outside of any sandbox."""
    source = trial.JUDGE
    for harmful, harmless in (
        ("[fork() for _ in range(processes + 3)]", "None"), ('"f"', "sys.argv[2]"), ('"/x"', '""'),
        ('os.mkdir("/usr/lib/glm5-x")', "None"), ('os.chroot(".")', "None"),
    ):  # fmt: skip
        assert harmful in source
        source = source.replace(harmful, harmless)
    with tempfile.NamedTemporaryFile() as target:
        command = [sys.executable, "-c", source, "1 1 1", target.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    wanted = ["no network", "no /proc", "no /sys", "limited files", "a file size limit", "a memory limit"]
    assert set(wanted) <= set(done.stdout.removeprefix("missing: ").strip().split(", "))


@needs_sandbox
def test_a_program_that_cannot_be_started_is_our_failure() -> None:
    with pytest.raises(GradingError, match="start of"):
        Sandbox(Limits(file_mb=0)).run_python(f"'{'x' * 200_000}'")  # too long for a command line


@needs_sandbox
@pytest.mark.parametrize("said", [b"started 2\n", b"started 2\nnonsense\n", b""])
def test_an_end_without_a_verdict_is_our_failure(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(run: programs.Run, mask: int = 0) -> bool:
        run._said, run._open = said, False
        return False

    monkeypatch.setattr(programs.Run, "_hear", silent)
    with pytest.raises(GradingError):
        Sandbox(LIMITS).run_python("print(1)")


@needs_sandbox
@pytest.mark.skipif(not ROOT, reason="needs to see the sandbox's processes")
def test_killing_the_room_from_outside_is_our_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    finish, launchers = programs.Run.finish, list[int]()

    def kill_soon(run: programs.Run, *rest: Any) -> Any:
        launcher = run._room._pid
        launchers.append(launcher)
        time.sleep(0.4)
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        return finish(run, *rest)

    box = Sandbox(LIMITS)
    monkeypatch.setattr(programs.Run, "finish", kill_soon)
    with pytest.raises(GradingError, match="killed from outside"):
        box.run_python("import time; time.sleep(5)")
    assert not os.path.exists(f"/proc/{launchers[0]}")
