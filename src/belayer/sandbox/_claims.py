"""Folders that belong to a living process: made, locked and deleted without a moment in which anybody could err.

A claimed folder holds a file `lock`, flocked as long as its owner lives. It appears under its name only when it is
locked already, and leaves its name before it is deleted, so that others find it claimed, dead, or not at all, never
half-made.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from belayer.errors import RunInUse
from belayer.ownership import labels
from belayer.sandbox import _memory
from belayer.sandbox.store import remove_tree

_NEW, _DEAD = ".new-", ".dead-"
_STALE_S = 60.0  # a folder that is still being made or deleted after this was left by a killed process


def claim(folder: Path, about: dict[str, str] | None = None, *, wait_s: float = 3.0) -> int:
    """Make `folder`, or take over a dead owner's, and return the descriptor that holds its lock.

    `about` is written to `owner.json` inside. Raises `RunInUse` when a living process has it.
    """
    deadline = time.monotonic() + wait_s
    while True:
        fd = _take(folder) if folder.exists() else _make(folder, about or {})
        if fd is not None:
            _sign(folder, about or {})
            return fd
        if time.monotonic() > deadline:
            raise RunInUse(f"{folder} is used by another living process", next_step="wait until it has ended")
        time.sleep(0.02)


def release(folder: Path, fd: int) -> None:
    """Delete a claimed folder with everything in it, and drop the lock."""
    try:
        _delete(folder)
    finally:
        os.close(fd)


@contextmanager
def if_dead(folder: Path) -> Iterator[bool]:
    """True, and the lock held meanwhile, when nobody living has `folder`; a folder without a lock is dead."""
    fd = _take(folder)
    if fd is None:
        yield folder.is_dir() and not (folder / "lock").exists()
        return
    try:
        yield True
    finally:
        os.close(fd)


def delete_dead(folder: Path) -> None:
    """Delete a folder whose lock the caller holds, or that has none."""
    _delete(folder)


def claimed_folders(parent: Path, wanted: Callable[[str], bool] = lambda name: True) -> list[Path]:
    """The folders in `parent` by name; also removes what killed processes left half-made there."""
    found = []
    with suppress(FileNotFoundError):
        for entry in sorted(parent.iterdir()):
            if entry.name.startswith((_NEW, _DEAD)):
                with suppress(FileNotFoundError):
                    if time.time() - entry.stat().st_mtime > _STALE_S:
                        _remove(entry)
            elif wanted(entry.name) and entry.is_dir():
                found.append(entry)
    return found


def _sign(folder: Path, about: dict[str, str]) -> None:
    """Write `owner.json`, unless it says that already. At no moment, not even after a power failure, is it half there.

    A folder whose owner cannot be read counts as garbage.
    """
    path, content = folder / "owner.json", json.dumps(about)
    with suppress(OSError):
        if path.read_text() == content:
            return
    fresh = folder / ".owner.json"
    with open(fresh, "w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _make(folder: Path, about: dict[str, str]) -> int | None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f"{_NEW}{folder.name}-{secrets.token_hex(4)}")
    fresh.mkdir(mode=0o700)
    fd = os.open(fresh / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    (fresh / "owner.json").write_text(json.dumps(about))  # new: what a power failure leaves of it has no content yet
    try:
        os.rename(fresh, folder)
        return fd
    except OSError:  # somebody else was faster
        os.close(fd)
        shutil.rmtree(fresh, ignore_errors=True)
        return None


def _take(folder: Path) -> int | None:
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # it may have been deleted, and made anew, between the two calls above
        if os.path.samestat(os.fstat(fd), os.stat(folder / "lock")):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def _delete(folder: Path) -> None:
    gone = folder.with_name(f"{_DEAD}{folder.name}-{secrets.token_hex(4)}")
    try:
        os.rename(folder, gone)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        gone = folder  # a full store: what takes no space, deleting, still works, and the lock is held meanwhile
    _remove(gone)


def _remove(folder: Path) -> None:
    """With the memory that is mounted in it: a version that did not know of that may have given it up."""
    for inside in labels.mounts_below(folder):  # not `ismount`, which takes a subvolume for a mount
        _memory.remove(Path(inside))
    remove_tree(folder)
