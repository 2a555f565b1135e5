"""What every kind of sandbox store promises about images, roots and snapshots: the same tests over both kinds."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_root

from belayer.errors import SandboxUnavailable
from belayer.ownership import RunLabel
from belayer.sandbox._overlay import OverlayTrees, mount_overlay, unmount_overlay
from belayer.sandbox._trees import Root, StoreKind, remove_tree
from belayer.sandbox.store import Store, existing_kinds

pytestmark = [pytest.mark.contract, needs_root]


@pytest.fixture(scope="module", params=["btrfs", "overlay", "overlay that shares data"])
def store(request, tmp_path_factory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("store")
    kind: StoreKind = "btrfs" if request.param == "btrfs" else "overlay"
    below = None
    try:
        if request.param == "overlay that shares data":  # copies of files share their data on btrfs, as on XFS
            below = Store.open(folder, 1 << 30, kind="btrfs")
            folder = below.root / "nested"
        opened = Store.open(folder, 1 << 30, kind=kind)
    except SandboxUnavailable as error:
        if below is not None:
            below.close()
        pytest.skip(f"this host has no {request.param} store: {error.what}")
    assert opened.trees.kind == kind and kind in existing_kinds(folder)
    _fill_image(opened.trees.make_image(opened.images / "small"))
    opened.trees.seal_image(opened.images / "small")
    try:
        yield opened
    finally:
        opened.close()
        if below is not None:
            below.close()


class Home:
    """Roots and snapshots of one run, removed at its end."""

    def __init__(self, store: Store, label: RunLabel) -> None:
        self.store, self.label = store, label
        self.image = store.images / "small"
        self.runs = store.root / "runs" / label.name
        self.data = store.root / "runs-data" / label.name
        self.runs.mkdir()
        self.data.mkdir()
        self.roots: list[Root] = []

    def root(self, source: Path) -> Root:
        key = f"r{len(self.roots)}"
        root = self.store.trees.root(self.runs / key, self.label.dir / key)
        self.store.trees.make_root(source, root)
        self.roots.append(root)
        return root

    def snapshot(self, root: Root, name: str) -> Path:
        self.store.trees.snapshot(root, self.data / name)
        return self.data / name

    def close(self) -> None:
        for root in self.roots:
            self.store.trees.remove_root(root)
            assert not root.path.exists() and not root.home.exists()
        remove_tree(self.data)
        remove_tree(self.runs)


@pytest.fixture
def home(store) -> Iterator[Home]:
    with RunLabel.new("store contract") as label:
        made = Home(store, label)
        try:
            yield made
        finally:
            made.close()


def _fill_image(root: Path) -> None:
    root.chmod(0o755)
    (root / "etc").mkdir()
    (root / "etc" / "passwd").write_text("root\n")
    (root / "etc" / "gone").write_text("to be deleted\n")
    (root / "linked-1").write_text("one file, two names\n")
    os.link(root / "linked-1", root / "linked-2")
    deep = root / "usr" / "lib" / "deep"
    deep.mkdir(parents=True)
    for number in range(20):
        (deep / f"f{number}").write_text(f"{number}\n" * 100)
    (root / "replaced").mkdir()
    (root / "replaced" / "old").write_text("old")
    (root / "moved").mkdir()
    (root / "moved" / "inside").write_text("inside")


def _change(root: Path, salt: str) -> None:
    """Something of everything that a program can do to a file system."""
    (root / "etc" / "passwd").open("a").write(f"{salt}\n")
    (root / "etc" / "gone").unlink()
    (root / "linked-1").open("a").write(salt)  # through one of its names
    os.link(root / "usr" / "lib" / "deep" / "f1", root / "third-name")
    (root / "replaced" / "old").unlink()
    (root / "replaced").rmdir()
    (root / "replaced").mkdir(mode=0o750)
    (root / "replaced" / "new").write_text(salt)
    os.rename(root / "moved", root / "moved-on")
    (root / "moved-on" / "more").write_text(salt)
    (root / "usr" / "lib" / "deep" / "f2").unlink()
    (root / "usr" / "lib" / "deep" / "f3").chmod(0o600)
    work = root / "work"
    work.mkdir(mode=0o1777)
    os.mkfifo(work / "fifo", 0o640)
    os.mknod(work / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as listener:
        place = os.open(work, os.O_PATH)
        listener.bind(f"/proc/self/fd/{place}/socket")
        os.close(place)
    (work / "link").symlink_to("/nowhere/at all")
    os.chown(work / "link", 7, 8, follow_symlinks=False)
    with open(work / "sparse", "wb") as file:
        file.seek(64 << 20)
        file.write(b"behind a hole")
        file.truncate(96 << 20)
    (work / "program").write_bytes(b"\x7fELF")
    os.chown(work / "program", 1000, 1001)
    (work / "program").chmod(0o6755)
    os.setxattr(
        work / "program", "security.capability", bytes.fromhex("010000020020000000000000000000000000000000"[:40])
    )
    os.setxattr(work / "program", "trusted.of-ours", salt.encode())
    (work / "a").write_text("a" * 5000)
    os.link(work / "a", work / "b")
    os.utime(work / "a", ns=(1_000_000_001, 1_234_567_890_123_456_789))
    (work / os.fsdecode(b"odd \xff\n name")).write_text("odd")
    (work / "unreadable").mkdir(mode=0)


def _facts(root: Path) -> dict[str, Any]:
    """Everything about the tree that must come back; inode numbers only as far as they say what is one file."""
    found: dict[str, Any] = {}
    names: dict[int, list[str]] = {}
    for folder, folders, files in os.walk(root):
        for name in sorted([*folders, *files]):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            relative = os.path.relpath(path, root)
            content: object = None
            if stat.S_ISREG(status.st_mode):
                content = (status.st_size, hashlib.sha256(Path(path).read_bytes()).hexdigest(), status.st_blocks < 2048)
                names.setdefault(status.st_ino, []).append(relative)
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            attributes = {
                key: os.getxattr(path, key, follow_symlinks=False)
                for key in os.listxattr(path, follow_symlinks=False)
                if not key.startswith("btrfs.")
            }
            found[relative] = (
                oct(status.st_mode),
                status.st_uid,
                status.st_gid,
                status.st_mtime_ns,
                status.st_rdev,
                0 if stat.S_ISDIR(status.st_mode) else status.st_nlink,
                content,
                attributes,
            )
    found["one file"] = sorted(sorted(group) for group in names.values() if len(group) > 1)
    return found


def test_a_snapshot_holds_everything_and_is_not_changed_by_what_follows(home):
    root = home.root(home.image)
    image = _facts(root.path)
    assert image["one file"] == [["linked-1", "linked-2"]]
    _change(root.path, "first")
    want = _facts(root.path)
    assert (root.path / "linked-2").read_text().endswith("first"), "a file of the image fell apart into two"
    assert ["linked-1", "linked-2"] in want["one file"] and ["work/a", "work/b"] in want["one file"]
    snapshot = home.snapshot(root, "s1")
    # what follows
    subprocess.run(["rm", "-rf", str(root.path / "usr"), str(root.path / "work")], check=True)
    (root.path / "etc" / "passwd").write_text("later\n")
    (root.path / "linked-2").write_text("later\n")
    again = home.root(snapshot)
    assert _facts(again.path) == want
    assert _facts(home.root(home.image).path) == image, "the image was changed"
    # a hard link of the image is still one file, seen through the name that was never touched
    (again.path / "linked-2").write_text("both\n")
    assert (again.path / "linked-1").read_text() == "both\n"
    os.rename(again.path / "usr" / "lib", again.path / "usr" / "lib2")  # a folder of the image, after a restore


def test_roots_of_one_snapshot_are_independent(home):
    root = home.root(home.image)
    (root.path / "shared").write_text("s")
    snapshot = home.snapshot(root, "s1")
    identity = home.store.trees.identity(snapshot)
    copies = [home.root(snapshot) for _ in range(3)]
    for number, copy in enumerate(copies):
        (copy.path / "shared").write_text(str(number))
        (copy.path / f"own-{number}").write_text("")
    assert [(copy.path / "shared").read_text() for copy in copies] == ["0", "1", "2"]
    assert [len(list(copy.path.glob("own-*"))) for copy in copies] == [1, 1, 1]
    assert (root.path / "shared").read_text() == "s"
    assert home.store.trees.identity(snapshot) == identity


def test_a_long_chain(home):
    root = home.root(home.image)
    for number in range(25):
        (root.path / f"round-{number}").write_text(str(number))
        if number:
            (root.path / f"round-{number - 1}").unlink()
        os.rename(root.path / ("moved" if not number else f"moved-{number - 1}"), root.path / f"moved-{number}")
        (root.path / "linked-1").open("a").write(".")
        root = home.root(home.snapshot(root, f"s{number}"))
    assert [path.name for path in root.path.glob("round-*")] == ["round-24"]
    assert (root.path / "moved-24" / "inside").read_text() == "inside"
    assert (root.path / "linked-2").read_text() == "one file, two names\n" + "." * 25


def test_any_change_of_a_snapshot_is_seen(home):
    trees = home.store.trees
    root = home.root(home.image)
    _change(root.path, "x")
    snapshot = home.snapshot(root, "s1")
    before = trees.identity(snapshot)
    assert trees.identity(snapshot) == before
    if trees.kind == "btrfs":
        subprocess.run(["btrfs", "property", "set", "-f", str(snapshot), "ro", "false"], check=True)
        top = snapshot
    else:
        top = snapshot / "upper"
    seen = {before}
    file = top / "work" / "a"
    for change in (
        lambda: file.open("a").write("!"),
        lambda: file.chmod(0o611),
        lambda: os.setxattr(file, "user.x", b"1"),
        lambda: os.utime(file, ns=(5, 6)),
        file.unlink,
        (top / "work" / "link").unlink,
    ):
        change()
        os.sync() if trees.kind == "btrfs" else None
        seen.add(trees.identity(snapshot))
    assert len(seen) == 7


def test_an_image_that_was_replaced_stays_below_what_was_made_of_it(home):
    trees = home.store.trees
    name = home.store.images / "short-lived"
    (trees.make_image(name) / "version").write_text("old")
    trees.seal_image(name)
    root = home.root(name)
    snapshot = home.snapshot(root, "s1")
    remove_tree(name)
    (trees.make_image(name) / "version").write_text("new")
    trees.seal_image(name)
    trees.collect()
    assert (home.root(name).path / "version").read_text() == "new"
    assert (root.path / "version").read_text() == "old"
    assert (home.root(snapshot).path / "version").read_text() == "old"
    remove_tree(name)
    for made in home.roots:
        trees.remove_root(made)
    if isinstance(trees, OverlayTrees):
        assert len(trees.collect()) == 1, "the new one goes, the old one is still below a snapshot"
        remove_tree(snapshot)
        assert len(trees.collect()) == 1
    assert trees.collect() == []
    assert (home.image).is_dir()


def test_files_are_protected(home):
    folder = home.runs / "folder"
    home.store.trees.make_folder(folder)
    (folder / "file").write_text("x")
    home.store.trees.clone_file(folder / "file", folder / "copy", 0o755)
    assert (folder / "copy").read_text() == "x" and (folder / "copy").stat().st_mode & 0o777 == 0o755
    home.store.trees.set_immutable(folder, True)
    with pytest.raises(PermissionError):
        (folder / "other").write_text("y")
    home.store.trees.set_immutable(folder, False)
    (folder / "other").write_text("y")
    home.store.trees.set_immutable(folder / "file", True)
    home.store.trees.set_immutable(folder, True)
    remove_tree(folder)  # as the reaper does with what a killed run has protected
    assert not folder.exists()


def test_no_room_is_an_error_that_says_so(small_disk):
    """An overlay store on a disk of 1 MB: the snapshot that does not fit fails, the root and older snapshots stay."""
    store = Store.open(small_disk, kind="overlay")
    with RunLabel.new("store contract") as label:
        (store.trees.make_image(store.images / "small") / "file").write_text("x")
        made = Home(store, label)
        try:
            root = made.root(made.image)
            good = made.snapshot(root, "good")
            (root.path / "big").write_bytes(os.urandom(700_000))
            with pytest.raises(OSError, match="No space left"):
                made.snapshot(root, "bad")
            remove_tree(made.data / "bad")
            (root.path / "big").unlink()
            assert (made.root(good).path / "file").read_text() == "x"
        finally:
            made.close()
            store.close()


def test_auto_takes_overlay_where_no_btrfs_can_be_made(tmp_path):
    store = Store.open(tmp_path / "s", 1 << 20)  # mkfs.btrfs refuses so small a file
    try:
        assert store.trees.kind == "overlay" and "btrfs" in store.why_not_btrfs
        assert not store.has_quota and store.images.is_dir()
        assert existing_kinds(tmp_path / "s") == ["overlay"], "a file that is of no use stayed"
    finally:
        store.close()
    with pytest.raises(SandboxUnavailable):
        Store.open(tmp_path / "s", 1 << 20, kind="btrfs")
    # a folder that cannot hold a layer: the layer of another overlay
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    with RunLabel.new("store contract") as label:
        point = label.dir / "mnt"
        point.mkdir()
        mount_overlay(tmp_path / "lower", tmp_path, point)
        try:
            with pytest.raises(SandboxUnavailable, match="overlay"):
                Store.open(point / "s", kind="overlay")
            assert not list((point / "s").iterdir()), "the trial stayed"
        finally:
            unmount_overlay(point)
