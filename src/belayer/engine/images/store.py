"""The folder of images, shared by every run of this user on this host.

    <cache>/engine-images/
      <key>/              one image; it exists once its `meta.json` does, which is written last
        meta.json         what it is, with a checksum of every other file
        memory.img …      `thin`'s memory file, CRIU's files
      <key>.lock          held shared by whoever restores, exclusively by whoever removes
      <key>.building      held by the one builder; empty unless it is at work, or was killed at it
      <key>.failed        why it could not be built, so that not every run tries again

The locks are flocks: they go with their holder, however it dies. Least recently used images make room for new ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from belayer.engine.images.canary import Words
from belayer.engine.images.key import Key, changed_source
from belayer.engine.weights.layout import Layout
from belayer.errors import EngineError
from belayer.files import write_atomically
from belayer.ownership import cache_dir

FOLDER = "engine-images"
RETRY_S = 24 * 3600.0  # how long a failed build is not tried again
_META = "meta.json"
_CHUNK = 8 << 20


class ImageRefused(EngineError):
    """An image cannot be used; the message says why. It was removed if it can never be used."""


class FileCheck(msgspec.Struct, frozen=True):
    """Size of a file in bytes and CRC32C of its content (holes are left out, their places are not)."""

    nbytes: int
    crc: int


class Meta(msgspec.Struct, frozen=True):
    """What an image is."""

    key: dict[str, str]
    sources: dict[str, str]
    """Source files of Belayer in the process, with their digests."""
    layout: Layout
    canary: list[Words]
    """What the process said before it was dumped."""
    inherited: dict[str, str]
    """CRIU's names of the descriptors that a restore replaces: `trigger`, `channel`, `progress`, `log`."""
    files: dict[str, FileCheck]
    made_at: float
    build_s: float


