"""Keeps the file trees of an environment, and builds rooms over them, one at a time (`glm5.sandbox.environment`).

`python -E -s -S -B` runs this file once per caller, and forks a keeper per environment. In a mount namespace of its
own, the keeper mounts a tmpfs per layer: what the programs of one room write to all trees. A room is a PID, network,
IPC, UTS and mount namespace whose root is an overlay: read-only trees of the machine below, the layers of earlier rooms
over them, a new one on top. Its process 1 starts programs.

Messages from the caller, on SEQPACKET sockets:

- to the keeper: JSON `{"open": LAYER, "below": [LAYER, ...], "fresh": [PATH, ...]}`, answered by `opened PID UID`
  with the room's own channel, its root folder and its listening socket; `close`, answered by `closed` after the last
  process has ended. `error WHY` answers if they fail. At the end of the file the keeper ends, and the room with it.
- to process 1: `start` with the description of a program (JSON), its three streams and a status pipe, on which it
  writes `started SESSION`, then `exit CODE PEAK_KB` or `signal NUMBER PEAK_KB`, or `error WHY`; `kill SESSION` kills
  the session's processes; `clear PID` kills every process but PID (0: none) and process 1, and answers `cleared`, or
  `left` if some stay; `terminal` answers with the two ends of a terminal.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from glm5.sandbox import launcher
    from glm5.sandbox.room_mounts import folder_at, mount_at, show
    from glm5.sandbox.room_process_one import ProcessOne

    Request = dict[str, Any]
else:
    import launcher
    from room_mounts import folder_at, mount_at, show
    from room_process_one import ProcessOne

NEW_MOUNTS = 0x00020000
USER = 1000  # of the room, if an ordinary user starts it
PLACES = ("/mnt", "/media", "/srv", "/sys")  # one is covered by the tmpfs, in the keeper's own namespace only
MS_NOEXEC = 8
CLOSED = launcher.MS_REMOUNT | launcher.MS_BIND | launcher.MS_RDONLY | launcher.MS_NOSUID | launcher.MS_NODEV
VERSION = f"{sys.version_info[0]}{sys.version_info[1]}"
LOCAL = "/usr/local"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
REMOVED = (
    "/etc/ld.so.preload", "/usr/pyvenv.cfg", "/usr/local/pyvenv.cfg", "/usr/local/bin/pyvenv.cfg",
    "/usr/local/bin/pybuilddir.txt", "/usr/local/bin/Modules", f"/usr/local/lib/python{VERSION}.zip",
)  # fmt: skip
"""Files that verifier rooms lack. They decide which libraries programs load and where Python looks for its modules, in
images of Python in /usr/local."""
INODES_PER_MB = 128
LEAST_BYTES, LEAST_INODES = 1 << 20, 2048  # of a layer, even if an agent left no space


class Keeper:
    """The layers. `request`: see `glm5.sandbox.environment`."""

    def __init__(self, request: Request, as_root: bool) -> None:
        self.request, self.as_root = request, as_root
        self.child, self.control = 0, -1
        place = next(
            (p for p in PLACES if os.path.isdir(p) and not any(_covers(p, low) for low in self._lowers())), None
        )
        if place is None:
            raise launcher.SetupError(f"none of {', '.join(PLACES)} is free to hold the room")
        self.store = place
        _mount_memory(place, 1 << 20, 4096)
        for name in ("skeleton", "empty", "root", "layers"):
            os.mkdir(f"{place}/{name}")
        for path, target in request["links"]:
            os.makedirs(os.path.dirname(f"{place}/skeleton{path}"), exist_ok=True)
            os.symlink(target, f"{place}/skeleton{path}")
        for path in request["folders"]:
            os.makedirs(f"{place}/skeleton{path}", exist_ok=True)

    def _lowers(self) -> list[str]:
        request = self.request
        return [*request["shown"], *(low for _, lows, _ in request["trees"] for low in lows)]

    def open(self, order: Request, channel: socket.socket) -> None:
        """Start a room; its process 1 answers the caller."""
        self.close()
        self.forget({*order["below"], *order["keep"]})
        self.add_layer(order)
        ended, self.control = os.pipe()
        self.child = os.fork()
        if self.child:
            os.close(ended)
            return
        try:
            os.close(self.control)
            launcher.libc.prctl(launcher.PR_SET_PDEATHSIG, launcher.SIGKILL, 0, 0, 0)
            outer = os.getpid()
            uid = launcher.sandbox_uid(True) if self.as_root else _user(self.request)
            launcher.check(launcher.libc.unshare(launcher.NAMESPACES), "unshare")
            launcher.check(launcher.libc.sethostname(b"room", 4), "sethostname")
            first = os.fork()
            if first:
                launcher.guard_room(first, channel.detach(), ended)
            os.close(ended)
            launcher.libc.prctl(launcher.PR_SET_PDEATHSIG, launcher.SIGKILL, 0, 0, 0)
            one = ProcessOne(lambda: self.build(order, uid), order["limits"], uid, self.request)
            one.answer(channel, outer).serve()
        except Exception as error:
            with contextlib.suppress(OSError):
                channel.send(f"error {error or type(error).__name__}".encode()[:1000])
        finally:
            os._exit(0)

    def close(self) -> None:
        """End the room; return after its last process."""
        if self.child:
            os.close(self.control)
            os.waitpid(self.child, 0)
            self.child = 0

    def forget(self, layers: set[int]) -> None:
        """Remove all layers but these."""
        for name in os.listdir(f"{self.store}/layers"):
            if int(name) not in layers:
                folder = f"{self.store}/layers/{name}"
                launcher.check(launcher.libc.umount2(folder.encode(), launcher.MNT_DETACH), f"umount {folder}")
                os.rmdir(folder)

    def add_layer(self, order: Request) -> None:
        """A tmpfs for a layer: what the layers have left of the disk, but for a verifier a disk of its own."""
        size, inodes = order["limits"]["disk_mb"] << 20, order["limits"]["disk_mb"] * INODES_PER_MB + 4096
        for name in [] if order["judge"] else os.listdir(f"{self.store}/layers"):
            space = os.statvfs(f"{self.store}/layers/{name}")
            size -= (space.f_blocks - space.f_bfree) * space.f_frsize
            inodes -= space.f_files - space.f_ffree
        folder = f"{self.store}/layers/{order['open']}"
        os.mkdir(folder)
        _mount_memory(folder, max(size, LEAST_BYTES), max(inodes, LEAST_INODES))

    def build(self, order: Request, uid: int) -> int:
        """Mount the room's root; returns a descriptor of it."""
        launcher.mount(None, "/", None, launcher.MS_REC | launcher.MS_PRIVATE)
        skeleton = f"{self.store}/skeleton"
        for path, text in self.request["texts"]:
            os.makedirs(os.path.dirname(skeleton + path), exist_ok=True)
            with open(skeleton + path, "w", encoding="utf-8") as stream:
                stream.write(text.replace("@UID@", str(uid)))
        self._overlay(f"{self.store}/root", order, 0, [skeleton], uid)
        for path in self.request["folders"]:
            self._own(skeleton + path, uid, path)
        root = os.open(f"{self.store}/root", os.O_PATH | os.O_DIRECTORY)
        sealed = self.request["sealed"] is not None
        fresh = [] if sealed else ["/dev/shm", *order["fresh"]]
        mounts = [(path, 0, index) for index, path in enumerate(self.request["shown"])]
        mounts += [(path, 1, index) for index, path in enumerate(self.request["hidden"])]
        mounts += [(path, 2, index) for index, (path, _, _) in enumerate(self.request["trees"])]
        mounts += [(path, 3, index) for index, path in enumerate(fresh)]
        mounts += [(path, 4, 0) for path in self.request["sealed"] or ()]
        for path, kind, index in sorted(mounts):  # a folder before what lies in it
            if kind == 0:
                show(root, path)
            elif kind == 1:
                mount_at(root, path, "tmpfs", "tmpfs", launcher.MS_NOSUID | launcher.MS_NODEV, "size=4k,mode=755")
            elif kind == 2:
                _, lowers, inner = self.request["trees"][index]
                target = folder_at(root, path)
                lowers = lowers or [f"{self.store}/empty"]
                self._overlay(f"/proc/self/fd/{target}", order, index + 1, lowers, uid, inner)
                os.close(target)
            else:
                if kind == 3:
                    folder = f"{self.store}/layers/{order['open']}/fresh/{index}"
                    os.makedirs(folder)
                    self._own(folder, uid, path)
                    mount_at(root, path, folder, None, launcher.MS_BIND)
                else:
                    size, inodes = order["limits"]["disk_mb"], self.request["inodes"]
                    options = f"size={size}m,nr_inodes={inodes},mode=700,uid={uid},gid={uid}"
                    mount_at(root, path, "tmpfs", "tmpfs", launcher.MS_NOSUID | launcher.MS_NODEV, options)
                for link, to in self.request["links"]:
                    if link.startswith(f"{path}/"):
                        above = folder_at(root, os.path.dirname(link))
                        os.symlink(to, os.path.basename(link), dir_fd=above)
                        os.close(above)
        for path in self.request["hidden"]:  # only now: what is shown in them needs a place
            mount_at(root, path, None, None, CLOSED)
        if not sealed:
            flags = launcher.MS_NOSUID | MS_NOEXEC
            mount_at(root, "/dev/pts", "devpts", "devpts", flags, "newinstance,ptmxmode=0666,mode=0620")
            for name in DEVICES:
                if os.path.exists(f"/dev/{name}"):
                    show(root, f"/dev/{name}")
        if not self.request["plain"]:
            # Without `subset=pid` it would show the machine's hardware, load and settings. Writable, it would let a
            # program change the memory of the one that started it. Some containers allow none of it.
            proc = folder_at(root, "/proc")
            flags = launcher.MS_NOSUID | launcher.MS_NODEV | MS_NOEXEC | (launcher.MS_RDONLY if sealed else 0)
            place = f"/proc/self/fd/{proc}".encode()
            launcher.libc.mount(b"proc", place, b"proc", ctypes.c_ulong(flags), b"subset=pid")
            os.close(proc)
        return root

    def _lay_over(self, upper: str, uid: int, judge: bool) -> None:
        """Lay over the files of earlier rooms the places of the machine's files, and in a verifier room what an agent
        may have changed to run inside of every program: links of the machine, and what is `REMOVED`."""
        for path in self.request["shown"]:
            if not os.path.isdir(path):
                os.makedirs(os.path.dirname(upper + path), exist_ok=True)
                open(upper + path, "x").close()
        for path, target in self.request["links"] if judge else []:
            os.makedirs(os.path.dirname(upper + path), exist_ok=True)
            os.symlink(target, upper + path)
        for path in self.request["folders"]:
            if os.path.isdir(upper + path):
                self._own(upper + path, uid, path)

    def _own(self, folder: str, uid: int, path: str) -> None:
        os.chmod(folder, 0o1777 if path.endswith(("/tmp", "/shm")) else 0o755)
        if self.as_root:
            os.chown(folder, uid, uid)

    def _overlay(
        self, target: str, order: Request, tree: int, lowers: list[str], uid: int, inner: Sequence[str] = ()
    ) -> None:
        """Mount tree number `tree`: a new upper folder over those of the layers below, over `lowers`."""
        upper, work = (f"{self.store}/layers/{order['open']}/{tree}/{name}" for name in ("upper", "work"))
        os.makedirs(upper)
        os.mkdir(work)
        top = self.request["trees"][tree - 1][0] if tree else ""
        self._own(upper, uid, top)
        for path in REMOVED if order["judge"] else ():
            if path.startswith(f"{top}/"):
                place = upper + path[len(top) :]
                os.makedirs(os.path.dirname(place), exist_ok=True)
                os.mknod(place, stat.S_IFCHR, 0)  # of an overlay: no such file
        if not tree:
            self._lay_over(upper, uid, order["judge"])
        for name in inner:
            os.makedirs(f"{upper}/{name}", exist_ok=True)
            self._own(f"{upper}/{name}", uid, name)
        below = [f"{self.store}/layers/{layer}/{tree}/upper" for layer in order["below"]]
        under = [*below, *lowers]
        if order["judge"] and top == LOCAL:  # programs that the machine has there are its own again
            under = [*lowers, *below]
        held = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (upper, work, *under)]
        paths = [f"/proc/self/fd/{descriptor}" for descriptor in held]  # a path may hold the separators
        options = f"upperdir={paths[0]},workdir={paths[1]},lowerdir={':'.join(paths[2:])}"
        options += "" if self.as_root else ",userxattr"
        flags = launcher.MS_NOSUID | launcher.MS_NODEV
        launcher.mount("overlay", target, "overlay", flags, options)
        for descriptor in held:
            os.close(descriptor)


