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
from belayer.files import write_atomically

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
            path.mkdir(parents=True, exist_ok=True)
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


def _read_about(path: Path) -> dict[str, Any] | None:
    try:
        text = (path / "run.json").read_text()
    except FileNotFoundError:
        return None
    try:
        about = json.loads(text)
        found = about["format"]
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{path / 'run.json'} is damaged", kept="the journal beside it") from None
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
