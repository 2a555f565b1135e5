"""Folders and archives into and out of a sandbox, as streams of entries. The stream's format: native/copy.c.

A path of the container is resolved inside the container only. What comes out of it is not trusted: it is written into
a fresh folder of ours, through descriptors and never through a link, and only links that stay inside it are made.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

import msgspec

from belayer.errors import SandboxError
from belayer.sandbox._layers import open_in

_HEAD = struct.Struct("<BIQIQ")
_END = _HEAD.pack(ord("e"), 0, 0, 0, 0)
_CHUNK = 1 << 20
_LONGEST = 65535
MOST_ENTRIES = 1_000_000
STREAM_OVERHEAD = 256 << 20  # heads and paths beside the content


class Copied(msgspec.Struct, frozen=True):
    """What was copied. `skipped`: sockets, devices, fifos, other file systems, and links that lead out of the copy."""

    files: int
    bytes: int
    skipped: tuple[str, ...] = ()


class _Budget:
    def __init__(self, limit: int) -> None:
        self.limit, self.entries, self.files, self.bytes = limit, 0, 0, 0
        self.skipped: list[str] = []

    def take(self, path: str, size: int, *, file: bool) -> None:
        self.entries += 1
        self.files += file
        self.bytes += size
        if self.bytes > self.limit or self.entries > MOST_ENTRIES:
            raise SandboxError(
                f"the copy is larger than {self.limit >> 20} MB or {MOST_ENTRIES} entries (at {path})",
                next_step="allow more: limit_bytes",
            )

    @property
    def copied(self) -> Copied:
        return Copied(self.files, self.bytes, tuple(self.skipped))


# -- in ----------------------------------------------------------------------------------------------------------------
def write_folder(folder: Path, out: BinaryIO, limit: int) -> Copied:
    """Write a folder of the host as entries. Links are copied as links. Blocking."""
    budget = _Budget(limit)
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for here, folders, files, fd in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            for name in [*folders, *files]:
                path = os.path.normpath(os.path.join(here, name))
                _write_one(out, fd, name, path, budget)
    finally:
        os.close(top)
    out.write(_END)
    return budget.copied


def _write_one(out: BinaryIO, folder: int, name: str, path: str, budget: _Budget) -> None:
    status = os.lstat(name, dir_fd=folder)
    mode, mtime = stat.S_IMODE(status.st_mode), max(0, int(status.st_mtime))
    if stat.S_ISDIR(status.st_mode):
        budget.take(path, 0, file=False)
        _head(out, "d", mode, mtime, path, 0)
    elif stat.S_ISLNK(status.st_mode):
        target = os.fsencode(os.readlink(name, dir_fd=folder))
        budget.take(path, 0, file=False)
        _head(out, "l", mode, mtime, path, len(target))
        out.write(target)
    elif stat.S_ISREG(status.st_mode):
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            budget.take(path, size, file=True)
            _head(out, "f", mode, mtime, path, size)
            _copy(file, out, size, path)
    else:
        budget.skipped.append(path)


def write_archive(archive: BinaryIO, out: BinaryIO, limit: int) -> Copied:
    """Write the entries of a tar archive (plain, gzip, bzip2 or xz). Blocking.

    Raises `SandboxError` for paths that are absolute or lead out of the folder that it is unpacked into.
    """
    budget = _Budget(limit)
    try:
        with tarfile.open(fileobj=archive, mode="r|*") as entries:
            for member in entries:
                path = _inside(member.name)
                if path:
                    _write_member(entries, member, path, out, budget)
    except (tarfile.TarError, EOFError) as error:
        raise SandboxError(f"this is not a usable tar archive: {error}") from error
    out.write(_END)
    return budget.copied


def _write_member(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, out: BinaryIO, budget: _Budget) -> None:
    mtime = max(0, int(member.mtime))
    if member.isdir():
        budget.take(path, 0, file=False)
        _head(out, "d", member.mode & 0o7777, mtime, path, 0)
    elif member.issym() or member.islnk():
        target = os.fsencode(member.linkname if member.issym() else _inside(member.linkname))
        budget.take(path, 0, file=False)
        _head(out, "l" if member.issym() else "h", 0o777, mtime, path, len(target))
        out.write(target)
    elif member.isfile():
        budget.take(path, member.size, file=True)
        content = archive.extractfile(member)
        assert content is not None
        _head(out, "f", member.mode & 0o7777, mtime, path, member.size)
        _copy(content, out, member.size, path)
    else:
        budget.skipped.append(path)


def _head(out: BinaryIO, kind: str, mode: int, mtime: int, path: str, size: int) -> None:
    name = os.fsencode(path)
    if len(name) > _LONGEST or b"\0" in name:
        raise SandboxError(f"{path[:80]!r} … is not a usable path")
    out.write(_HEAD.pack(ord(kind), mode, mtime, len(name), size) + name)


def _copy(source: IO[bytes], target: BinaryIO, size: int, path: str) -> None:
    left = size
    while left:
        block = source.read(min(left, _CHUNK))
        if not block:
            raise SandboxError(f"{path} ended {left} bytes early")
        target.write(block)
        left -= len(block)


def _inside(name: str) -> str:
    """`name` without empty parts. Raises `SandboxError` when it is absolute or has a part `..`."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise SandboxError(f"the path {name!r} leads out of the folder that it belongs into")
    return "/".join(part for part in parts if part not in ("", "."))


