"""Writing whole files: readers see the old content or the new one, never a part."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from belayer.errors import StorageFull


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` in one step, so that a reader or a crash, of the host too, sees the old file or the new one.

    Raises `StorageFull` when there is no room (the old file is kept) and `OSError` for other failures.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no room to write {path}", kept="the file as it was before", next_step="free space and write it again"
            ) from error
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a crash of the host."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder_durably(folder: Path) -> None:
    """`mkdir -p` whose every new name survives a crash of the host."""
    missing = []
    place = folder.absolute()
    while not place.exists():
        missing.append(place)
        place = place.parent
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)