class Image:
    """An image, which nobody may write to again. Before it is `published` only its builder knows it."""

    def __init__(self, folder: Path, meta: Meta, *, published: bool = True) -> None:
        self.folder = folder
        self.meta = meta
        self._published = published

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        return _disk_bytes(self.folder)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep it from being removed. Raises `ImageRefused` when that is just happening."""
        with _locked(self.folder.with_suffix(".lock"), fcntl.LOCK_SH) as got:
            if not got or (self._published and not (self.folder / _META).exists()):
                raise ImageRefused("the image is being removed")
            yield


class ImageStore:
    """Images below `folder` (default: in the cache folder), together at most `budget_bytes` on the disk."""

    def __init__(self, budget_bytes: int, folder: Path | None = None) -> None:
        self.folder = folder or cache_dir() / FOLDER
        self._budget = budget_bytes

    # -- finding ------------------------------------------------------------------------------------------------------
    def find(self, key: Key) -> Image | None:
        """The image for `key`, its files checked; None if there is none.

        Raises `ImageRefused` for one that is stale or damaged; it is gone then.
        """
        folder = self.folder / key.name
        try:
            meta = msgspec.json.decode((folder / _META).read_bytes(), type=Meta)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise self._refuse(folder, f"its description cannot be read: {error}") from None
        if meta.key != key.parts:
            raise self._refuse(folder, "it was made for another key")
        if (name := changed_source(meta.sources)) is not None:
            raise self._refuse(folder, f"it is stale: belayer/{name} has changed since it was made")
        image = Image(folder, meta)
        with image.in_use():
            wrong = damaged_file(folder, meta.files)
        if wrong is not None:
            raise self._refuse(folder, f"it is damaged: {wrong}")
        os.utime(folder / _META)  # recently used
        return image

    def held(self) -> tuple[int, int]:
        """How many images there are, and their bytes on the disk; whether they still fit is not looked at."""
        found = [path.parent for path in self.folder.glob(f"*/{_META}")]
        return len(found), sum(_disk_bytes(folder) for folder in found)

    def unfinished(self) -> tuple[int, int]:
        """How many images are being made now, and how many were begun in the last day and never finished."""
        now = cut_off = 0
        for mark in self.folder.glob("*.building"):
            facts = mark.stat()
            if facts.st_size and time.time() - facts.st_mtime < RETRY_S:
                with _locked(mark, fcntl.LOCK_SH, wait=False) as free:
                    now, cut_off = now + (not free), cut_off + free
        return now, cut_off

    def _refuse(self, folder: Path, why: str) -> ImageRefused:
        self.remove(folder)
        return ImageRefused(f"the engine image {folder.name} is refused: {why}")

    def discard(self, image: Image) -> None:
        """Remove an image that has turned out to be of no use."""
        self.remove(image.folder)

    def remove(self, folder: Path, *, wait: bool = True) -> bool:
        """Remove an image; False if `wait` is not set and somebody is restoring it."""
        with _locked(folder.with_suffix(".lock"), fcntl.LOCK_EX, wait=wait) as got:
            if not got:
                return False
            (folder / _META).unlink(missing_ok=True)  # first, so that half an image is never one
            shutil.rmtree(folder, ignore_errors=True)
        return True

    # -- building -----------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def building(self, key: Key) -> Iterator[Path | None]:
        """The empty folder in which to build the image for `key`; None if another process is building it.

        What lies there and was not published when this ends is removed.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it holds memory of processes
        folder = self.folder / key.name
        mark = folder.with_suffix(".building")
        with _locked(mark, fcntl.LOCK_EX, wait=False) as got:
            if not got:
                yield None
                return
            mark.write_text(f"begun at {time.time():.0f}")
            if not (folder / _META).exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a builder that was killed
            folder.mkdir(exist_ok=True)
            try:
                yield folder
            finally:
                os.truncate(mark, 0)
                if not (folder / _META).exists():
                    shutil.rmtree(folder, ignore_errors=True)

    def publish(self, folder: Path, meta: Meta) -> None:
        """Make the finished folder an image, and make room. Raises `ImageRefused` when it is larger than the budget."""
        size = _disk_bytes(folder)
        if size > self._budget:
            raise ImageRefused(
                f"the engine image has {size >> 20} MB, the budget of all images is {self._budget >> 20} MB",
                next_step="raise engine.images_bytes",
            )
        self._make_room(size, keep=folder)
        for file in folder.iterdir():
            with open(file, "rb") as content:
                os.fsync(content.fileno())
        write_atomically(folder / _META, msgspec.json.encode(meta))
        folder.with_suffix(".failed").unlink(missing_ok=True)

    def _make_room(self, nbytes: int, keep: Path) -> None:
        """Remove least recently used images until `nbytes` more fit. One that is being restored stays."""
        images = []
        for meta in self.folder.glob(f"*/{_META}"):
            with contextlib.suppress(FileNotFoundError):
                images.append((meta.stat().st_mtime, meta.parent))
        sizes = {folder: _disk_bytes(folder) for _used, folder in images if folder != keep}
        total = sum(sizes.values())
        for _used, folder in sorted(images):
            if folder in sizes and total + nbytes > self._budget and self.remove(folder, wait=False):
                total -= sizes[folder]

    def note_failure(self, key: Key, why: str) -> None:
        """Remember that the image for `key` cannot be built here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / f"{key.name}.failed", why.encode())

    def failure(self, key: Key) -> str | None:
        """Why the image for `key` could not be built lately, or None."""
        file = self.folder / f"{key.name}.failed"
        try:
            return file.read_text() if time.time() - file.stat().st_mtime < RETRY_S else None
        except FileNotFoundError:
            return None


# -- files ------------------------------------------------------------------------------------------------------------
_verified: dict[tuple[str, int, int, int], FileCheck] = {}  # path, inode, size, time of the last change


def check_files(folder: Path) -> dict[str, FileCheck]:
    """Size and checksum of every file of `folder` but its description."""
    return {file.name: _check(file) for file in sorted(folder.iterdir()) if file.name != _META}


def damaged_file(folder: Path, expected: dict[str, FileCheck]) -> str | None:
    """What is wrong with the first file that is not as `expected`, or None.

    A file is read once in the life of this process; after that, another size, inode or time of change gives it away.
    """
    for name, check in expected.items():
        file = folder / name
        try:
            facts = file.stat()
            signature = (str(file), facts.st_ino, facts.st_size, facts.st_mtime_ns)
            if facts.st_size != check.nbytes:
                return f"{name} has {facts.st_size} bytes instead of {check.nbytes}"
            if _verified.get(signature) == check:
                continue
            found = _check(file)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != check:
            return f"the checksum of {name} is wrong"
        _verified[signature] = check
    return None


def _check(file: Path) -> FileCheck:
    import google_crc32c

    crc = 0
    with open(file, "rb") as content:
        size = os.fstat(content.fileno()).st_size
        for start, end in _extents(content.fileno(), size):
            crc = google_crc32c.extend(crc, start.to_bytes(8, "little"))
            content.seek(start)
            for position in range(start, end, _CHUNK):
                crc = google_crc32c.extend(crc, content.read(min(_CHUNK, end - position)))
    return FileCheck(size, crc)


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a sparse file that hold something.

    Where a hole begins and ends is the file system's choice (block size), but not for a file that nobody writes to.
    """
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError:  # nothing but a hole is left
            return
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end
        position = end


def _disk_bytes(folder: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for file in folder.iterdir():
            total += file.stat().st_blocks * 512
    return total


@contextlib.contextmanager
def _locked(path: Path, kind: int, *, wait: bool = True) -> Iterator[bool]:
    """Hold a flock on `path`; yields whether it was got. The file stays: removing it would split its holders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, kind | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)
