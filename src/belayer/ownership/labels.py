"""One label per run, carried by everything that the run makes on the host.

The naming scheme is the whole contract, so that `reap` can find what a killed run left without any bookkeeping:

    process      environment variable BELAYER_RUN=<label>
    mount        below /run/belayer/<label>/
    cgroup       belayer/<label>/… in every hierarchy that is used
    netns        /run/netns/<label>-…
    memory file  /dev/shm/belayer/<label>/…     (memfds have no name: they go with their processes)
    store        <store>/runs/<label>/…         (btrfs subvolumes or directories)

A run is alive exactly as long as a process holds an exclusive flock on /run/belayer/<label>/lock. The kernel drops the
lock when that process dies, however it dies, so a stale run is never mistaken for a live one, nor the other way round.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import sys
import time
from pathlib import Path

ENV_VAR = "BELAYER_RUN"
RUNTIME_DIR = Path(os.environ.get("BELAYER_RUNTIME_DIR", "/run/belayer"))
SHM_DIR = Path(os.environ.get("BELAYER_SHM_DIR", "/dev/shm/belayer"))
PREFIX = "bly-"
_RECORD = "belayer-cache"  # in the environment's folder: the cache folder of its set-up, see scripts/cache.sh


def cache_dir() -> Path:
    """Where heavy, re-creatable things live across runs: CRIU, sandbox images, the btrfs store file.

    `$BELAYER_CACHE`, else the one that this Python environment was set up with, else `$XDG_CACHE_HOME/belayer`, else
    `~/.cache/belayer`.
    """
    return cache_choice()[0]


def cache_choice() -> tuple[Path, str]:
    """`cache_dir`, and who says so, for people."""
    if explicit := os.environ.get("BELAYER_CACHE"):
        return Path(explicit), "BELAYER_CACHE"
    record = Path(sys.prefix, _RECORD)
    with contextlib.suppress(OSError):
        if recorded := record.read_text().strip():
            return Path(recorded), f"set-up, in {record}"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "belayer", "the default"


def store_dir() -> Path:
    """Folder of the sandbox store where nothing else is configured: `$BELAYER_STORE`, else `store` in the cache."""
    chosen = os.environ.get("BELAYER_STORE")
    return Path(chosen) if chosen else cache_dir() / "store"


def own_dir() -> Path | None:
    """The folder below /run/belayer of the run that this process belongs to; None if it belongs to none."""
    name = os.environ.get(ENV_VAR, "")
    folder = RUNTIME_DIR / name
    return folder if name.startswith(PREFIX) and folder.is_dir() else None


class RunLabel:
    """A live label: owns `dir` and `shm`, and the lock that proves that this run is alive.

    Create it with `RunLabel.new()`; `close()` removes both folders and drops the lock. Use it as a context manager
    where the lifetime is a block.
    """

    def __init__(self, name: str, lock_fd: int) -> None:
        self.name = name
        self.dir = RUNTIME_DIR / name
        self.shm = SHM_DIR / name
        self._lock_fd = lock_fd

    @classmethod
    def new(cls, purpose: str = "") -> RunLabel:
        """Take a fresh label. `purpose` (a run directory, a test name) is shown by `belayer doctor`."""
        name = PREFIX + secrets.token_hex(4)
        # made under another name and renamed once locked: a reaper must never see a label that is not held
        folder = RUNTIME_DIR / f".new-{name}"
        folder.mkdir(parents=True, mode=0o700)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        info = {"pid": os.getpid(), "purpose": purpose, "started": time.time()}
        (folder / "info.json").write_text(json.dumps(info))
        folder.rename(RUNTIME_DIR / name)
        (SHM_DIR / name).mkdir(parents=True, mode=0o700)
        return cls(name, fd)

    @property
    def env(self) -> dict[str, str]:
        """What to add to the environment of every process that belongs to this run."""
        return {ENV_VAR: self.name}

    def close(self) -> None:
        """Remove the label's folders and drop the lock. What hangs off the label must be gone already."""
        if self._lock_fd < 0:
            return
        shutil.rmtree(self.shm, ignore_errors=True)
        _remove_tree_without_crossing_mounts(self.dir)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def __enter__(self) -> RunLabel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def mounts_below(folder: Path) -> list[str]:
    """Mount points at or below `folder`, innermost first (the order in which they can be unmounted)."""
    found = []
    with open("/proc/self/mountinfo") as table:
        for line in table:
            point = line.split(" ")[4].encode().decode("unicode_escape")
            if point == str(folder) or point.startswith(f"{folder}/"):
                found.append(point)
    return sorted(found, key=len, reverse=True)


def _remove_tree_without_crossing_mounts(folder: Path) -> None:
    """Delete `folder`, but never descend into a mount: a forgotten mount must not lose what is mounted there."""
    # st_dev would miss a bind mount from the same file system, so ask the mount table
    if not folder.is_dir():
        return
    _remove_tree(folder, frozenset(mounts_below(folder)))


def _remove_tree(folder: Path, mounts: frozenset[str]) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            if entry.path not in mounts:
                _remove_tree(Path(entry.path), mounts)
        else:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
    # a folder that still holds a mount refuses to go, and is reported by the reaper
    with contextlib.suppress(OSError):
        folder.rmdir()
