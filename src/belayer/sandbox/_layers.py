"""Unpacks the layers of an OCI image into one folder, one after the other, as the image specification says.

The archives are not trusted. Every path is resolved by the kernel with the image as its root (openat2,
RESOLVE_IN_ROOT), so that neither `..` nor a link in an earlier entry leads outside; the last part of a path is never
followed. A layer's whiteouts remove what the layers below it had, and never what the same layer brings, in whichever
order they come.

Source: OCI image specification, layer.md.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import struct
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from belayer.errors import ImageError

_OPENAT2 = 437
_RESOLVE_IN_ROOT, _RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS = 0x10, 0x02, 0x04
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_XATTR = "SCHILY.xattr."
_WANTED_XATTRS = ("user.", "security.capability", "system.posix_acl_")  # labels and overlay's own marks are the host's
MOST_ENTRIES = 2_000_000
_libc = ctypes.CDLL(None, use_errno=True)


class Unpacker:
    """Applies layers to the folder `root`, lowest first. Not more than `limit_bytes` of file content in all.

    `skipped` counts device nodes: a container gets its own few, and no others.
    """

    def __init__(self, root: str | os.PathLike[str], limit_bytes: int) -> None:
        self._root = os.open(root, _DIRECTORY)
        self._left = limit_bytes
        self._limit = limit_bytes
        self._entries = 0
        self.skipped = 0
        self._added: set[tuple[int, str]] = set()  # (inode of the folder, name) of what the current layer brought
        self._folders: dict[str, float] = {}  # times of folders, set when nothing changes in them any more

    def close(self) -> None:
        os.close(self._root)

    def apply(self, layer: BinaryIO, name: str) -> None:
        """Unpack one layer, an uncompressed tar stream. Raises `ImageError`, and `OSError` when the store is full."""
        self._added.clear()
        self._folders.clear()
        try:
            with tarfile.open(fileobj=layer, mode="r|", encoding="utf-8", errors="surrogateescape") as archive:
                for member in archive:
                    self._entries += 1
                    if self._entries > MOST_ENTRIES:
                        raise ImageError(f"the image has more than {MOST_ENTRIES} entries")
                    self._entry(archive, member)
        except (tarfile.TarError, EOFError, UnicodeError) as error:
            raise ImageError(f"layer {name} is not a usable tar archive: {error}") from error
        for path, mtime in self._folders.items():
            with suppress(FileNotFoundError, NotADirectoryError, OverflowError), self._opened(path) as fd:
                os.utime(fd, (mtime, mtime))

    def folder(self, path: str) -> None:
        """Make the folder `path` if it is missing."""
        with self._parent(_parts(path)):
            pass

    # -- one entry -----------------------------------------------------------------------------------------------------
    def _entry(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = _parts(member.name)
        if not parts:
            if member.isdir():
                os.fchmod(self._root, member.mode & 0o7777)
            return
        name = parts[-1]
        with self._parent(parts[:-1]) as parent:
            inode = os.fstat(parent).st_ino
            if name == _OPAQUE:
                self._empty(parent)
                return
            if name.startswith(_WHITEOUT):
                victim = name.removeprefix(_WHITEOUT)
                if victim in ("", ".", "..") or "/" in victim:
                    raise ImageError(f"{member.name} is not a usable whiteout")
                if (inode, victim) not in self._added:
                    delete_entry(parent, victim)
                return
            self._make(archive, member, parent, name, "/".join(parts))
            self._added.add((inode, name))

    def _make(self, archive: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str, path: str) -> None:
        if member.ischr() or member.isblk():
            self.skipped += 1
            delete_entry(parent, name)
            return
        there = _lstat(parent, name)
        if there is not None and not (member.isdir() and stat.S_ISDIR(there.st_mode)):
            delete_entry(parent, name)
            there = None
        if member.isdir():
            if there is None:
                os.mkdir(name, 0o700, dir_fd=parent)
            fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            try:
                _dress(fd, member)
            finally:
                os.close(fd)
            self._folders[path] = member.mtime
        elif member.isfile():  # sparse ones too
            fd = os.open(
                name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
            )
            try:
                self._fill(archive, member, fd)
                _dress(fd, member)
                with suppress(OverflowError):
                    os.utime(fd, (member.mtime, member.mtime))
            finally:
                os.close(fd)
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            with suppress(OverflowError):
                os.utime(name, (member.mtime, member.mtime), dir_fd=parent, follow_symlinks=False)
        elif member.islnk():
            self._link(member, parent, name)
        elif member.isfifo():
            os.mkfifo(name, 0o600, dir_fd=parent)
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            os.chmod(name, member.mode & 0o7777, dir_fd=parent)  # made just now by us: not a link
        else:
            raise ImageError(f"{member.name} is of an unknown kind ({member.type!r})")

    def _fill(self, archive: tarfile.TarFile, member: tarfile.TarInfo, fd: int) -> None:
        if member.size > self._left:
            raise ImageError(
                f"the image holds more than {self._limit >> 20} MB",
                next_step="allow more, if it is meant to be so large",
            )
        self._left -= member.size
        content = archive.extractfile(member)
        assert content is not None
        while block := content.read(1 << 20):
            view = memoryview(block)
            while view:
                view = view[os.write(fd, view) :]

    def _link(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        target = _parts(member.linkname)
        if not target:
            raise ImageError(f"{member.name} is a hard link to nothing")
        try:
            with self._opened("/".join(target[:-1]) or ".") as folder:
                if stat.S_ISDIR(os.lstat(target[-1], dir_fd=folder).st_mode):
                    raise ImageError(f"{member.name} is a hard link to the folder {member.linkname}")
                os.link(target[-1], name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            raise ImageError(f"{member.name} is a hard link to {member.linkname}, which is not there") from None

    def _empty(self, folder: int) -> None:
        """Remove what the layers below had in this folder."""
        inode = os.fstat(folder).st_ino
        for name in os.listdir(folder):
            if (inode, name) not in self._added:
                delete_entry(folder, name)
                continue
            status = _lstat(folder, name)
            if status is not None and stat.S_ISDIR(status.st_mode):
                below = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                try:
                    self._empty(below)
                finally:
                    os.close(below)

    # -- paths ---------------------------------------------------------------------------------------------------------
    @contextmanager
    def _parent(self, parts: list[str]) -> Iterator[int]:
        """The folder `parts`, made where it is missing."""
        path = "/".join(parts) or "."
        try:
            try:
                fd = self._open_in_root(path)
            except FileNotFoundError:
                for depth in range(1, len(parts) + 1):
                    with suppress(FileExistsError), self._opened("/".join(parts[: depth - 1]) or ".") as above:
                        os.mkdir(parts[depth - 1], 0o755, dir_fd=above)
                fd = self._open_in_root(path)
        except (FileNotFoundError, NotADirectoryError):
            raise ImageError(f"/{path} is needed as a folder and is a file, or a link to nothing") from None
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        fd = self._open_in_root(path)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_in_root(self, path: str) -> int:
        return open_in(self._root, path, _DIRECTORY)


def exists_in(root: str | os.PathLike[str], path: str) -> bool:
    """Is there anything at `path` when links are followed as if `root` were the root directory?"""
    top = os.open(root, _DIRECTORY)
    try:
        os.close(open_in(top, path, os.O_PATH | os.O_CLOEXEC))
        return True
    except (FileNotFoundError, NotADirectoryError, ImageError):
        return False
    finally:
        os.close(top)


def open_in(root: int, path: str, flags: int, *, links: bool = True) -> int:
    """Open `path` as if the folder `root` were the root directory; with `links=False`, no link on the way is followed.

    Raises `OSError`, and `ImageError` when there are too many links.
    """
    resolve = _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | (0 if links else _RESOLVE_NO_SYMLINKS)
    how = struct.pack("<QQQ", flags, 0, resolve)
    fd = _libc.syscall(ctypes.c_long(_OPENAT2), ctypes.c_int(root), os.fsencode(path), how, ctypes.c_size_t(len(how)))
    if fd < 0:
        number = ctypes.get_errno()
        if number == errno.ELOOP:
            raise ImageError(f"/{path} is a circle of links")
        raise OSError(number, os.strerror(number), path)
    return fd


def architecture() -> str:
    """This machine's name in the OCI specification."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise ImageError(f"the layer holds the path {name!r}, which leads out of the image")
    return parts


def _lstat(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return None


def delete_entry(folder: int, name: str) -> None:
    """Delete whatever `name` is; never follows a link. Missing is fine."""
    try:
        os.unlink(name, dir_fd=folder)
        return
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
    below = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        for entry in os.listdir(below):
            delete_entry(below, entry)
    finally:
        os.close(below)
    os.rmdir(name, dir_fd=folder)


def _dress(fd: int, member: tarfile.TarInfo) -> None:
    """Owner, mode and attributes, in this order: a change of owner clears set-uid bits and capabilities."""
    os.fchown(fd, member.uid, member.gid)
    os.fchmod(fd, member.mode & 0o7777)
    for key, value in member.pax_headers.items():
        name = key.removeprefix(_XATTR)
        if name != key and name.startswith(_WANTED_XATTRS):
            os.setxattr(fd, name, value.encode("utf-8", "surrogateescape"))
