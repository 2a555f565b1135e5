"""The store for hosts without btrfs: images are lower layers of overlayfs, each sandbox has an upper one.

    trees/<token>            the files of an image; images/<name> is a link to it
    <root or snapshot>/      `lower`: the token of the image below; `upper`, `work`: the layer, as overlayfs keeps it

A root is mounted below /run/belayer/<label>/, so that the reaper finds the mount by its name. A snapshot is a copy of
the layer (native/tree.c), and a restored root starts with a copy of the snapshot: always one image and one layer, so
that a chain of any length works, hard links and renamed folders are as they were, and snapshots do not need each other.
The price is that both copies cost what the sandbox changed, except where the file system shares data between files.

An image that was replaced or removed stays as long as a root or snapshot refers to its token (`collect`).

Mount options: with `index=on` a file with several names in the image stays one file when it is changed; with
`nfs_export=on` files have handles, without which CRIU cannot dump inotify; with `redirect_dir=on` folders of the image
can be renamed, as everywhere else.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from belayer.errors import SandboxUnavailable
from belayer.ownership import RunLabel
from belayer.sandbox import _btrfs, _loop
from belayer.sandbox._native import native_program
from belayer.sandbox._trees import Root, StoreKind, remove_tree

FOLDER = "overlay"  # inside the configured folder of the store
OPTIONS = "index=on,nfs_export=on,redirect_dir=on,metacopy=off"
COPY_TIMEOUT_S = 45.0  # below that of a dump: a sandbox whose dump is cut off is lost, one whose copy is cut off is not
_TRIAL = ".try-"
UNMOUNT_TIMEOUT_S = 3.0


class OverlayTrees:
    """See the module's text. `store`: the top of the store, on any file system that can hold an upper layer."""

    kind: StoreKind = "overlay"
    instant = False
    loses: tuple[str, ...] = ("the inode numbers of files that are not the image's",)

    def __init__(self, store: Path) -> None:
        self._store = store
        self._trees = store / "trees"
        self._trees.mkdir(exist_ok=True)

    # -- images --------------------------------------------------------------------------------------------------------
    def make_image(self, path: Path) -> Path:
        tree = self._trees / secrets.token_hex(8)
        path.symlink_to(os.path.relpath(tree, path.parent))  # first the reference, so that nobody collects the tree
        tree.mkdir(mode=0o755)
        return tree

    def seal_image(self, path: Path) -> None:
        """Nobody writes to a lower layer: there is nothing to do."""

    # -- roots ---------------------------------------------------------------------------------------------------------
    def root(self, home: Path, work: Path) -> Root:
        return Root(work / "root", home, home / "upper")

    def make_root(self, source: Path, root: Root, limit: int = 0) -> None:
        with self._pinned():
            token = (
                (source / "lower").read_text() if not source.is_symlink() else os.readlink(source).rpartition("/")[2]
            )
            lower = self._trees / token
            if not lower.is_dir():
                raise FileNotFoundError(errno.ENOENT, "the image below this layer is gone", str(lower))
            root.home.mkdir()
            (root.home / "lower").write_text(token)
        if source.is_symlink():
            (root.home / "upper").mkdir(mode=0o755)
            top = lower.stat()
            os.chmod(root.home / "upper", top.st_mode & 0o7777)
            os.chown(root.home / "upper", top.st_uid, top.st_gid)
            (root.home / "work").mkdir()
        else:
            self._tree("copy", source, root.home, lower)
        root.path.mkdir(parents=True)
        mount_overlay(lower, root.home, root.path)

    def remove_root(self, root: Root) -> None:
        unmount_overlay(root.path)
        remove_tree(root.home)

    # -- snapshots -----------------------------------------------------------------------------------------------------
    def snapshot(self, root: Root, target: Path) -> None:
        target.mkdir(mode=0o700)
        token = (root.home / "lower").read_text()
        (target / "lower").write_text(token)
        self._tree("copy", root.home, target, self._trees / token)

    def identity(self, snapshot: Path) -> str:
        return f"{(snapshot / 'lower').read_text()}:{self._tree('identify', snapshot).split()[0]}"

    # -- the rest ------------------------------------------------------------------------------------------------------
    def clone_file(self, source: Path, target: Path, mode: int) -> None:
        shutil.copyfile(source, target)
        target.chmod(mode)

    def set_immutable(self, path: Path, on: bool) -> None:
        _btrfs.set_immutable(path, on)

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def settle(self) -> None:
        """Deleting gives the space back at once."""

    def collect(self) -> list[str]:
        dead = []
        with self._pinned(alone=True):
            wanted = set(self._references())
            for tree in self._trees.iterdir():
                if tree.name.startswith(".dead-"):
                    dead.append(tree)
                elif tree.is_dir() and tree.name not in wanted:
                    dead.append(tree.rename(tree.with_name(f".dead-{tree.name}")))
        for tree in dead:
            remove_tree(tree)
        return [f"{tree.parent / tree.name.removeprefix('.dead-')}" for tree in dead]

    def _tree(self, *arguments: str | Path) -> str:
        """Run native/tree.c; its failures become the `OSError` that they are."""
        command = [str(self._program), "tree", *map(str, arguments)]
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, errors="replace", timeout=COPY_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise OSError(errno.ETIMEDOUT, f"`tree {arguments[0]}` took more than {COPY_TIMEOUT_S:.0f} s") from None
        if done.returncode:
            number, _, text = done.stderr.strip().partition(" ")
            raise OSError(int(number) if number.isdigit() else errno.EIO, text or f"exit {done.returncode}")
        return done.stdout

    def _references(self) -> Iterator[str]:
        for link in (self._store / "images").iterdir():
            if link.is_symlink():
                yield os.readlink(link).rpartition("/")[2]
        for part in ("runs", "runs-data"):
            for note in (self._store / part).glob("*/*/lower"):
                try:
                    yield note.read_text()
                except FileNotFoundError:
                    continue

    @cached_property
    def _program(self) -> Path:
        """The one of this store's first use: what is installed may change while a run goes on."""
        return native_program()

    @contextmanager
    def _pinned(self, *, alone: bool = False) -> Iterator[None]:
        """From reading a reference to having written another: nothing is collected meanwhile."""
        fd = os.open(self._trees / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)


