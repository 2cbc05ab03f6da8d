"""System calls and limits of the programs in rooms: shells, compilers, servers and agents need more than one program of
the code judge (`launcher.py`). Runs inside the room, without the rest of `glm5`.
"""

from __future__ import annotations

import fcntl
import resource
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from glm5.sandbox import launcher
else:
    import launcher

LOAD, JUMP_EQ, JUMP_SET, MASK, GIVE = 0x20, 0x15, 0x45, 0x54, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | launcher.EPERM
ARGUMENT = 16  # offset of a call's first argument; 8 bytes per argument

# What programs of rooms may do and those of the judge may not: sockets (restricted below), locks, the machine's memory
# size. Programs of different rooms could signal to each other through locks on shared read-only files.
ALLOWED = ("socket", "flock", "sysinfo")
DENIED = {name: numbers for name, numbers in launcher.DENIED.items() if name not in ALLOWED}
BY_ARGUMENT = (
    ((72, 25), 1, (launcher.F_SETLEASE, launcher.F_NOTIFY), launcher.EPERM),
    ((28, 233), 2, (launcher.MADV_COLD, launcher.MADV_PAGEOUT), launcher.EPERM),
)
SOCKET, MMAP = (41, 198), (9, 222)
FAMILIES = (1, 2, 10)  # Unix, IPv4, IPv6
SOCKET_TYPES = (1, 2)  # stream, datagram
PROTOCOLS = (0, 6, 17)  # default, TCP, UDP
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20

FILES = 1024  # descriptors per process
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def refuse_unless(place: int, values: tuple[int, ...], mask: int = 0xFFFFFFFF) -> list[tuple[int, ...]]:
    """Instructions that refuse the call unless an argument is one of `values`."""
    code: list[tuple[int, ...]] = [(LOAD, 0, 0, ARGUMENT + 8 * place), (MASK, 0, 0, mask)]
    for left, value in zip(range(len(values), 0, -1), values, strict=True):
        code.append((JUMP_EQ, left, 0, value))
    return [*code, (GIVE, 0, 0, REFUSE)]


def extra_rules(column: int) -> list[tuple[int, ...]]:
    """Sockets of few kinds, and no shared memory without a file: no limit would count it after it is unmapped."""
    sockets = refuse_unless(0, FAMILIES) + refuse_unless(1, SOCKET_TYPES, 0xF) + refuse_unless(2, PROTOCOLS)
    sockets.append((GIVE, 0, 0, ALLOW))
    shared = [(LOAD, 0, 0, ARGUMENT + 8 * 3), (JUMP_SET, 0, 2, MAP_ANONYMOUS), (JUMP_SET, 0, 1, MAP_SHARED)]
    shared += [(GIVE, 0, 0, REFUSE), (GIVE, 0, 0, ALLOW)]
    code = [(JUMP_EQ, 0, len(sockets), SOCKET[column]), *sockets]
    return [*code, (JUMP_EQ, 0, len(shared), MMAP[column]), *shared]


def open_loopback(port: int) -> socket.socket:
    """Bring the room's loopback interface up and listen on it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        wanted = struct.pack("16sh22x", b"lo", IFF_UP)
        fcntl.ioctl(control, SIOCSIFFLAGS, wanted)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def limit(cpu_s: int, memory_mb: int, processes: int, file_mb: int) -> None:
    """Address space has no limit, because runtimes with garbage collectors reserve much more than they use."""
    for which, value in (
        (resource.RLIMIT_DATA, memory_mb << 20),
        (resource.RLIMIT_FSIZE, file_mb << 20),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_NPROC, processes),
    ):
        resource.setrlimit(which, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
