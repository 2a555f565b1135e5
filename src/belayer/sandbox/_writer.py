"""The background write: process images go from memory to the run's directory, and the manifest then says `host`.

One thread, one checkpoint at a time, of each sandbox the newest one that waits. It gives way: its CPU and I/O priority
are the lowest, it stands still while a checkpoint or a restore is under way (but not for ever), and few bytes of it
wait for the disk at any moment. A checkpoint whose manifest is gone is garbage, and its write ends at the next block.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import msgspec

from belayer.checkpoint.manifest import Manifest, write_manifest
from belayer.errors import BelayerError, StorageFull
from belayer.faults import failpoints
from belayer.files import sync_folder
from belayer.sandbox import _btrfs
from belayer.sandbox._data import RunData
from belayer.sandbox._image_files import copy_images, sync_images
from belayer.sandbox.store import RESERVE, storage_errors

PATIENCE_S = 0.1  # the longest pause per block: a run that always checkpoints somewhere still gets its images to disk
JOIN_S = 5.0
_NICE = 15
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IDLE = 3 << 13
_libc = ctypes.CDLL(None, use_errno=True)

# the checkpoint; its new manifest, None when it was garbage; or why it could not be written
Done = Callable[[Manifest, Manifest | None, Exception | None, float], None]
# the write happens in its block: one run of the host after the other. What the argument raises ends the wait for it
WriteTurn = Callable[[Callable[[], None]], AbstractContextManager[None]]


class _Garbage(Exception):
    """The checkpoint was deleted, or nobody waits for the write any more."""


class Writer:
    """Writes checkpoints of one run in the background. `done` is called in its thread after each."""

    def __init__(self, data: RunData, done: Done, turn: WriteTurn) -> None:
        self._data = data
        self._done = done
        self._turn = turn
        self._change = threading.Condition()
        self._waiting: dict[str, Manifest] = {}  # by sandbox, in the order of arrival
        self._writing: Manifest | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._foreground = 0
        self._quiet = threading.Event()
        self._quiet.set()

    def submit(self, manifest: Manifest) -> None:
        """Write it when its turn comes; an older one of the same sandbox that still waits is left out."""
        with self._change:
            if self._stopped:
                return
            self._waiting.pop(manifest.sandbox, None)
            self._waiting[manifest.sandbox] = manifest
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="belayer-write", daemon=True)
                self._thread.start()
            self._change.notify_all()

    @contextmanager
    def foreground(self) -> Iterator[None]:
        """What happens in this block is not to be disturbed."""
        with self._change:
            self._foreground += 1
            self._quiet.clear()
        try:
            yield
        finally:
            with self._change:
                self._foreground -= 1
                if not self._foreground:
                    self._quiet.set()

    def close(self, timeout_s: float) -> list[str]:
        """Write what waits, then stop; what is not done by then stays `process`. Returns those ids. Blocking."""
        deadline = time.monotonic() + timeout_s
        with self._change:
            self._quiet.set()
            while self._waiting or self._writing:
                if not self._change.wait(max(0.0, deadline - time.monotonic())):
                    break
            left = [manifest.id for manifest in self._waiting.values()]
            left += [self._writing.id] if self._writing else []
            self._waiting.clear()
            self._stopped = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(JOIN_S)  # a disk that hangs keeps its own thread, not ours
        return left

    def _run(self) -> None:
        _give_way()
        while True:
            with self._change:
                self._writing = None
                self._change.notify_all()
                self._change.wait_for(lambda: self._stopped or self._waiting)
                if self._stopped:
                    return
                manifest = self._writing = self._waiting.pop(next(iter(self._waiting)))
            begun = time.perf_counter()
            written: Manifest | None = None
            failure: Exception | None = None
            try:
                written = self._write(manifest)
            except _Garbage:
                pass
            except FileNotFoundError as error:
                failure = error if self._exists(manifest) else None
            except Exception as error:  # of whatever kind: this one checkpoint stays `process`, and its run is told
                failure = error
            self._done(manifest, written, failure, time.perf_counter() - begun)

    def _write(self, manifest: Manifest) -> Manifest:
        failpoints.hit("checkpoint.write.begin")
        data, target = self._data, self._data.disk / manifest.id
        self._pause(manifest)
        with self._turn(lambda: self._check_wanted(manifest)):
            if not target.is_dir():
                self._copy(manifest, target)
            else:  # moved here to free memory: complete, but perhaps not on the disk
                sync_images(target, manifest.images, lambda: self._pause(manifest))
            sync_snapshot(data.snapshots / manifest.id)
        data.mark_durable()
        with data.publishing:
            self._check_wanted(manifest)
            for folder in (data.disk, data.checkpoints, data.checkpoints.parent):
                sync_folder(folder)
            durable = msgspec.structs.replace(manifest, durability="host")
            write_manifest(data.manifest_path(manifest.id), durable, durable=True)
        failpoints.hit("checkpoint.write.published")
        return durable

    def _copy(self, manifest: Manifest, target: Path) -> None:
        fresh = target.with_name(f"{target.name}.{os.getpid()}.write.tmp")
        target.parent.mkdir(exist_ok=True)
        self._check_room(manifest)
        try:
            with storage_errors(f"checkpoint {manifest.id} cannot be written to {target.parent}"):
                copy_images(self._data.memory / manifest.id, fresh, manifest.images, lambda: self._pause(manifest))
            failpoints.hit("checkpoint.write.copied")
            with self._data.publishing:
                self._check_wanted(manifest)
                if not target.is_dir():
                    os.replace(fresh, target)
            failpoints.hit("checkpoint.write.renamed")
        except FileNotFoundError:
            if not target.is_dir():
                raise
            sync_images(target, manifest.images, lambda: self._pause(manifest))  # it was moved while it was copied
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _check_room(self, manifest: Manifest) -> None:
        """The disk below a store file must never run full: see `Store.check_room`."""
        file = self._data.store.file
        if file is None or file.stat().st_dev != self._data.disk.stat().st_dev:
            return
        room = os.statvfs(self._data.disk)
        if room.f_bavail * room.f_frsize < manifest.image_bytes + RESERVE:
            raise StorageFull(
                f"no room on the disk of {self._data.disk} for {manifest.image_bytes >> 20} MB of process images",
                kept=f"checkpoint {manifest.id}, in memory",
                next_step="free disk space",
            )

    def _pause(self, manifest: Manifest) -> None:
        self._quiet.wait(PATIENCE_S)
        self._check_wanted(manifest)

    def _check_wanted(self, manifest: Manifest) -> None:
        # a write that the disk held up beyond the run's end must not touch what may be another process's by now
        if self._stopped or self._data.closed or not self._exists(manifest):
            raise _Garbage

    def _exists(self, manifest: Manifest) -> bool:
        return self._data.manifest_path(manifest.id).exists()


def sync_snapshot(path: Path) -> None:
    """Return when the file-system snapshot at `path` survives a reboot. Blocking."""
    if _btrfs.is_btrfs(path) and path.stat().st_ino == _btrfs.SUBVOLUME_INODE:
        _btrfs.wait_committed(path)
    else:
        _btrfs.sync(path)


def describe_failure(manifest: Manifest, error: Exception) -> str:
    """One sentence for an event."""
    why = error.what if isinstance(error, BelayerError) else f"{type(error).__name__}: {error}"
    return f"checkpoint {manifest.id} was not written to disk and does not survive a reboot: {why}"


def _give_way() -> None:
    """Lowest priority for the calling thread, as far as the kernel lets us."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        _libc.syscall(number, 1, 0, _IDLE)  # 1: a thread; 0: this one
