"""Has the kernel read, ahead of a restore, the files that the restored processes will have mapped.

Pages are cached for each subvolume by itself, so a program is cold in every new root, however often it ran in the one
before: half of an idle sandbox's restore was waiting for the pages of bash and its libraries.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from belayer.errors import ImageError
from belayer.sandbox._layers import open_in

MOST_BYTES = 32 << 20  # of all files together
AGENT = "/run/agent/"  # where a container sees its agent folder

# path in the container → (first byte, bytes) of each part
Parts = dict[str, set[tuple[int, int]]]


def mapped(pids: Iterable[int]) -> Parts:
    """What these processes have mapped of files, as a container sees them. A process that has ended has nothing."""
    found: Parts = {}
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines():
                where, _, offset, _, inode, *path = line.split(None, 5)
                if inode != "0" and path and path[0].startswith("/"):
                    start, _, end = where.partition("-")
                    found.setdefault(path[0], set()).add((int(offset, 16), int(end, 16) - int(start, 16)))
    return found


def read_ahead(root: Path, agent: Path, files: Parts) -> None:
    """Begin to read these parts of the files below `root` and `agent`; returns before they are there.

    The paths are the sandbox's own words: nothing is followed out of the two folders, and only plain files are opened.
    """
    left = MOST_BYTES
    folders = [os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for folder in (root, agent)]
    try:
        for path, parts in files.items():
            left -= sum(size for _, size in parts)
            if left < 0:
                continue
            inside = path.startswith(AGENT)
            with suppress(OSError, ImageError):  # gone, renamed, or shared memory
                _advise(folders[inside], path.removeprefix(AGENT) if inside else path.lstrip("/"), parts)
    finally:
        for fd in folders:
            os.close(fd)


def _advise(folder: int, path: str, parts: set[tuple[int, int]]) -> None:
    found = open_in(folder, path, os.O_PATH | os.O_CLOEXEC, links=False)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return
        fd = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start, size in sorted(parts):
                os.posix_fadvise(fd, start, size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)
    finally:
        os.close(found)
