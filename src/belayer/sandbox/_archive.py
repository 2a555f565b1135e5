"""One checkpoint as one file, for another host: a plain tar of

    manifest.json      as published
    checkpoint.json    format, the version that made it, and the sockets of the file system (tar cannot hold them)
    images/<name>      process images
    tree/<number>      the file system, a tar (pax, with extended attributes, ACLs, hard links, holes) in pieces
    end.json           CRC-32C of the names and contents of all members before

The file system is a tar and not the output of `btrfs send`: it can be unpacked into any kind of store. The end comes
last, so a truncated or damaged archive is recognised; until then nothing of it is published.
"""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO, cast

import google_crc32c
import msgspec

from belayer.errors import CheckpointDamaged, SandboxError, StorageFull

FORMAT = 1
PIECE = 8 << 20
_TAR = ("--numeric-owner", "--xattrs", "--xattrs-include=*", "--acls")


class SocketFile(msgspec.Struct, frozen=True):
    """A Unix socket's name in the file system; `path` is relative to the root."""

    path: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int


class About(msgspec.Struct, frozen=True):
    """What an archive says of itself."""

    format: int
    belayer: str
    sockets: list[SocketFile]


class ArchiveWriter:
    """Writes the members in their order; `finish` makes the archive valid. Raises `OSError`."""

    def __init__(self, file: BinaryIO) -> None:
        self._sink = _Sink(file)
        sink = cast(BinaryIO, self._sink)
        self._tar = tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20)  # noqa: SIM115
        self._checksum = 0

    def add(self, name: str, content: bytes) -> None:
        """Add a small member."""
        self.add_file(name, io.BytesIO(content), len(content))

    def add_file(self, name: str, content: BinaryIO | IO[bytes], size: int) -> None:
        """Add a member of exactly `size` bytes."""
        member = tarfile.TarInfo(name)
        member.size, member.mode = size, 0o600
        self._checksum = google_crc32c.extend(self._checksum, name.encode())
        self._tar.addfile(member, _Summed(content, self))  # type: ignore[arg-type]  # it only reads

    def extend(self, block: bytes) -> None:
        self._checksum = google_crc32c.extend(self._checksum, block)

    def abandon(self) -> None:
        """Write nothing more."""
        self._sink.abandon()

    def finish(self) -> None:
        """Write the end."""
        self.add("end.json", msgspec.json.encode({"crc32c": f"{self._checksum:08x}"}))
        self._tar.close()


