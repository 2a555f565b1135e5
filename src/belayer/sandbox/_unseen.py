"""What CRIU would lose without a word, found on the frozen processes before it dumps them.

CRIU refuses most of what it cannot capture, but a few states it drops silently, and a restore without them would not be
the checkpointed state. They are looked up from the host: `pidfd_getfd` gives a second descriptor of the same open file,
which can be asked what nobody else tells. Observed with CRIU 4.2.1; docs/sandbox.md lists them.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import struct
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_LIBC = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438
_HALF_CLOSED = ("04", "05", "08", "09", "0B")  # FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK, CLOSING
_INO_LOOKUP = 0xD0009412  # BTRFS_IOC_INO_LOOKUP


class Loss(NamedTuple):
    """A state that CRIU would lose, in words. `passes`: it is over as soon as the programs inside go on."""

    what: str
    passes: bool = False


def what_would_be_lost(pids: Iterable[int], root: Path) -> list[Loss]:
    """Every such state of these processes, which must not run meanwhile. Blocking.

    `root` is where their root file system lies on the host.
    """
    pids = list(pids)
    found: list[Loss] = []
    deleted: set[int] = set()  # inodes of deleted files that are open
    watches: list[tuple[int, int]] = []  # (pid, inode)
    for pid in pids:
        for fd, target in _descriptors(pid):
            if target == "anon_inode:inotify":
                watches += [(pid, inode) for inode in _watched(pid, fd)]
                if _unread(pid, fd):
                    found.append(Loss(f"process {pid} has inotify events that it has not read", passes=True))
            elif target == "anon_inode:[eventfd]":
                if "eventfd-semaphore: 1" in _info(pid, fd):
                    found.append(Loss(f"process {pid} has an eventfd in semaphore mode"))
            elif target.startswith("/"):
                if "\nlock:" in (info := _info(pid, fd)) and _lock_on_mapped_file(pid, info):
                    found.append(Loss(f"process {pid} has a lock on a file that it has mapped"))
                if target.endswith(" (deleted)"):
                    with suppress(OSError):
                        deleted.add(os.stat(f"/proc/{pid}/fd/{fd}").st_ino)
    if watches:
        _warm(root, {inode for _, inode in watches} - deleted)
    found += [Loss(f"process {pid} watches a deleted file by inotify") for pid, inode in watches if inode in deleted]
    if pids:
        if _sockets(pids[0], "udp", lambda fields: not fields[4].endswith(":00000000")):  # tx_queue:rx_queue
            found.append(Loss("a UDP socket has datagrams that nobody has read", passes=True))
        # CRIU makes the half by a packet of its own. What answers it may find no peer yet, and resets the connection
        if _sockets(pids[0], "tcp", lambda fields: fields[3] in _HALF_CLOSED and fields[9] != "0"):
            found.append(Loss("a TCP connection is half closed", passes=True))
    return found


def _descriptors(pid: int) -> Iterator[tuple[int, str]]:
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                yield int(name), os.readlink(f"/proc/{pid}/fd/{name}")


def _info(pid: int, fd: int) -> str:
    try:
        return Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
    except OSError:
        return ""


def _watched(pid: int, fd: int) -> list[int]:
    """Inodes that an inotify descriptor watches."""
    fields = [line.split() for line in _info(pid, fd).splitlines() if line.startswith("inotify ")]
    return [int(field[4:], 16) for line in fields for field in line if field.startswith("ino:")]


def _warm(root: Path, inodes: set[int]) -> None:
    """Bring the names of watched files into the kernel's cache, where root is a btrfs subvolume.

    CRIU finds them by file handle. If a file's name has left the cache the kernel knows none for its handle, and CRIU
    keeps the handle, which means nothing in the restored file system.
    """
    with suppress(OSError):
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for inode in inodes:
                request = bytearray(struct.pack("QQ", 0, inode) + bytes(4080))
                with suppress(OSError):
                    fcntl.ioctl(top, _INO_LOOKUP, request)
                    path = bytes(request[16:]).split(b"\0")[0].rstrip(b"/")
                    os.stat(path, dir_fd=top, follow_symlinks=False)
        finally:
            os.close(top)


@contextmanager
def _twin(pid: int, fd: int) -> Iterator[int]:
    """A descriptor of ours of the same open file, or -1."""
    pidfd = twin = -1
    try:
        pidfd = os.pidfd_open(pid)
        twin = _LIBC.syscall(_PIDFD_GETFD, pidfd, fd, 0)
        yield twin
    except ProcessLookupError:
        yield -1
    finally:
        for mine in (twin, pidfd):
            if mine >= 0:
                os.close(mine)


def _unread(pid: int, fd: int) -> int:
    count = array.array("i", [0])
    with _twin(pid, fd) as twin:
        if twin >= 0:
            fcntl.ioctl(twin, termios.FIONREAD, count)
    return count[0]


def _lock_on_mapped_file(pid: int, info: str) -> bool:
    """Whether a descriptor (`info` is its fdinfo) holds a POSIX lock on a file that its process has mapped.

    As sqlite has in WAL mode. CRIU closes the descriptor through which it maps a file after it has set the locks, and
    with the first closed descriptor of a file the kernel drops all of a process's POSIX locks on it. The table of all
    locks, /proc/locks, is not asked: reading it stops every lock of the host for 10 ms.
    """
    # "lock: 1: POSIX ADVISORY WRITE 123 00:2f:4711 0 EOF"
    fields = [line.split() for line in info.splitlines() if line.startswith("lock:")]
    locked = {field[6].rpartition(":")[2] for field in fields if len(field) > 6 and field[2] == "POSIX"}
    if not locked:
        return False
    with suppress(OSError):
        mapped = {line.split(None, 5)[4] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
        return bool(mapped & locked)
    return False


def _in_use(pid: int, protocol: str) -> bool:
    """Whether this process's network namespace has any such socket: a counter, where the tables take milliseconds."""
    for name in ("sockstat", "sockstat6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines():
                fields = line.split()
                if fields[0] in (f"{protocol.upper()}:", f"{protocol.upper()}6:") and fields[2] != "0":
                    return True
    return False


def _sockets(pid: int, protocol: str, wrong: Callable[[list[str]], bool]) -> bool:
    """Is there such a socket in this process's network namespace?"""
    for table in (protocol, f"{protocol}6") if _in_use(pid, protocol) else ():
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                if wrong(line.split()):
                    return True
    return False
