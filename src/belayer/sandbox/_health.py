"""Was a sandbox damaged from outside? A look at its system folders from the host, below a millisecond.

Every folder below /usr, /etc and the like is watched, as far as the image has it. A folder that is missing, was
replaced or lost an entry counts as damage; growth never does, since that is what installing software looks like. So the
first deletion of an `rm -rf` is seen, before a command can observe half of a system and be believed. The price: a
command that itself deletes something there looks like damage once (its caller does it again from the state before,
sees the same, and calls `accept`).
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from belayer.sandbox._place import Place
    from belayer.sandbox.images import Image

_DEEP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "dev")
_FLAT = ("", "proc", "root", "run", "tmp", "var", "home", "opt", "srv")  # only that they are there
_CHURN = frozenset({"dev/shm", "dev/pts"})
_MOST = 300  # folders; the ones nearest to the top are kept

# path → (type, inode, size); the size of a btrfs folder is twice the length of all names in it
Fingerprint = dict[str, tuple[int, int, int]]


@lru_cache(maxsize=64)
def folders_to_watch(image: Path, digest: str) -> tuple[str, ...]:
    """Paths to watch in every sandbox of this image, parents before children. `digest` names the image's content."""
    if not image.is_dir():
        return (*_FLAT, *_DEEP)  # the image was removed; its sandboxes go on with a coarser watch
    found = [name for name in (*_FLAT, *_DEEP) if os.path.lexists(image / name)]
    level = [name for name in _DEEP if (image / name).is_dir() and not (image / name).is_symlink()]
    while level and len(found) < _MOST:
        below = []
        for folder in level:
            with os.scandir(image / folder) as entries:
                below += [f"{folder}/{entry.name}" for entry in entries if entry.is_dir(follow_symlinks=False)]
        level = sorted(path for path in below if path not in _CHURN)
        found += level
    return tuple(found[:_MOST])


def fingerprint(root: Path, paths: tuple[str, ...], upper: Path | None = None) -> Fingerprint:
    """Type, inode and size of each path that is there. Never looks through a link that the sandbox made.

    In an overlay (`upper`: its writable layer) the size of a folder says nothing. There, what was deleted from the
    image has left whiteouts in the layer: the more of them, the less is left.
    """
    found: Fingerprint = {}
    try:
        top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return found
    try:
        for path in paths:
            parent = path.rpartition("/")[0]
            if parent and (parent not in found or found[parent][0] != stat.S_IFDIR):
                continue
            try:
                status = os.stat(path or ".", dir_fd=top, follow_symlinks=False)
            except OSError:
                continue
            size = 0
            if path.partition("/")[0] in _DEEP:
                size = status.st_size if upper is None else -_whiteouts(upper / path)
            found[path] = (stat.S_IFMT(status.st_mode), status.st_ino, size)
    finally:
        os.close(top)
    return found


def _whiteouts(folder: Path) -> int:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0  # nothing was changed there
    try:
        with os.scandir(fd) as entries:
            special = [e for e in entries if not (e.is_file(follow_symlinks=False) or e.is_dir(follow_symlinks=False))]
            states = [entry.stat(follow_symlinks=False) for entry in special]
        return sum(stat.S_ISCHR(state.st_mode) and state.st_rdev == 0 for state in states)
    except OSError:
        return 0
    finally:
        os.close(fd)


def damage(before: Fingerprint, now: Fingerprint) -> str | None:
    """What is wrong now, in a few words, or None."""
    wrong = []
    for path, (kind, inode, size) in before.items():
        if path not in now:
            wrong.append(f"/{path} is gone")
        elif now[path][:2] != (kind, inode):
            wrong.append(f"/{path} was replaced")
        elif kind == stat.S_IFDIR and now[path][2] < size:
            wrong.append(f"/{path} lost entries")
    if not wrong:
        return None
    return (
        f"system folders were damaged: {', '.join(wrong[:3])}{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}"
    )


@asynccontextmanager
async def looked_at(place: Place, image: Image) -> AsyncIterator[asyncio.Task[Fingerprint]]:
    """Meanwhile look at the new root's folders: what the sandbox's watch compares with."""
    watched = folders_to_watch(image.path, image.digest)
    look = asyncio.create_task(asyncio.to_thread(fingerprint, place.root, watched, place.tree.upper))
    try:
        yield look
    finally:
        await asyncio.wait([look])  # before the root may be removed
