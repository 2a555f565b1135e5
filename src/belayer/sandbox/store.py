"""The sandbox store: a tree with images, the roots of running sandboxes and checkpoints' file-system snapshots.

    images/<name>                 a root file system that does not change any more, with <name>.json beside it
    runs/<label>/<sandbox>-<g>    writable root of generation g; gone with the run
    runs-data/<run id>/<id>       read-only snapshot of a checkpoint; outlives the process, goes with the run

What these three are depends on the kind of store (`_trees`): subvolumes of btrfs, or folders for overlayfs. A store of
the second kind is a plain folder `overlay` in the configured one. One of the first kind is in the configured folder if
that is on btrfs, else in a sparse file there, mounted below /run/belayer while at least one process uses it. Users hold
a shared lock (`users.lock`); mounting and unmounting happen under `mount.lock`; the last user unmounts and removes the
folder of both locks. Who waited for a lock in a folder that is gone meanwhile looks again. The locks die with their
processes, so a mount without users is recognised and removed by `unmount_unused`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from belayer.errors import SandboxUnavailable, StorageFull
from belayer.ownership import labels, store_dir
from belayer.sandbox import _btrfs, _loop
from belayer.sandbox._overlay import FOLDER as OVERLAY
from belayer.sandbox._overlay import OverlayTrees, check_overlay
from belayer.sandbox._trees import BtrfsTrees, StoreKind, Trees, remove_tree

__all__ = ["Store", "existing_kinds", "remove_tree", "storage_errors", "unmount_unused"]

FILE = "store.btrfs"
MOUNT_PREFIX = "store-"
DURABLE = "durable"  # a file in a run's folder of snapshots, once one of them was promised to survive a reboot
RESERVE_FILES = 6000
SHARE = 4  # one sandbox may write this part of a store file
RESERVE = 512 << 20  # bytes that must be free below a store file to make a root or a checkpoint


@contextmanager
def storage_errors(what: str):
    """Turn "no space" into `StorageFull`; everything else passes."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"the sandbox store is full: {what}",
                kept="earlier checkpoints and all journals",
                next_step="remove old run directories, or raise sandbox.store_bytes",
            ) from error
        raise