class ArchiveReader:
    """Reads the members in their order. Raises `CheckpointDamaged` for anything that is not as it was written."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name = name
        self._checksum = 0
        try:
            self._tar = tarfile.open(fileobj=file, mode="r|", bufsize=1 << 20)  # noqa: SIM115
        except tarfile.TarError as error:
            raise self._damaged(str(error)) from error

    def next(self) -> tuple[str, Iterator[bytes]]:
        """Name and content of the next member; read the content to its end before the next call."""
        try:
            member = self._tar.next()
            content = self._tar.extractfile(member) if member is not None and member.isreg() else None
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise self._damaged(str(error)) from error
        if member is None or content is None:
            raise self._damaged("it ends too early")
        return member.name, self._blocks(member.name, content)

    def small(self, expected: str, limit: int = 64 << 20) -> bytes:
        """Content of the next member, which must have that name."""
        name, blocks = self.next()
        if name != expected:
            raise self._damaged(f"{expected} is missing")
        content = b"".join(_limited(blocks, limit))
        if len(content) > limit:
            raise self._damaged(f"{expected} is too large")
        return content

    def check_end(self, content: bytes, checksum: int) -> None:
        """`checksum`: that of everything before the end."""
        try:
            wanted = msgspec.json.decode(content)["crc32c"]
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise self._damaged("its end cannot be read") from error
        if wanted != f"{checksum:08x}":
            raise self._damaged("its checksum is not that of what was written")

    @property
    def checksum(self) -> int:
        """Of everything that was read so far."""
        return self._checksum

    def _blocks(self, name: str, content: IO[bytes]) -> Iterator[bytes]:
        self._checksum = google_crc32c.extend(self._checksum, name.encode())
        try:
            while block := content.read(1 << 20):
                self._checksum = google_crc32c.extend(self._checksum, block)
                yield block
        except (tarfile.TarError, EOFError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, why: str) -> CheckpointDamaged:
        return CheckpointDamaged(
            f"{self.name} is not a checkpoint archive, or is damaged: {why}",
            kept="everything; nothing of it was imported",
            next_step="export the checkpoint again",
        )


def pack_tree(root: Path) -> Iterator[bytes]:
    """The file system below `root` as a tar, in pieces. Raises `SandboxError`."""
    command = ["tar", "--create", "--file=-", "--format=posix", "--sparse", "--warning=no-file-ignored", *_TAR]
    command += ["--pax-option=delete=atime,delete=ctime", f"--directory={root}", "."]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        complaints = _Drain(process.stderr)
        try:
            while piece := process.stdout.read(PIECE):
                yield piece
        except BaseException:
            process.kill()
            raise
        code = process.wait()
    if code:
        raise SandboxError(f"the file system below {root} cannot be packed: {complaints.text()}")


def unpack_tree(root: Path, pieces: Iterator[bytes], name: str) -> None:
    """Fill the empty folder `root`. Raises `StorageFull`, `CheckpointDamaged` and what `pieces` raises."""
    command = ["tar", "--extract", "--file=-", "--same-owner", "--same-permissions", "--delay-directory-restore", *_TAR]
    with subprocess.Popen([*command, f"--directory={root}"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        complaints = _Drain(process.stderr)
        try:
            _feed(process.stdin, pieces)
        except BaseException:
            process.kill()
            raise
        code = process.wait()
    if code:
        said = complaints.text()
        if "No space left" in said or "quota exceeded" in said:
            raise StorageFull(f"no room in the sandbox store for the file system in {name}", kept="everything")
        raise CheckpointDamaged(f"the file system in {name} cannot be unpacked: {said}", kept="everything")


def _feed(stream: IO[bytes], pieces: Iterator[bytes]) -> None:
    """A reader that ends early says itself why; the rest is read all the same, since it is verified on the way."""
    open_ = True
    for piece in pieces:
        if open_:
            try:
                stream.write(piece)
            except BrokenPipeError:
                open_ = False
    with suppress(BrokenPipeError):
        stream.close()


def find_sockets(root: Path) -> list[SocketFile]:
    """The sockets below `root`."""
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if path.is_socket() and not path.is_symlink():
                status = path.lstat()
                found.append(
                    SocketFile(
                        str(path.relative_to(root)),
                        status.st_mode & 0o7777,
                        status.st_uid,
                        status.st_gid,
                        status.st_mtime_ns,
                    )
                )
    return found


def make_sockets(root: Path, sockets: list[SocketFile]) -> None:
    """Make them again. Their folders must be real ones below `root`. Raises `OSError`, `CheckpointDamaged`."""
    for socket in sockets:
        path = root / socket.path
        if not path.parent.resolve().is_relative_to(root.resolve()) or os.path.lexists(path):
            raise CheckpointDamaged(f"the archive has a socket at a place where it cannot be: {socket.path}")
        folder = path.parent.stat()
        os.mknod(path, stat.S_IFSOCK | socket.mode)
        os.chown(path, socket.uid, socket.gid, follow_symlinks=False)
        os.chmod(path, socket.mode)
        os.utime(path, ns=(socket.mtime_ns, socket.mtime_ns))
        os.utime(path.parent, ns=(folder.st_atime_ns, folder.st_mtime_ns))


def copy_blocks(blocks: Iterator[bytes], target: Path) -> None:
    """Write a member to the new file `target` and have it on the disk."""
    with open(target, "xb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _limited(blocks: Iterator[bytes], limit: int) -> Iterator[bytes]:
    size = 0
    for block in blocks:
        size += len(block)
        yield block
        if size > limit:
            return


class _Summed:
    """A file whose content is added to the archive's checksum as it is read."""

    def __init__(self, file: BinaryIO | IO[bytes], archive: ArchiveWriter) -> None:
        self._file = file
        self._archive = archive

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self._archive.extend(block)
        return block


class _Sink:
    """Where the archive goes. `tarfile` writes what it still has even when it is only thrown away."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: BinaryIO | None = file

    def write(self, block: bytes) -> int:
        return self._file.write(block) if self._file is not None else len(block)

    def abandon(self) -> None:
        self._file = None


class _Drain:
    """Reads what a program complains about, so that it never waits for us."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._said = b""
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        while block := stream.read(4096):
            self._said = (self._said + block)[:4000]

    def text(self) -> str:
        self._thread.join(5.0)
        return self._said.decode(errors="replace").strip()[:500]
