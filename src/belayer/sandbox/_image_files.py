"""Process images as files: describing, verifying and copying them. Nothing of a checkpoint is believed unread."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import google_crc32c

from belayer.checkpoint.manifest import ImageFile
from belayer.errors import CheckpointDamaged
from belayer.faults import failpoints
from belayer.files import sync_folder

BLOCK = 1 << 20
CACHED = 256 << 10  # bytes that are still in the processor's cache when their checksum is taken
IN_FLIGHT = 8 << 20  # bytes written and not yet on the disk; more would make others' fsync wait for ours


def describe_images(folder: Path) -> dict[str, ImageFile]:
    """Size and checksum of each image file."""
    return {path.name: _describe(path) for path in sorted(folder.iterdir()) if _is_image(path)}


def verify_images(folder: Path, expected: dict[str, ImageFile]) -> None:
    """Raises `CheckpointDamaged` unless the folder holds exactly the expected files with the expected content."""
    try:
        names = {path.name for path in folder.iterdir() if _is_image(path)}
        for name in sorted(names ^ set(expected)):
            raise CheckpointDamaged(f"{folder / name} is {'missing' if name in expected else 'not of this checkpoint'}")
        for name, file in expected.items():
            _compare(folder / name, _describe(folder / name), file)
    except OSError as error:
        raise CheckpointDamaged(f"{error.filename or folder} cannot be read: {error.strerror}") from error


def copy_images(source: Path, target: Path, expected: dict[str, ImageFile], pause: Callable[[], None]) -> None:
    """Copy the expected files into the new folder `target`; they are on the disk when this returns. Blocking.

    No more than `IN_FLIGHT` bytes wait for the disk at any moment. `pause` is called between blocks and may wait or
    raise. Raises `CheckpointDamaged` when the source is not what is expected, and `OSError`.
    """
    target.mkdir(parents=True)
    for name, file in expected.items():
        with open(source / name, "rb", buffering=0) as old, open(target / name, "xb", buffering=0) as new:
            found, waiting = ImageFile(0, 0), 0
            while block := old.read(BLOCK):
                pause()
                found = _extended(found, block)
                rest = memoryview(block)
                while rest:
                    rest = rest[new.write(rest) :]
                waiting += len(block)
                if waiting >= IN_FLIGHT:
                    os.fdatasync(new.fileno())
                    waiting = 0
            os.fsync(new.fileno())
        _compare(source / name, found, file)
        failpoints.hit("checkpoint.write.file")
    sync_folder(target)


def sync_images(folder: Path, expected: dict[str, ImageFile], pause: Callable[[], None]) -> None:
    """Make images durable that lie on the disk already, and verify them. Raises `CheckpointDamaged` and `OSError`."""
    for name in expected:
        pause()
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
    verify_images(folder, expected)


def _is_image(path: Path) -> bool:
    return path.suffix == ".img"


def _extended(file: ImageFile, block: bytes) -> ImageFile:
    return ImageFile(file.size + len(block), google_crc32c.extend(file.crc32c, block))


def _describe(path: Path) -> ImageFile:
    checksum = size = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(CACHED):
            checksum = google_crc32c.extend(checksum, block)
            size += len(block)
    return ImageFile(size, checksum)


def _compare(path: Path, found: ImageFile, expected: ImageFile) -> None:
    if found.size != expected.size:
        raise CheckpointDamaged(f"{path} is damaged: it has {found.size} bytes, {expected.size} were written")
    if found.crc32c != expected.crc32c:
        raise CheckpointDamaged(f"{path} is damaged: its checksum is not that of what was written")