class Store:
    """An opened store. `root` is the top of the tree; `close()` unmounts it if nobody else uses it."""

    def __init__(
        self,
        root: Path,
        users_fd: int,
        mount_lock: Path | None = None,
        mount_point: Path | None = None,
        file: Path | None = None,
        trees: Trees | None = None,
    ) -> None:
        self.root = root
        self.trees: Trees = trees or BtrfsTrees(root)
        self.why_not_btrfs = ""  # of an overlay store that was chosen because this host has no btrfs
        self.file = file
        self.has_quota = False
        self.users_fd = users_fd
        self.mount_lock = mount_lock
        self.mount_point = mount_point

    @classmethod
    def open(
        cls,
        folder: Path | None = None,
        size: int = 16 << 30,
        *,
        durable: bool = True,
        kind: Literal["auto"] | StoreKind = "auto",
    ) -> Store:
        """Open (and first make) the store in `folder`, by default `store_dir()`; `size` bytes where a file is made.

        A store file that nobody opened as `durable` may be damaged by a power failure while it is in use. `auto` takes
        an overlay store only where no btrfs store can be made; the two do not see each other's images and snapshots.
        Raises `SandboxUnavailable` with the reason when this host cannot have one.
        """
        folder = (folder or store_dir()).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if kind == "overlay":
            store = cls._open_overlay(folder)
        elif _btrfs.is_btrfs(folder):
            store = cls(folder, _open_shared(folder / "users.lock"))
        else:
            file = folder / FILE
            there = file.exists()
            try:
                store = cls._open_file(file, size, durable)
            except SandboxUnavailable as error:
                if kind == "btrfs" or there:
                    raise
                file.unlink(missing_ok=True)
                store = cls._open_overlay(folder)
                store.why_not_btrfs = error.what
        try:
            for name in ("images", "runs", "runs-data"):
                (store.root / name).mkdir(exist_ok=True)
        except OSError as error:
            store.close()
            raise SandboxUnavailable(f"the sandbox store at {store.root} cannot be written: {error}") from error
        return store

    @classmethod
    def _open_overlay(cls, folder: Path) -> Store:
        top = folder / OVERLAY
        if not (top / "trees").is_dir():
            check_overlay(folder)
        try:
            top.mkdir(exist_ok=True)
            return cls(top, _open_shared(top / "users.lock"), trees=OverlayTrees(top))
        except OSError as error:
            raise SandboxUnavailable(f"the sandbox store at {top} cannot be written: {error}") from error

    @classmethod
    def _open_file(cls, file: Path, size: int, durable: bool) -> Store:
        place = labels.RUNTIME_DIR / f"{MOUNT_PREFIX}{hashlib.sha256(os.fsencode(file)).hexdigest()[:8]}"
        point = place / "mnt"
        users = -1
        try:
            with _entered(place) as users:
                fcntl.flock(users, fcntl.LOCK_SH)
                if not _is_mounted(point):
                    if not file.exists():
                        _make_file(file, size)
                    _loop.mount_file(file.resolve(), point)
                    if not durable and not has_durable(point):
                        _loop.use_barriers(point, False)
                    _reserve_metadata(point)
                elif durable:
                    _loop.use_barriers(point)
        except OSError as error:
            if users >= 0:
                os.close(users)
            raise SandboxUnavailable(
                f"the sandbox store {file} cannot be mounted: {error}",
                next_step="`belayer doctor` shows what is missing; a damaged store file may be deleted, it is re-made",
            ) from error
        except BaseException:
            if users >= 0:
                os.close(users)
            raise
        store = cls(point, users, place / "mount.lock", point, file)
        # never on a file system of the host's own: it would be changed for good
        store.has_quota = _btrfs.enable_quota(point)
        return store

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def share_bytes(self) -> int:
        """What one sandbox may write, so that it cannot stop the checkpoints and restores of all others."""
        here = os.statvfs(self.root)
        return here.f_blocks * here.f_frsize // SHARE

    def free_bytes(self) -> int:
        """Bytes that can still be written: the smaller of the store's room and that of the disk below a store file."""
        free = _free(self.root)
        return free if self.file is None else min(free, _free(self.file))

    def check_room(self) -> None:
        """Raises `StorageFull` when the disk below a store file, or of an overlay store, is nearly full.

        Below a file it must never run full: the file system in the file would see failing writes, not a lack of space,
        and turn read-only for everybody. The room inside the file is not looked at: btrfs's own answer to a write is
        exact.
        """
        disk = self.root if self.trees.kind == "overlay" else self.file
        if disk is None or _free(disk) >= RESERVE:
            return
        raise StorageFull(
            f"the disk of {disk} has {_free(disk) >> 20} MB left; sandboxes need {RESERVE >> 20} MB",
            kept="everything that was published",
            next_step="free disk space or remove old run directories",
        )

    def close(self) -> None:
        """Stop using the store. Unmounts it when no other process uses it."""
        if self.users_fd < 0:
            return
        if self.mount_lock is None or self.mount_point is None:
            os.close(self.users_fd)
            self.users_fd = -1
            return
        ours, self.users_fd = self.users_fd, -1
        with _entered(self.mount_lock.parent) as users:
            os.close(ours)
            try:
                if _unmount_if_unused(users, self.mount_point) and self.file is not None:
                    _flush(self.file)
                _remove_if_unused(users, self.mount_lock.parent)
            finally:
                os.close(users)


def existing_kinds(folder: Path) -> list[StoreKind]:
    """Which kinds of store there are in `folder`, in use or not."""
    kinds: list[StoreKind] = []
    if folder.is_dir() and (_btrfs.is_btrfs(folder) or (folder / FILE).exists()):
        kinds.append("btrfs")
    if (folder / OVERLAY).is_dir():
        kinds.append("overlay")
    return kinds


def has_durable(root: Path) -> bool:
    """Has the store a checkpoint that is to survive a reboot, of whichever run? Its file must then stay sound."""
    return any((root / "runs-data").glob(f"*/{DURABLE}"))


