"""What a sandbox store does with whole file systems: make one for an image, a root for a sandbox, a snapshot of a root.

Two kinds: subvolumes of btrfs (here) and layers of overlayfs (`_overlay`). Who uses them knows three paths only: an
image lies at `<store>/images/<name>`, a snapshot at `<store>/runs-data/<run>/<id>`, and a `Root` says where it is.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from belayer.sandbox import _btrfs

StoreKind = Literal["btrfs", "overlay"]

COLLECT_EVERY = 200  # removed roots


@dataclass(frozen=True)
class Root:
    """The writable file system of one sandbox generation.

    `path`: where it is seen on the host. `home`: its place in the store. `upper`: the folder that holds what the
    sandbox changed, where there is such a thing.
    """

    path: Path
    home: Path
    upper: Path | None = None


class Trees(Protocol):
    """One kind of store. Every method blocks and raises `OSError` (ENOSPC and EDQUOT mean: full)."""

    kind: StoreKind
    instant: bool
    """A snapshot is of one instant even while programs run. If not, they have to be frozen for it."""
    loses: tuple[str, ...]
    """What a root made of a snapshot does not have in common with the original, in words."""

    def make_image(self, path: Path) -> Path:
        """An empty tree to be filled, which will be known as `path`; returns the folder to fill."""
        ...

    def seal_image(self, path: Path) -> None:
        """The tree is complete and will not be written any more."""
        ...

    def root(self, home: Path, work: Path) -> Root:
        """Names the root at `home` (in the store) of a sandbox whose runtime folder is `work`; makes nothing."""
        ...

    def make_root(self, source: Path, root: Root, limit: int = 0) -> None:
        """Make `root` as a writable copy of an image or snapshot. `limit`: bytes that may be written, 0: no limit."""
        ...

    def remove_root(self, root: Root) -> None:
        """Remove it, whatever there is of it. Nothing may run in it."""
        ...

    def snapshot(self, root: Root, target: Path) -> None:
        """A read-only copy of `root` as it is now."""
        ...

    def identity(self, snapshot: Path) -> str:
        """Names the exact state of a snapshot: another one after any change."""
        ...

    def clone_file(self, source: Path, target: Path, mode: int) -> None:
        """Copy a file of the store, without copying its data where that can be."""
        ...

    def set_immutable(self, path: Path, on: bool) -> None:
        """Let nobody without CAP_LINUX_IMMUTABLE change a file or folder of the store."""
        ...

    def make_folder(self, path: Path) -> None:
        """A folder that can be deleted as a whole even when the store is full."""
        ...

    def settle(self) -> None:
        """Wait until deleted things have given their space back."""
        ...

    def collect(self) -> list[str]:
        """Delete what no image, root or snapshot refers to any more; says what."""
        ...


class BtrfsTrees:
    """Images, roots and snapshots are subvolumes; a copy of one costs the same whatever is in it."""

    kind: StoreKind = "btrfs"
    instant = True
    loses: tuple[str, ...] = ()

    def __init__(self, store: Path) -> None:
        self._store = store
        self._removed = 0

    def make_image(self, path: Path) -> Path:
        _btrfs.create_subvolume(path)
        return path

    def seal_image(self, path: Path) -> None:
        _btrfs.set_read_only(path)

    def root(self, home: Path, work: Path) -> Root:
        # in a folder of its own: the kernel makes subvolumes of one folder one after the other, a transaction for each
        return Root(home / "root", home)

    def make_root(self, source: Path, root: Root, limit: int = 0) -> None:
        root.home.mkdir(exist_ok=True)
        _btrfs.snapshot(source, root.path)
        if limit:
            _btrfs.limit(root.path, limit)

    def remove_root(self, root: Root) -> None:
        remove_tree(root.home)
        self._removed += 1
        if self._removed % COLLECT_EVERY == 0:
            with suppress(OSError):  # the next opening does it
                self.collect()

    def snapshot(self, root: Root, target: Path) -> None:
        _btrfs.snapshot(root.path, target, read_only=True)

    def identity(self, snapshot: Path) -> str:
        return _btrfs.identity(snapshot)

    def clone_file(self, source: Path, target: Path, mode: int) -> None:
        _btrfs.clone_file(source, target, mode)

    def set_immutable(self, path: Path, on: bool) -> None:
        _btrfs.set_immutable(path, on)

    def make_folder(self, path: Path) -> None:
        _btrfs.create_subvolume(path)

    def settle(self) -> None:
        _btrfs.sync(self._store)

    def collect(self) -> list[str]:
        found = _btrfs.forget_deleted(self._store)
        return [f"quota groups of {found} deleted subvolumes"] if found else []


def remove_tree(path: Path) -> None:
    """Delete `path` whatever it is: a subvolume, a file, or a folder of them, protected or not. Missing is fine."""
    try:
        _remove(path)
    except PermissionError:
        for folder, _, files in os.walk(path):
            for name in ("", *files):
                entry = Path(folder, name)
                if not entry.is_symlink() and (entry.is_dir() or entry.is_file()):
                    _btrfs.set_immutable(entry, False)
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):  # somebody else deletes it too
        if not _btrfs.is_btrfs(path):
            _remove_folder(path)
            return
        if path.stat().st_ino == _btrfs.SUBVOLUME_INODE:
            _btrfs.delete_subvolume(path)
            return
        for entry in list(path.iterdir()):
            _remove(entry)
        path.rmdir()


def _remove_folder(path: Path) -> None:
    """Like `rm -rf`. One failure does not end it before the rest is done."""
    failures: list[OSError] = []

    def note(function: object, name: str, info: tuple[type[BaseException], BaseException, object]) -> None:
        error = info[1]
        if isinstance(error, OSError) and error.errno != errno.ENOENT:
            failures.append(error)

    shutil.rmtree(path, onerror=note)
    if failures:
        raise failures[0]