def check_overlay(folder: Path) -> None:
    """Try it: a layer in `folder`, mounted, written to. Raises `SandboxUnavailable` that says what does not work."""
    for left in folder.glob(f"{_TRIAL}*"):  # by a check that was killed
        if time.time() - left.stat().st_mtime > 60:
            remove_tree(left)
    with RunLabel.new(f"is {folder} fit for an overlay store") as label:
        place, point = folder / f"{_TRIAL}{label.name}", label.dir / "mnt"
        step = "an overlay cannot be mounted on it"
        try:
            for path in (place / "lower" / "gone", place / "upper", place / "work", point):
                path.mkdir(parents=True)
            (place / "lower" / "file").write_text("x")
            mount_overlay(place / "lower", place, point)
            step = "files of a lower layer cannot be changed or deleted on it"
            (point / "gone").rmdir()
            (point / "file").rename(point / "other")
            step = "it cannot protect files from change (immutable flag)"
            _btrfs.set_immutable(place / "lower", True)
            _btrfs.set_immutable(place / "lower", False)
        except OSError as error:
            raise SandboxUnavailable(
                f"{folder} cannot hold an overlay store: {step}: {error.strerror or error}",
                next_step="choose a folder on ext4, XFS or tmpfs (sandbox.store)",
            ) from error
        finally:
            unmount_overlay(point)
            remove_tree(place)


def mount_overlay(lower: Path, home: Path, point: Path) -> None:
    """Mount `home`'s layer over `lower`. Raises `OSError`."""
    if any(character in f"{lower}{home}" for character in ",:\\"):
        raise OSError(errno.EINVAL, "a folder of an overlay cannot have a comma, colon or backslash in its path")
    options = f"lowerdir={lower},upperdir={home / 'upper'},workdir={home / 'work'},{OPTIONS}"
    _loop.mount("belayer", point, "overlay", _loop.MS_NOATIME, options)


def unmount_overlay(point: Path) -> None:
    """Unmount it and remove the mount point; none is fine. A look from the host may be under way: waits for its end."""
    deadline = time.monotonic() + UNMOUNT_TIMEOUT_S
    while os.path.ismount(point):
        try:
            _loop.unmount(point)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            if time.monotonic() > deadline:
                _loop.unmount(point, lazily=True)  # out of everybody's sight; the kernel ends it with its last user
            time.sleep(0.01)
    if point.is_dir():
        point.rmdir()
