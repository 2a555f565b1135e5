"""Pins: a checkpoint that one process reads (an export) is not deleted by another one (the run that owns it).

    <run>/checkpoints/pins/<id>    flocked shared by readers, exclusively by who deletes the checkpoint

The locks die with their processes, so a killed export pins nothing. The owner of a run deletes the file with the
checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = "pins"


@contextmanager
def pinned(checkpoints: Path, checkpoint_id: str) -> Iterator[bool]:
    """True, and the checkpoint stays as long as the block lasts; False when it is being deleted right now."""
    fd = _lock(checkpoints, checkpoint_id, fcntl.LOCK_SH)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


@contextmanager
def unpinned(checkpoints: Path, checkpoint_id: str) -> Iterator[bool]:
    """True, and nobody begins to read the checkpoint as long as the block lasts; False when somebody reads it."""
    try:
        fd = _lock(checkpoints, checkpoint_id, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        yield True  # there is no pin and no room to make one, for readers neither; deleting must go on
        return
    try:
        yield fd is not None
    finally:
        if fd is not None:
            (checkpoints / _FOLDER / checkpoint_id).unlink(missing_ok=True)
            os.close(fd)


def forget_unknown(checkpoints: Path, known: set[str]) -> None:
    """Delete the pins of checkpoints that are not among `known`."""
    folder = checkpoints / _FOLDER
    for entry in list(folder.iterdir()) if folder.is_dir() else []:
        if entry.name not in known:
            entry.unlink(missing_ok=True)


def _lock(checkpoints: Path, checkpoint_id: str, kind: int) -> int | None:
    path = checkpoints / _FOLDER / checkpoint_id
    while True:
        path.parent.mkdir(exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)  # deleted between open and flock
