"""What locks programs in: namespaces, identity, capabilities, resource limits, system-call filter. Runs inside of rooms
and imports nothing of `glm5`; the tables are those of the judge's programs, `room_filter.py` has those of all others.

The order of the steps is essential: namespaces, file system, identity, capabilities, limits, filter, `execve`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Calls = Mapping[str, tuple[int, int]]
    Rules = Iterable[tuple[tuple[int, int], int, tuple[int, ...], int]]

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MS_REC, MS_PRIVATE, MNT_DETACH = 1 << 14, 1 << 18, 2
NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mount, uts, ipc, pid, network
CLONE_NEWUSER = 0x10000000
AT_RECURSIVE, SYS_MOUNT_SETATTR = 0x8000, 442
ATTR_NO_DEVICES = 4
ATTR_READ_ONLY = 1 | 2 | ATTR_NO_DEVICES  # MOUNT_ATTR_RDONLY | NOSUID | NODEV
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
SIGKILL, EPERM, ENOSYS = 9, 1, 38
NOBODY = 65534

# System calls that no exercise needs, as (x86_64, aarch64) numbers. Some reach the network, risky parts of the kernel,
# its log, the scheduling of other processes or memory outside the limits. With others (locks, caches, watches, load),
# programs that share the library's files could signal to each other, observe the machine or slow it down.
DENIED = {
    "socket": (41, 198), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "memfd_create": (319, 279),
    "open_by_handle_at": (304, 265), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "personality": (135, 92), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "pidfd_getfd": (438, 438), "mount_setattr": (442, 442), "memfd_secret": (447, 447),
    "syslog": (103, 116), "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "ioprio_set": (251, 30), "move_pages": (279, 239),
    "migrate_pages": (256, 238), "process_madvise": (440, 440), "flock": (73, 32),
    "sync_file_range": (277, 84), "fadvise64": (221, 223), "readahead": (187, 213),
    "mincore": (27, 232), "inotify_init": (253, 26), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "sysinfo": (99, 179),
}  # fmt: skip
NEWER_CALLS = 450  # calls from this number on are unknown to this table: ENOSYS, and libraries fall back to older ones
# Calls that return success and do nothing. A room writes only to memory, so there is nothing to flush to disk, and the
# program must not write back caches of the shared files.
PRETENDED = {
    "fsync": (74, 82), "fdatasync": (75, 83), "msync": (26, 227), "sync": (162, 81), "syncfs": (306, 267),
}  # fmt: skip
# Calls that depend on one argument: (numbers, place of the argument, its values, the answer). POSIX locks return
# success without locking: databases need them, and the program is alone in its folder. Calls that show or take other
# locks on files shared by rooms are refused, and so are calls that page out shared memory.
F_GETLK, F_SETLK, F_SETLKW, F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW = 5, 6, 7, 36, 37, 38
F_SETLEASE, F_NOTIFY, MADV_COLD, MADV_PAGEOUT = 1024, 1026, 20, 21
BY_ARGUMENT = (
    ((72, 25), 1, (F_SETLK, F_SETLKW), 0),
    ((72, 25), 1, (F_GETLK, F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE, F_NOTIFY), EPERM),
    ((28, 233), 2, (MADV_COLD, MADV_PAGEOUT), EPERM),
)
PREADV2 = (327, 286)  # tells whether a page is cached; libc falls back to preadv
PRLIMIT = (302, 261)
MACHINES = {"x86_64": (0, 0xC000003E, 56, 435), "aarch64": (1, 0xC00000B7, 220, 435)}  # column, audit, clone, clone3

libc = ctypes.CDLL(None, use_errno=True)


class SetupError(Exception):
    """The room could not be built; not the program's fault."""


