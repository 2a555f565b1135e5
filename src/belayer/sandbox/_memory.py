"""Memory for the process images of one run: a tmpfs of its own, which takes its memory in large pieces.

In /dev/shm the kernel writes and reads page by page: 100 MB cost 50 ms of a processor to write (by `splice`, as CRIU
does, while the sandbox stands still) and 17 to read. With `huge=within_size` it is 16 and 12. No piece is larger than
what is written at once, so that small files stay small. It is mounted below the memory-backed folder of the run and
lives as long as that: killing the run's process leaves it, and whoever clears a dead run's memory removes it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from belayer.sandbox import _loop
from belayer.sandbox.store import remove_tree

_KIND = "tmpfs"


def make(folder: Path) -> None:
    """Have `folder` be such memory, if it is not yet. Where the host refuses the mount, it is a plain folder.

    Nobody else may be making or removing it at the same time.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if os.path.ismount(folder):
        return
    below = os.statvfs(folder)
    options = f"huge=within_size,mode=0700,size={below.f_blocks * below.f_frsize}"
    try:
        _loop.mount(_KIND, folder, _KIND, _loop.MS_NOSUID | _loop.MS_NODEV, options)
    except OSError:
        return  # no huge pages in this kernel: the memory-backed folder itself, only slower


def remove(folder: Path) -> None:
    """Delete what is in `folder` and give its memory back, also where other mount namespaces still see it."""
    if not folder.is_dir():
        return
    for entry in list(folder.iterdir()):
        remove_tree(entry)
    if os.path.ismount(folder):
        with suppress(OSError):  # somebody else was faster
            _loop.unmount(folder, lazily=True)


def free_bytes(folder: Path) -> int:
    """What may still be written to `folder`: all such folders together may hold what the one that they lie in may."""
    here = os.statvfs(folder)
    if not os.path.ismount(folder):
        return here.f_bavail * here.f_frsize
    parent = folder.parent.parent  # of all runs
    common = os.statvfs(parent)
    free = common.f_bavail * common.f_frsize
    for other in parent.glob(f"*/{folder.name}"):
        if os.path.ismount(other):
            found = os.statvfs(other)
            free -= (found.f_blocks - found.f_bfree) * found.f_frsize
    return max(0, min(free, here.f_bavail * here.f_frsize))
