"""Segment files: append by one writer, scan by anyone.

The writer appends whole frames with one `write` each, so a killed writer leaves at most one torn frame at the very
end. Opening for writing cuts that tail off (it was never acknowledged to anybody) and reports how many bytes it had.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from belayer.errors import RESUME, JournalCorrupt, JournalError, RunInUse, RunVersionMismatch, StorageFull
from belayer.faults import failpoints
from belayer.files import sync_folder
from belayer.journal import archive
from belayer.journal.framing import SEGMENT_HEADER, frame, read_segment, segment_header
from belayer.journal.records import ActionCompleted, AnyRecord, result_gone

SEGMENT_BYTES = 64 << 20
LOCK = "lock"
TEMPORARY = ".tmp"
_decoder = msgspec.msgpack.Decoder(AnyRecord)
_encoder = msgspec.msgpack.Encoder()


def segment_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


def encode(record: AnyRecord) -> bytes:
    """The payload of its frame."""
    return _encoder.encode(record)


def decode(payload: bytes, path: Path, seq: int) -> AnyRecord:
    """Raises `RunVersionMismatch` for a kind of record that only a later version knows, else `JournalCorrupt`."""
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        kind = _kind(payload)
        if kind is not None and kind not in _KINDS:
            raise RunVersionMismatch(
                f"{path}: record {seq} is a {kind}, which this Belayer does not know",
                kept="the journal, untouched",
                next_step="use the version of Belayer that wrote it",
            ) from None
        raise JournalCorrupt(f"{path}: record {seq} cannot be understood: {error}") from None


_KINDS = frozenset(kind.__name__ for kind in AnyRecord.__args__)


def _kind(payload: bytes) -> str | None:
    try:
        found = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError:
        return None
    kind = found.get("type") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else None


def scan(folder: Path, *, archived: bool = False, rollout: str | None = None) -> Iterator[AnyRecord]:
    """Every whole record (of `rollout`), oldest first. Safe beside a live writer: what is not whole is not there yet.

    `archived`: results that retention moved to an archive are put back. Raises `JournalCorrupt` for damage anywhere but
    in the torn tail, then also for damage of an archive.
    """
    held: dict[int, bytes] = {}
    segment: Path | None = None
    for path, seq, _, record in _scan(folder):
        if rollout is not None and record.rollout != rollout:
            continue
        gone = result_gone(record.result) if archived and isinstance(record, ActionCompleted) else None
        if gone is None or not gone.archived:
            yield record
            continue
        if path != segment:
            segment, held = path, archive.read(archive.beside(path))
        if seq not in held:
            where = archive.beside(path)
            raise JournalCorrupt(f"{where}: the result of record {seq} is not in it", kept="the journal itself")
        yield decode(held[seq], path, seq)


def _scan(folder: Path) -> Iterator[tuple[Path, int, int, AnyRecord]]:
    """(segment, seq, end offset, record) of all."""
    expected = 0
    files = segment_files(folder)
    for index, path in enumerate(files):
        last = index == len(files) - 1
        for seq, end, payload in read_segment(path, path.read_bytes(), expected, last=last):
            yield path, seq, end, decode(payload, path, seq)
            expected = seq + 1


class SegmentWriter:
    """Appends records. One writer per folder: it holds a lock on it, which the kernel drops with its holder.

    `durability="host"` makes `append` wait until the record is on disk; with "process" a record survives the death of
    every process, but not of the host. `seen` is called with every record that is there already; without it they are
    kept in `records`. `torn_bytes` is what was cut off when the journal was opened. Raises `RunInUse`, `StorageFull`,
    `JournalCorrupt`, `RunVersionMismatch`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durability: str = "process",
        segment_bytes: int = SEGMENT_BYTES,
        seen: Callable[[AnyRecord], None] | None = None,
    ) -> None:
        self._fd = self._lock_fd = -1
        self._folder = folder
        self._sync = durability == "host"
        self._segment_bytes = segment_bytes
        self.records: list[AnyRecord] = []
        self.torn_bytes = 0
        self.rotations = 0  # segments that became full since somebody set this to 0
        self._failed = ""
        self._seq = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._explain(error) from error
        try:
            self._lock()
            for leftover in folder.glob(f"*{TEMPORARY}"):
                leftover.unlink(missing_ok=True)  # of a compaction that was killed
            self._open(seen or self.records.append)
            if self._sync:
                os.fsync(self._fd)
                sync_folder(folder)
                sync_folder(folder.absolute().parent)
        except BaseException:
            self._let_go()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunInUse(
                f"the journal in {self._folder} has a writer already",
                kept="everything; nothing was touched",
                next_step="wait for it or stop it",
            ) from None

    def _open(self, seen: Callable[[AnyRecord], None]) -> None:
        end: tuple[Path, int] | None = None
        for path, seq, offset, record in _scan(self._folder):
            end = (path, offset)
            self._seq = seq + 1
            seen(record)
        files = segment_files(self._folder)
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

    @property
    def closed(self) -> bool:
        return self._fd < 0

    @property
    def empty(self) -> bool:
        """Has the current segment no record yet?"""
        return self._size <= SEGMENT_HEADER.size

    def sealed(self) -> list[Path]:
        """The segments that are never written to again, oldest first."""
        return segment_files(self._folder)[:-1]

    def rotate(self) -> None:
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
        failpoints.hit("journal.segment.created")
        self._size = 0
        try:
            self._write(segment_header(self._seq))
        except (JournalError, StorageFull):
            os.close(self._fd)
            path.unlink()  # a segment without its header would stand in the way
            raise
        failpoints.hit("journal.segment.headed")
        if self._sync:
            sync_folder(self._folder)

    def append(self, record: AnyRecord) -> int:
        """Write one record and return its sequence number.

        When this returns the record survives SIGKILL of this process. Raises `StorageFull` (nothing of the record is
        kept) or `JournalError`.
        """
        if self._failed:
            raise JournalError(
                f"the journal in {self._folder} stopped after a failed write: {self._failed}",
                kept="every record before it",
                next_step=f"repair the disk, then {RESUME}",
            )
        if self._size >= self._segment_bytes:
            self.rotate()
            self.rotations += 1
        self._write(frame(self._seq, encode(record)))
        self._seq += 1
        if self._sync:
            self.sync()
        return self._seq - 1

    def sync(self) -> None:
        """Return when every record of the current segment survives a reboot. Raises `JournalError`."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            # what is on the disk is unknown now, and asking again would not tell (fsync reports an error once)
            self._failed = str(error)
            raise JournalError(f"the journal in {self._folder} cannot be synced: {error}") from error

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
                next_step=f"make room, then {RESUME}",
            )
        return JournalError(f"the journal in {self._folder} cannot be written: {error}")

    def close(self) -> None:
        if self._fd >= 0:
            os.fdatasync(self._fd)
        self._let_go()

    def _let_go(self) -> None:
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    def __del__(self) -> None:
        self._let_go()  # one that was dropped without `close` must not keep others out
