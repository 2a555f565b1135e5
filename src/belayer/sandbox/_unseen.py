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
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438


def what_would_be_lost(pids: Iterable[int]) -> list[str]:
    """One sentence for each such state of these processes, which must not run meanwhile. Blocking."""
    pids = list(pids)
    found: list[str] = []
    deleted: set[int] = set()  # inodes of deleted files that are open
    watches: list[tuple[int, int]] = []  # (pid, inode)
    for pid in pids:
        for fd, target in _descriptors(pid):
            if target == "anon_inode:inotify":
                watches += [(pid, inode) for inode in _watched(pid, fd)]
                if _unread(pid, fd):
                    found.append(f"process {pid} has inotify events that it has not read")
            elif target == "anon_inode:[eventfd]":
                if "eventfd-semaphore: 1" in _info(pid, fd):
                    found.append(f"process {pid} has an eventfd in semaphore mode")
            elif target.endswith(" (deleted)"):
                with suppress(OSError):
                    deleted.add(os.stat(f"/proc/{pid}/fd/{fd}").st_ino)
    found += [f"process {pid} watches a deleted file by inotify" for pid, inode in watches if inode in deleted]
    if pids and _datagrams(pids[0]):
        found.append("a UDP socket has datagrams that nobody has read")
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


def _datagrams(pid: int) -> bool:
    """Has a UDP socket of this process's network namespace something in its queue?"""
    for table in ("udp", "udp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                if not line.split()[4].endswith(":00000000"):  # tx_queue:rx_queue
                    return True
    return False
