"""Segment files: append by one writer, scan by anyone.

The writer appends whole frames with one `write` each, so a killed writer leaves at most one torn frame at the very
end. Opening for writing cuts that tail off (it was never acknowledged to anybody) and reports how many bytes it had.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from belayer.errors import JournalCorrupt, JournalError, StorageFull
from belayer.journal.framing import SEGMENT_HEADER, frame, read_segment, segment_header
from belayer.journal.records import AnyRecord

SEGMENT_BYTES = 64 << 20
_decoder = msgspec.msgpack.Decoder(AnyRecord)
_encoder = msgspec.msgpack.Encoder()


def segment_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


def scan(folder: Path) -> Iterator[AnyRecord]:
    """Every whole record, oldest first. Safe beside a live writer: what is not whole yet is not there yet.

    Raises `JournalCorrupt` for damage anywhere but in the torn tail.
    """
    for _, record in _scan_with_ends(folder):
        yield record


def _scan_with_ends(folder: Path) -> Iterator[tuple[tuple[Path, int], AnyRecord]]:
    seq = 0
    files = segment_files(folder)
    for index, path in enumerate(files):
        last = index == len(files) - 1
        for seq_here, end, payload in read_segment(path, path.read_bytes(), seq, last=last):
            try:
                record = _decoder.decode(payload)
            except msgspec.DecodeError as error:
                raise JournalCorrupt(f"{path}: record {seq_here} cannot be understood: {error}") from None
            yield (path, end), record
            seq = seq_here + 1


class SegmentWriter:
    """Appends records. There must be one writer per folder; the run directory's lock sees to that.

    `durability="host"` makes `append` wait until the record is on disk; with "process" a record survives the death of
    every process, but not of the host. `torn_bytes` is what was cut off when the journal was opened.
    """

    def __init__(self, folder: Path, *, durability: str = "process", segment_bytes: int = SEGMENT_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._sync = durability == "host"
        self._segment_bytes = segment_bytes
        self.records: list[AnyRecord] = []
        self.torn_bytes = 0
        self._failed = ""
        self._seq = 0
        end: tuple[Path, int] | None = None
        for place, record in _scan_with_ends(folder):
            end = place
            self.records.append(record)
            self._seq += 1
        files = segment_files(folder)
        if files:
            self._continue(files[-1], end)
        else:
            self._new_segment()

    def _continue(self, path: Path, end: tuple[Path, int] | None) -> None:
        keep = end[1] if end and end[0] == path else SEGMENT_HEADER.size
        size = path.stat().st_size
        if size < SEGMENT_HEADER.size:
            # killed between creating the file and writing its header
            self.torn_bytes = size
            path.unlink()
            self._new_segment()
            return
        self.torn_bytes = size - keep
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.ftruncate(self._fd, keep)
        os.lseek(self._fd, keep, os.SEEK_SET)
        self._size = keep

    def _rotate(self) -> None:
        """Go on in a new segment; when that fails, stay in the old one."""
        old_fd, old_size = self._fd, self._size
        try:
            self._new_segment()
        except (JournalError, StorageFull):
            self._fd, self._size = old_fd, old_size
            raise
        os.close(old_fd)

    def _new_segment(self) -> None:
        path = self._folder / f"{self._seq:012d}.seg"
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._explain(error) from error
        self._size = 0
        try:
            self._write(segment_header(self._seq))
        except (JournalError, StorageFull):
            os.close(self._fd)
            path.unlink()  # a segment without its header would stand in the way
            raise
        if self._sync:
            folder_fd = os.open(self._folder, os.O_RDONLY)
            os.fsync(folder_fd)
            os.close(folder_fd)

    def append(self, record: AnyRecord) -> int:
        """Write one record and return its sequence number.

        When this returns the record survives SIGKILL of this process. Raises `StorageFull` (nothing of the record is
        kept) or `JournalError`.
        """
        if self._failed:
            raise JournalError(
                f"the journal in {self._folder} stopped after a failed write: {self._failed}",
                kept="every record before it",
                next_step="repair the disk, then `belayer resume` the run",
            )
        if self._size >= self._segment_bytes:
            self._rotate()
        self._write(frame(self._seq, _encoder.encode(record)))
        self._seq += 1
        if self._sync:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                # what is on the disk is unknown now, and asking again would not tell (fsync reports an error once)
                self._failed = str(error)
                raise JournalError(f"the journal in {self._folder} cannot be synced: {error}") from error
        return self._seq - 1

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._fd, data)
            while written < len(data):  # a short write means that the disk is nearly full; the next one says so
                written += os.write(self._fd, data[written:])
        except OSError as error:
            # take back what was written of it, so that the next append does not land behind a torn frame
            os.ftruncate(self._fd, self._size)
            os.lseek(self._fd, self._size, os.SEEK_SET)
            raise self._explain(error) from error
        self._size += len(data)

    def _explain(self, error: OSError) -> JournalError | StorageFull:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageFull(
                f"no room for the journal in {self._folder}",
                kept="every earlier record",
                next_step="make room, then `belayer resume` the run",
            )
        return JournalError(f"the journal in {self._folder} cannot be written: {error}")

    def close(self) -> None:
        if self._fd >= 0:
            os.fdatasync(self._fd)
            os.close(self._fd)
            self._fd = -1
