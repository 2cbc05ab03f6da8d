"""Starts a program that may write only below named folders, cannot read one folder, and cannot signal or trace any
process outside.

`python confine.py HIDDEN FOLDER... -- PROGRAM ARGUMENT...`; standard library only. Uses Landlock (Linux 6.12 or later
for the signals). As root without Landlock it gives up its user id instead. With neither it starts the program
unconfined.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

CREATE, ADD, RESTRICT = 444, 445, 446  # the same numbers on all architectures
READ = 1 << 2 | 1 << 3  # files, folders
WRITE = sum(1 << bit for bit in (1, *range(4, 15)))  # write, remove, make, refer, truncate
OF_FILES = 1 << 1 | 1 << 2 | 1 << 14
SCOPE_SIGNALS_AND_SOCKETS = 3
SHARED = ("/dev/null", "/dev/tty", "/dev/shm")
NO_NEW_PRIVILEGES = 38
NOBODY = 65534


def beside(hidden: str) -> list[str]:
    """All files and folders that together are everything but `hidden`."""
    found, folder = [], os.path.realpath(hidden)
    while folder != "/":
        parent, name = os.path.split(folder)
        found += [os.path.join(parent, other) for other in os.listdir(parent) if other != name]
        folder = parent
    return found


def landlock(hidden: str, folders: list[str]) -> bool:
    """Restrict this process and its children; `hidden` "" hides nothing. False if this kernel cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(CREATE, None, ctypes.c_size_t(0), 1) < 6:
        return False
    attributes = struct.pack("=QQQ", READ | WRITE, 0, SCOPE_SIGNALS_AND_SOCKETS)
    ruleset = libc.syscall(CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return False
    for folder, access in [
        *((f, READ) for f in (beside(hidden) if hidden else ["/"])),
        *((f, READ | WRITE) for f in folders),
    ]:
        try:
            below = os.open(folder, os.O_PATH)
        except OSError:
            continue
        allowed = access if os.path.isdir(folder) else access & OF_FILES
        if libc.syscall(ADD, ruleset, 1, struct.pack("=Qi", allowed, below), 0) != 0:
            return False
        os.close(below)
    return libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0 and libc.syscall(RESTRICT, ruleset, 0) == 0


def main() -> None:
    border = sys.argv.index("--")
    hidden, *folders = sys.argv[1:border]
    program = sys.argv[border + 1 :]
    if not landlock(hidden, [*folders, *SHARED]) and os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