def unmount_unused() -> list[str]:
    """Unmount the store files that no living process uses. Returns the mount points that were unmounted."""
    removed = []
    for gone in labels.RUNTIME_DIR.glob(f".dead-{MOUNT_PREFIX}*"):
        shutil.rmtree(gone, ignore_errors=True)
    for place in sorted(labels.RUNTIME_DIR.glob(f"{MOUNT_PREFIX}*")):
        point = place / "mnt"
        with _entered(place) as users:
            try:
                if _is_mounted(point) and _unmount_if_unused(users, point):
                    removed.append(str(point))
                _remove_if_unused(users, place)
            finally:
                os.close(users)
    return removed


def _unmount_if_unused(users: int, point: Path) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    deadline = time.monotonic() + 3
    while True:
        try:
            _loop.unmount(point)
            return True
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False  # not mounted
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                return False  # a foreign process sits in it; the mount is found again by unmount_unused
            time.sleep(0.02)


@contextmanager
def _entered(place: Path) -> Iterator[int]:
    """A descriptor of `users.lock` in the folder `place`, made if need be; `mount.lock` is held meanwhile.

    The caller closes the descriptor.
    """
    users, mount = _enter(place)
    try:
        yield users
    finally:
        os.close(mount)


def _enter(place: Path, timeout_s: float = 30.0) -> tuple[int, int]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        opened: list[int] = []
        with suppress(FileNotFoundError):  # removed between two of these calls
            (place / "mnt").mkdir(parents=True, exist_ok=True)
            opened += [_open_lock(place / "users.lock"), _open_lock(place / "mount.lock")]
            locked = _lock(opened[1])
            # who held the lock before may have removed the folder: then another one has the name, or none
            if locked and _is_at(opened[0], place / "users.lock") and _is_at(opened[1], place / "mount.lock"):
                return opened[0], opened[1]
        for fd in opened:
            os.close(fd)
    raise SandboxUnavailable(f"{place / 'mount.lock'} has been locked by another process for {timeout_s:.0f} s")


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _remove_if_unused(users: int, place: Path) -> None:
    """Remove the locks' folder. The caller holds `mount.lock`; with `users.lock` taken alone, nobody needs them."""
    if _is_mounted(place / "mnt"):
        return
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    if not _is_at(users, place / "users.lock"):
        return  # another folder has its name by now
    gone = place.with_name(f".dead-{place.name}-{os.getpid()}")
    with suppress(FileNotFoundError):
        os.rename(place, gone)  # under its name it is there as a whole or not at all
        shutil.rmtree(gone, ignore_errors=True)


def _make_file(file: Path, size: int) -> None:
    program = shutil.which("mkfs.btrfs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise SandboxUnavailable("mkfs.btrfs is missing", next_step="install btrfs-progs (`make setup` does)")
    fresh = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        with open(fresh, "wb") as handle:
            handle.truncate(size)
        command = [program, "-q", "-f", "-m", "single", "-d", "single", "-L", "belayer", str(fresh)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SandboxUnavailable(f"no btrfs file system could be made in {file}: {done.stderr.strip()}")
        _flush(fresh)
        os.replace(fresh, file)
        _flush(file.parent)
    finally:
        fresh.unlink(missing_ok=True)


def _reserve_metadata(root: Path) -> None:
    """Make btrfs set space aside for metadata, once, while there is plenty.

    It takes such space in large pieces and only from what is not data yet. A new file system has 8 MB of it; when data
    fills all the rest, no snapshot, rename or deletion works any more, not even after the data is gone. Small files are
    kept inside the metadata: writing 12 MB of them makes btrfs take a piece of at least 100 MB, and as long as
    they stay it does not give that back.
    """
    done = root / "reserve"
    if done.is_dir():
        return
    fresh = root / ".reserve"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    for number in range(RESERVE_FILES):
        (fresh / str(number)).write_bytes(os.urandom(2000))
    _btrfs.sync(root)
    os.rename(fresh, done)


def _open_shared(path: Path) -> int:
    fd = _open_lock(path)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(fd: int, timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)


def _is_mounted(point: Path) -> bool:
    with open("/proc/self/mountinfo") as table:
        return any(line.split(" ")[4].encode().decode("unicode_escape") == str(point) for line in table)


def _flush(file: Path) -> None:
    """Have the disk write what it still holds of a store file, or of the names in a folder."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _free(path: Path) -> int:
    here = os.statvfs(path)
    return here.f_bavail * here.f_frsize
