"""How a record lies in a segment file.

    segment = b"BLYJ" u16 format  u16 flags  u64 first-seq   (16 bytes, little endian)
    frame   = u32 payload-length  u32 crc32c(length, seq, payload)  u64 seq  payload

Of the flags a reader needs none; `NO_RESULTS` says that retention has nothing more to do in this segment.
`seq` counts the frames of the whole journal from 0 without gaps, so that a lost, repeated or moved frame is seen even
when its own checksum is right. A writer that is killed in the middle of a write leaves a *torn tail*: bytes after the
last whole frame with no whole frame behind them. A bad frame with whole frames behind it is damage, not a torn tail.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import google_crc32c

from belayer.errors import JournalCorrupt, RunVersionMismatch
from belayer.journal.records import FORMAT, READABLE

MAGIC = b"BLYJ"
NO_RESULTS = 1
SEGMENT_HEADER = struct.Struct("<4sHHQ")
FRAME_HEADER = struct.Struct("<IIQ")
_SEALED = struct.Struct("<IQ")
MAX_PAYLOAD = 64 << 20


def segment_header(first_seq: int, flags: int = 0) -> bytes:
    return SEGMENT_HEADER.pack(MAGIC, FORMAT, flags, first_seq)


def frame(seq: int, payload: bytes) -> bytes:
    """One frame, ready to be written with a single write."""
    length = len(payload)
    if length > MAX_PAYLOAD:
        raise ValueError(f"a record of {length} bytes is larger than the limit of {MAX_PAYLOAD}")
    return FRAME_HEADER.pack(length, _checksum(length, seq, payload), seq) + payload


def _checksum(length: int, seq: int, payload: bytes) -> int:
    return google_crc32c.extend(google_crc32c.value(_SEALED.pack(length, seq)), payload)


def frame_at(data: bytes, offset: int) -> tuple[int, bytes] | None:
    """(seq, payload) of the whole, valid frame at `offset`, or None."""
    start = offset + FRAME_HEADER.size
    if start > len(data):
        return None
    length, checksum, seq = FRAME_HEADER.unpack_from(data, offset)
    if length > MAX_PAYLOAD or start + length > len(data):
        return None
    payload = data[start : start + length]
    return (seq, payload) if _checksum(length, seq, payload) == checksum else None


def read_segment(path: Path, data: bytes, expected_seq: int, *, last: bool) -> Iterator[tuple[int, int, bytes]]:
    """Yield (seq, end offset, payload) of every frame of a segment.

    Stops silently at a torn tail if this is the `last` segment: the caller compares the last end offset with the
    file's size. Raises `JournalCorrupt` for any other damage and `RunVersionMismatch` for another format.
    """
    if len(data) < SEGMENT_HEADER.size:
        if last and data[: len(MAGIC)] == MAGIC[: len(data)]:
            return
        if last:
            raise _no_segment(path)
        raise JournalCorrupt(f"{path}: the segment header is cut off", kept="all earlier segments")
    magic, version, _, first_seq = SEGMENT_HEADER.unpack_from(data)
    if magic != MAGIC:
        raise _no_segment(path)
    if version not in READABLE:
        raise RunVersionMismatch(
            f"{path}: journal format {version}, this Belayer reads {' and '.join(map(str, READABLE))}",
            kept="the journal, untouched",
            next_step="use the version of Belayer that wrote it",
        )
    if first_seq != expected_seq:
        raise JournalCorrupt(f"{path}: starts with record {first_seq} where record {expected_seq} must follow")
    offset = SEGMENT_HEADER.size
    while offset < len(data):
        found = frame_at(data, offset)
        if found is None or found[0] != expected_seq:
            if last and found is None and not _any_frame_after(data, offset + 1, expected_seq):
                return
            raise JournalCorrupt(
                f"{path}: record {expected_seq} at byte {offset} is damaged",
                kept=f"all records before {expected_seq}; the file is left as it is",
                next_step="restore the run directory from a copy, or start the run anew",
            )
        seq, payload = found
        offset += FRAME_HEADER.size + len(payload)
        yield seq, offset, payload
        expected_seq += 1


def begins_frame(data: bytes, seq: int) -> bool:
    """Whether the write of record `seq`, cut off somewhere, leaves these bytes."""
    if len(data) < FRAME_HEADER.size:
        return len(data) < 4 or int.from_bytes(data[:4], "little") <= MAX_PAYLOAD
    length, _, found = FRAME_HEADER.unpack_from(data)
    return found == seq and length <= MAX_PAYLOAD and len(data) < FRAME_HEADER.size + length


def _no_segment(path: Path) -> JournalCorrupt:
    return JournalCorrupt(
        f"{path}: this is not a journal segment",
        kept="all earlier segments; the file is left as it is",
        next_step="restore the run directory from a copy, or start the run anew",
    )


def _any_frame_after(data: bytes, offset: int, seq: int) -> bool:
    """Whether a whole frame with a later sequence number starts anywhere at or after `offset`."""
    for at in range(offset, len(data) - FRAME_HEADER.size + 1):
        length, _, found = FRAME_HEADER.unpack_from(data, at)
        # the cheap test first: a checksum at every byte would be quadratic
        if seq <= found <= seq + len(data) and at + FRAME_HEADER.size + length <= len(data) and frame_at(data, at):
            return True
    return False