def _mount_memory(folder: str, size: int, inodes: int) -> None:
    options = f"size={size},nr_inodes={inodes},mode=755"
    launcher.mount("tmpfs", folder, "tmpfs", launcher.MS_NOSUID | launcher.MS_NODEV, options)


def _user(request: Request) -> int:
    return USER if request["sealed"] is None else launcher.NOBODY


def _covers(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def keep(as_root: bool, request_fd: int, channel: socket.socket) -> None:
    """Be the keeper of one environment."""
    os.umask(0o022)
    try:
        with os.fdopen(request_fd, "rb") as stream:
            request = json.load(stream)
        with open("/proc/self/oom_score_adj", "w") as stream:
            stream.write("1000")  # if the machine runs out of memory, the room's processes end first
        uid, gid = os.getuid(), os.getgid()
        launcher.check(launcher.libc.unshare(NEW_MOUNTS | (0 if as_root else launcher.CLONE_NEWUSER)), "unshare")
        if not as_root:
            user = _user(request)
            for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {uid} 1"), ("gid_map", f"{user} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as stream:
                    stream.write(text)
        launcher.mount(None, "/", None, launcher.MS_REC | launcher.MS_PRIVATE)
        keeper = Keeper(request, as_root)
        channel.send(f"ready {os.getpid()}".encode())
        while message := channel.recv(65536):
            if message == b"close":
                keeper.close()
                channel.send(b"closed")
            else:
                keeper.open(json.loads(message), channel)
        keeper.close()
    except (launcher.SetupError, OSError, ValueError) as error:
        with contextlib.suppress(OSError):  # the caller is gone
            channel.send(f"error {error}".encode()[:1000])


def main() -> None:
    """`environment_launcher.py CHANNEL_FD`: fork a keeper for each message `root` or `user`, which comes with the
    request, the keeper's channel, and a pipe that stays open until its last process has ended. So a room costs no start
    of an interpreter."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    orders.set_inheritable(False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        mode, descriptors, _, _ = socket.recv_fds(orders, 16, 3, socket.MSG_CMSG_CLOEXEC)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)  # some versions of Python ignore the flag
        if not mode:
            return
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                orders.close()
                os.setsid()
                keep(mode == b"root", descriptors[0], socket.socket(fileno=descriptors[1]))
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    main()