def check(result: int, what: str) -> None:
    if result != 0:
        raise SetupError(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    args = [None if text is None else text.encode() for text in (source, target, kind, data)]
    check(libc.mount(args[0], args[1], args[2], ctypes.c_ulong(flags), args[3]), f"mount {target}")


def sandbox_uid(as_root: bool, maps: tuple[str, ...] = ("/proc/self/uid_map", "/proc/self/gid_map")) -> int:
    """A user id that owns nothing. Root takes a different one per run, because runs must not share a process count. In
    a container with few ids, it is one above those of system and users."""
    if not as_root:
        return NOBODY
    for own in (1_000_000_000 + os.getpid(), 20_000 + os.getpid() % 40_000):
        if all(is_mapped(own, path) for path in maps):
            return own
    return NOBODY


def is_mapped(number: int, path: str) -> bool:
    """Whether a user or group id exists in this user namespace. The map has a line `first outside count` per range."""
    with open(path) as stream:
        ranges = [tuple(map(int, line.split())) for line in stream]
    return any(first <= number < first + count for first, _, count in ranges)


def limit(cpu_s: int, memory_mb: int, processes: int, file_mb: int) -> None:
    for which, value in (
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, file_mb << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_NPROC, processes),
    ):
        resource.setrlimit(which, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def drop_privileges(uid: int, last_capability: int) -> None:
    for capability in range(last_capability + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails if it is already dropped
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header, nothing = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", 0, 0, 0, 0, 0, 0)
    check(libc.capset(header, nothing), "capset")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


def filter_system_calls(
    machine: str, denied: Calls = DENIED, by_argument: Rules = BY_ARGUMENT, more: Iterable[tuple[int, ...]] = ()
) -> None:
    """Install a seccomp filter. Calls of `denied` and new namespaces fail with EPERM. `PRETENDED` and `by_argument`
    define their own answers. A call from another architecture's table kills the program. `more` are instructions that
    find the call's number in the accumulator and leave it there."""
    if machine not in MACHINES:
        raise SetupError(f"no system-call table for {machine}; x86_64 and aarch64 are supported")
    column, audit, clone, clone3 = MACHINES[machine]
    load, jump_eq, jump_ge, jump_set, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, fail = 0x7FFF0000, 0x80000000, 0x00050000
    code: list[tuple[int, ...]] = [(load, 0, 0, 4), (jump_eq, 1, 0, audit), (give, 0, 0, kill)]
    code += [(load, 0, 0, 0), (jump_ge, 0, 1, 0x40000000), (give, 0, 0, kill)]  # the x32 call table
    for numbers in denied.values():
        code += [(jump_eq, 0, 1, numbers[column]), (give, 0, 0, fail | EPERM)]
    for numbers in PRETENDED.values():
        code += [(jump_eq, 0, 1, numbers[column]), (give, 0, 0, fail)]
    for numbers, place, values, answer in by_argument:
        code += [(jump_eq, 0, 2 * len(values) + 2, numbers[column]), (load, 0, 0, 16 + 8 * place)]
        for value in values:
            code += [(jump_eq, 0, 1, value), (give, 0, 0, fail | answer)]
        code += [(load, 0, 0, 0)]
    code += more
    code += [(jump_eq, 0, 1, PREADV2[column]), (give, 0, 0, fail | ENOSYS)]
    code += [(jump_ge, 0, 1, NEWER_CALLS), (give, 0, 0, fail | ENOSYS)]
    code += [(jump_eq, 0, 1, clone3), (give, 0, 0, fail | ENOSYS)]  # its flags are not visible here; libc falls back
    code += [(jump_eq, 0, 4, PRLIMIT[column]), (load, 0, 0, 16)]  # a program may limit itself, never another process
    code += [(jump_eq, 0, 1, 0), (give, 0, 0, allow), (give, 0, 0, fail | EPERM)]
    code += [(jump_eq, 0, 3, clone), (load, 0, 0, 16), (jump_set, 0, 1, 0x7E020000), (give, 0, 0, fail | EPERM)]
    code += [(give, 0, 0, allow)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    descriptor = struct.pack("@HP", len(code), ctypes.addressof(program))
    check(libc.prctl(PR_SET_SECCOMP, 2, descriptor, 0, 0), "seccomp")


def reset_signals() -> None:
    """Give every signal its default action. An ignored signal stays ignored in the program: Python ignores two, and
    whoever started us may ignore others, as nohup does."""
    for number in range(1, 65):
        libc.signal(number, None)


def start_program(argv: list[str], environment: dict[str, str], prepare: Callable[[], None]) -> int:
    """Fork, call `prepare` in the child and execute `argv` there. Returns the child's process id after a successful
    start. Raises SetupError if it fails: our failure must not look like the program's. Other programs of the same user
    can stop the child before it executes anything."""
    failed, report = os.pipe()  # both ends close themselves in the program
    child = os.fork()
    if child:
        os.close(report)
        poll = select.poll()
        poll.register(failed, select.POLLIN)
        why = ""
        while not why and not poll.poll(200):
            if os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT):
                os.kill(child, SIGKILL)
                why = "another program stopped it"
        why = why or os.read(failed, 300).decode(errors="replace")
        os.close(failed)
        if why:
            raise SetupError(f"start of {argv[0]}: {why}")
        return child
    try:
        reset_signals()
        prepare()
        os.execvpe(argv[0], argv, environment)
    except BaseException as error:  # a fork must never return into the parent's code
        os.write(report, f"{error}".encode(errors="replace")[:300])
    finally:
        os._exit(127)


def guard_room(first: int, status: int, control: int) -> None:
    """Wait for the order to end the room, then kill it and wait until its last process is gone."""
    for descriptor in (0, 1, 2, status):
        os.close(descriptor)  # the streams end with the room, not with us
    os.read(control, 1)
    os.kill(first, SIGKILL)
    os.waitpid(first, 0)  # process 1 ends after all others of its namespace
    os._exit(0)