# -- out ---------------------------------------------------------------------------------------------------------------
class _Entry(msgspec.Struct, frozen=True):
    kind: str
    mode: int
    mtime: int
    path: str
    size: int


def _entries(stream: BinaryIO, budget: _Budget) -> Iterator[_Entry]:
    """The entries of a stream; who gets one reads its content before the next."""
    while True:
        head = stream.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise SandboxError("the sandbox's copy ended early")
        kind, mode, mtime, length, size = _HEAD.unpack(head)
        if chr(kind) == "e":
            return
        if chr(kind) not in "dfls" or length > _LONGEST or (chr(kind) != "f" and size > _LONGEST):
            raise SandboxError("the sandbox's copy holds an entry that makes no sense")
        path = _inside(os.fsdecode(stream.read(length)))
        budget.take(path, size if chr(kind) == "f" else 0, file=chr(kind) == "f")
        yield _Entry(chr(kind), mode & 0o777, mtime, path, size)  # no set-uid bits on the host


def read_into(stream: BinaryIO, target: Path, limit: int) -> Copied:
    """Write what `stream` holds to `target`, which appears when it is complete. Blocking.

    One file replaces a file at `target`; a folder needs a `target` that does not exist or is an empty folder.
    """
    budget = _Budget(limit)
    fresh = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.part")
    try:
        fresh.mkdir(mode=0o700)
        top = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            single = _fill(stream, top, budget)
        finally:
            os.close(top)
        if single:
            os.replace(fresh / "file", target)
        else:
            fresh.chmod(0o755)
            os.rename(fresh, target)  # fails unless `target` is missing or an empty folder
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return budget.copied


def _fill(stream: BinaryIO, top: int, budget: _Budget) -> bool:
    """Was it one file only?"""
    links: list[tuple[str, bytes]] = []
    folders: list[tuple[str, int, int]] = []
    for entry in _entries(stream, budget):
        if entry.kind == "f" and not entry.path:
            _new_file(stream, top, "file", entry)
            return True
        if entry.kind == "s":
            budget.skipped.append(entry.path)
            continue
        if not entry.path:
            raise SandboxError("the sandbox's copy holds an entry without a name")
        if entry.kind == "l":
            links.append((entry.path, stream.read(entry.size)))
            continue
        above, _, name = entry.path.rpartition("/")
        parent = open_in(top, above or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if entry.kind == "d":
                os.mkdir(name, 0o700, dir_fd=parent)
                folders.append((entry.path, entry.mode, entry.mtime))
            else:
                _new_file(stream, parent, name, entry)
        finally:
            os.close(parent)
    # links last: until here there is none through which anything could be written
    for path, target in links:
        above, _, name = path.rpartition("/")
        if not _stays_inside(target, len(above.split("/")) if above else 0):
            budget.skipped.append(path)
            continue
        parent = open_in(top, above or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, links=False)
        try:
            os.symlink(target, os.fsencode(name), dir_fd=parent)
        finally:
            os.close(parent)
    for path, mode, mtime in reversed(folders):
        fd = open_in(top, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, links=False)
        try:
            os.fchmod(fd, mode | 0o700)  # so that it can be deleted again
            os.utime(fd, (mtime, mtime))
        finally:
            os.close(fd)
    return False


def _stays_inside(target: bytes, depth: int) -> bool:
    """Does a link in a folder `depth` levels down stay inside, whatever other such links are there?

    Leading `..` lead through real folders; one after a name might lead through another link, to anywhere.
    """
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    up = 0
    while up < len(parts) and parts[up] == b"..":
        up += 1
    return not target.startswith(b"/") and b"\0" not in target and up <= depth and b".." not in parts[up:]


def _new_file(stream: BinaryIO, folder: int, name: str, entry: _Entry) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with open(fd, "wb") as file:
        _copy(stream, file, entry.size, entry.path)
        file.flush()
        os.fchmod(fd, entry.mode)
        os.utime(fd, (entry.mtime, entry.mtime))


def read_as_archive(stream: BinaryIO, file: BinaryIO, limit: int) -> Copied:
    """Write what `stream` holds as an uncompressed tar archive. Links are kept as they are: who unpacks it decides."""
    budget = _Budget(limit)
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for entry in _entries(stream, budget):
            if entry.kind == "s":
                budget.skipped.append(entry.path)
                continue
            member = tarfile.TarInfo(entry.path or "file")
            member.mode, member.mtime = entry.mode, entry.mtime
            if entry.kind == "f":
                member.size = entry.size
                archive.addfile(member, _Part(stream, entry.size))  # type: ignore[arg-type]
                continue
            member.type = tarfile.DIRTYPE if entry.kind == "d" else tarfile.SYMTYPE
            if entry.kind == "l":
                member.linkname = os.fsdecode(stream.read(entry.size))
            archive.addfile(member)
    return budget.copied


class _Part:
    """The next `size` bytes of a stream, as a file."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._left = stream, size

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data
