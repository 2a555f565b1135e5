"""Archives: the records that retention took out of a segment, compressed, in a file beside it.

    archive = b"BLYA" u16 format  u16 codec  u64 first-seq  u64 size  u32 crc32c  u32 zero   (32 bytes, little endian)
              then `size` bytes of frames, compressed (codec 1: zlib)

The frames are those of the segment, whole and under their own numbers, so there are gaps between them. The checksum is
that of the compressed bytes, the frames carry their own. An archive never holds anything that the journal needs.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import google_crc32c

from belayer.errors import JournalCorrupt
from belayer.faults import failpoints
from belayer.files import sync_folder
from belayer.journal.framing import FRAME_HEADER, frame, frame_at

MAGIC = b"BLYA"
FORMAT = 1
_ZLIB = 1
_HEADER = struct.Struct("<4sHHQQII")


def beside(segment: Path) -> Path:
    """Where the archive of a segment lies."""
    return segment.with_suffix(".arc")


def read(path: Path) -> dict[int, bytes]:
    """Payloads by sequence number. Raises `JournalCorrupt` when it is missing or damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _damaged(path, "is gone") from None
    if len(data) < _HEADER.size:
        raise _damaged(path, "is cut off")
    magic, version, codec, _, size, checksum, _ = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if magic != MAGIC or version != FORMAT or codec != _ZLIB:
        raise _damaged(path, "is of a kind that this version does not read")
    if google_crc32c.value(body) != checksum:
        raise _damaged(path, "is damaged: its checksum differs")
    try:
        frames = zlib.decompress(body)
    except zlib.error as error:
        raise _damaged(path, f"cannot be decompressed: {error}") from None
    if len(frames) != size:
        raise _damaged(path, "does not have the size that it says")
    found: dict[int, bytes] = {}
    offset = 0
    while offset < len(frames):
        one = frame_at(frames, offset)
        if one is None:
            raise _damaged(path, f"has a damaged record at byte {offset}")
        found[one[0]] = one[1]
        offset += FRAME_HEADER.size + len(one[1])
    return found


def write(path: Path, first_seq: int, payloads: Mapping[int, bytes]) -> None:
    """Replace the archive at `path` in one step, durably. Raises `OSError`."""
    frames = b"".join(frame(seq, payloads[seq]) for seq in sorted(payloads))
    body = zlib.compress(frames, 6)
    header = _HEADER.pack(MAGIC, FORMAT, _ZLIB, first_seq, len(frames), google_crc32c.value(body), 0)
    replace_durably(path, header + body, "journal.archive.written")


def replace_durably(path: Path, content: bytes, failpoint: str) -> None:
    """Write `content` under a temporary name, sync it, give it its name, sync the folder; `failpoint` before the name.

    Unlike `files.write_atomically` the temporary name is known, so that a killed one is found. Raises `OSError`.
    """
    fresh = path.with_name(f"{path.name}.tmp")
    try:
        with open(fresh, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        failpoints.hit(failpoint)
        os.replace(fresh, path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise
    sync_folder(path.parent)


def _damaged(path: Path, how: str) -> JournalCorrupt:
    return JournalCorrupt(
        f"the archive {path} {how}",
        kept="the journal itself, which needs no archive",
        next_step="restore the archive from a copy; without it those results are lost",
    )
