"""The trials of rooms: programs that try every barrier from the inside and print the missing ones.

Their first argument, or else their input, are their limits: MB of memory, processes, MB of files.
"""

from __future__ import annotations

_BEFORE = """\
import os, resource, sys, time
memory_mb, processes, file_mb = map(int, (sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read()).split())

def refused(attempt):
    try:
        attempt()
    except (OSError, MemoryError):
        return True
    return False

def fork():
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)

"""
_AFTER = """
space = os.statvfs(".")
barriers |= {
    "an unprivileged identity": 0 not in (*os.getresuid(), *os.getresgid(), *os.getgroups()),
    "a read-only machine": refused(lambda: os.mkdir("/usr/lib/glm5-x")),
    "no /sys": not os.path.exists("/sys/kernel"),
    "processes of its own": os.getppid() == 1,
    "no privileges": refused(lambda: os.chroot(".")) and refused(lambda: os.setuid(0)),
    "limited files": space.f_blocks * space.f_frsize <= file_mb << 20,
    "a file size limit": refused(lambda: os.truncate(os.open("f", os.O_CREAT | os.O_RDWR), (file_mb << 20) + 1)),
    "a memory limit": refused(lambda: bytearray(memory_mb << 20)),
    "a CPU limit": resource.getrlimit(resource.RLIMIT_CPU)[1] != resource.RLIM_INFINITY,
    "a process limit": refused(lambda: [fork() for _ in range(processes + 3)]),
}
print("missing: " + ", ".join(name for name, holds in barriers.items() if not holds))
"""
_NETWORK = """\
import mmap, socket

def connect(family, address):
    with socket.socket(family) as made:
        made.settimeout(5)
        made.connect(address)

shown = os.listdir("/proc")
barriers = {
    "no other network": refused(lambda: connect(socket.AF_INET, ("1.1.1.1", 443))),
    "no sockets of the machine": refused(lambda: connect(socket.AF_UNIX, "\\0" + sys.argv[2])),
    "sockets of few kinds": all(refused(lambda: socket.socket(*kind)) for kind in ((16, 3), (17, 3), (2, 3), (2, 5))),
    "no folders of the machine": not os.path.exists(sys.argv[2]),
    "a view of its own processes only": not {"sys", "kcore", "net", "meminfo"} & set(shown) and len(shown) < 9,
    "counted memory": refused(lambda: mmap.mmap(-1, 4096)),
}
"""

JUDGE = f"""{_BEFORE}
import _socket
barriers = {{
    "no network": refused(_socket.socket),
    "a read-only root": refused(lambda: os.mkdir("/x")),
    "no /proc": not os.path.exists("/proc/self"),
}}
{_AFTER}"""

ROOM = f"""{_BEFORE}{_NETWORK}
barriers["a file system of its own"] = not refused(lambda: os.mkdir("/x"))
{_AFTER}"""
"""Its second argument is a folder of the machine; an abstract socket outside the room has the same name."""

AGENT = f"""{_BEFORE}{_NETWORK}
barriers |= {{
    "a way to the gateway": not refused(lambda: connect(socket.AF_INET, ("127.0.0.1", 8100))),
    "a read-only root": refused(lambda: os.mkdir("/x")),
    "a read-only /proc": refused(lambda: open("/proc/self/mem", "r+b")),
}}
{_AFTER}"""
