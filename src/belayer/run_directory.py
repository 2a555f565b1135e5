"""A run's folder on disk: who may open it, and what it says about itself.

run.json       format, seed, configuration, when and by which version it was made
lock           held (flock) by the one process that writes
journal/       the truth: see belayer.journal
checkpoints/   manifests
logs/          output of engine processes
metrics.jsonl, summary.json, report.html, trace.json    for people; never read back for a decision
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from belayer.errors import RunError, RunInUse, RunVersionMismatch, StorageFull
from belayer.files import make_folder_durably, write_atomically
from belayer.journal import Tail, read_tail

FORMAT = 1


class RunDirectory:
    """An opened run directory; holds its lock until `close`."""

    def __init__(self, path: Path, lock_fd: int, about: dict[str, Any], *, resumed: bool) -> None:
        self.path = path
        self.about = about
        self.resumed = resumed
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, path: Path, *, about: dict[str, Any] | None = None) -> RunDirectory:
        """Open an existing run, or make a new one described by `about` (JSON-able).

        Raises `RunInUse`, `RunVersionMismatch`, `StorageFull`, or `RunError` when there is no run and none may be made.
        """
        path = path.absolute()
        if about is None and not (path / "run.json").is_file():
            raise RunError(f"{path} is not a run directory: it has no run.json", next_step="check the path")
        try:
            make_folder_durably(path)
            fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _explain(path, error) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise RunInUse(
                f"{path} is in use by process {holder or '(unknown)'}",
                kept="everything; nothing was touched",
                next_step="wait for it or stop it, or choose another run directory",
            ) from None
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            written = _read_about(path)
            resumed = written is not None
            if written is None:
                assert about is not None
                written = {"format": FORMAT, "created": time.time(), **about}
                write_atomically(path / "run.json", json.dumps(written, indent=1, default=str).encode())
        except OSError as error:
            os.close(fd)
            raise _explain(path, error) from None
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, written, resumed=resumed)

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def driver_of(path: Path) -> tuple[int | None, bool]:
    """(process id of the newest driver of the run in `path`, whether it lives and still holds the lock).

    For readers: nothing is locked, so that a driver that starts meanwhile is not kept out.
    """
    lock = path / "lock"
    try:
        pid = int(lock.read_text().strip() or "0")
        mine = lock.stat()
    except (OSError, ValueError):
        return None, False
    if pid <= 0:
        return None, False
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return pid, True  # somebody else's process: all that can be said is that it is there
    except OSError:
        return pid, False
    for name in names:
        try:
            found = os.stat(f"/proc/{pid}/fd/{name}")
        except OSError:  # closed in between, or a socket of another namespace
            continue
        if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
            return pid, True
    return pid, False


def read_about(path: Path) -> dict[str, Any]:
    """What the run in `path` says of itself. Raises `RunError` if that is not there or damaged."""
    about = _read_about(path)
    if about is None:
        raise RunError(f"{path} is not a run directory: it has no run.json", next_step="check the path")
    return about


def check_format(path: Path) -> None:
    """Raises `RunVersionMismatch` for a run of another format. One whose run.json is damaged passes: what only looks at
    a run needs its journal, and says for itself what it misses.
    """
    try:
        _read_about(path)
    except RunVersionMismatch:
        raise
    except RunError:
        pass


def configured(about: dict[str, Any], section: str) -> dict[str, Any]:
    """A section of the configuration that a run was made with; empty where it does not say."""
    config = about.get("config")
    found = config.get(section) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def damaged(path: Path) -> RunError:
    """The error for a run in `path` whose run.json cannot be understood."""
    return RunError(
        f"{path / 'run.json'} is damaged",
        kept="the journal beside it",
        next_step='restore it from a copy, or write it anew: {"format": 1, "seed": SEED} with the seed of the run is '
        "enough to go on",
    )


def unread_tail(path: Path) -> Tail | None:
    """What the journal of the run in `path` ends with that is no record.

    None while a driver lives: it may be in the middle of a write. Raises `JournalError`.
    """
    return None if driver_of(path)[1] else read_tail(path / "journal")


def _read_about(path: Path) -> dict[str, Any] | None:
    try:
        text = (path / "run.json").read_bytes()
    except FileNotFoundError:
        return None
    try:
        about = json.loads(text)
        found = about["format"]
    except (ValueError, KeyError, TypeError):
        raise damaged(path) from None
    if found != FORMAT:
        raise RunVersionMismatch(
            f"{path} was written in run format {found}, this Belayer reads format {FORMAT}",
            kept="the run, untouched",
            next_step="use the version of Belayer that wrote it, or start a new run directory",
        )
    return about


def _explain(path: Path, error: OSError) -> RunError | StorageFull:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"no room for the run directory {path}", next_step="make room or choose another disk")
    return RunError(f"{path} cannot be opened: {error.strerror}")
