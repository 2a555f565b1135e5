"""The journal of one run: the only truth about its rollouts.

`Journal.record` makes a record durable first and applies it to the rollout's history second, so memory is never ahead
of the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from belayer.errors import BelayerError
from belayer.faults import failpoints
from belayer.journal.compaction import Compacted, Retention, compact
from belayer.journal.history import History
from belayer.journal.records import Acknowledged, AnyRecord
from belayer.journal.segments import SEGMENT_BYTES, SegmentWriter, scan


class Journal:
    """The writing side; there is one per run directory, guarded by the run's lock and by its own.

    `retention` says what becomes of acknowledged rollouts' results: whenever a segment is full, in a thread, and at
    `close`. `compacted` is called after each pass, also one that failed (nothing is lost then), from that thread.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durability: str = "process",
        retention: Retention = "keep",
        segment_bytes: int = SEGMENT_BYTES,
        compacted: Callable[[Compacted], None] = lambda _: None,
    ) -> None:
        self.histories: dict[str, History] = {}
        self._retention: Retention = retention
        self._tell = compacted
        self._compaction: threading.Thread | None = None
        self._writer = SegmentWriter(folder, durability=durability, segment_bytes=segment_bytes, seen=self._apply)
        self.torn_bytes = self._writer.torn_bytes

    length = 0
    """Records written by this process or before it; rises with every one."""

    def history(self, rollout: str) -> History:
        """The history of a rollout; an empty one if the journal has not heard of it."""
        if rollout not in self.histories:
            self.histories[rollout] = History(rollout)
        return self.histories[rollout]

    def record(self, record: AnyRecord) -> None:
        """Write `record`, then apply it. Raises `StorageFull` or `JournalError`, and then nothing has changed."""
        failpoints.hit("journal.append.before", record.rollout)
        self.length = self._writer.append(record) + 1
        failpoints.hit("journal.append.after", record.rollout)
        self._apply(record)
        if self._retention != "keep" and self._writer.rotations:
            self._writer.rotations = 0
            self._compact_beside()

    def _apply(self, record: AnyRecord) -> None:
        history = self.history(record.rollout)
        history.apply(record)
        if self._retention != "keep" and isinstance(record, Acknowledged):
            history.forget_results()

    def close(self) -> None:
        """Make everything durable, apply the retention to what is left, and let go of the folder."""
        try:
            if self._compaction is not None:
                self._compaction.join()
            if self._retention != "keep" and not self._writer.closed:
                self._tell(self._compact_all())
        finally:
            self._writer.close()

    # -- retention --------------------------------------------------------------------------------
    def _compact_beside(self) -> None:
        """In a thread; when one runs still, the next full segment or `close` does what it does not."""
        if self._compaction is None or not self._compaction.is_alive():
            work = self._prepare()
            self._compaction = threading.Thread(target=lambda: self._tell(work()), name="belayer-journal", daemon=True)
            self._compaction.start()

    def _compact_all(self) -> Compacted:
        try:
            if not self._writer.empty:
                self._writer.rotate()
            return self._prepare()()
        except BelayerError as error:
            return Compacted(error=error.what)

    def _prepare(self) -> Callable[[], Compacted]:
        """The pass over what is sealed and acknowledged now."""
        self._writer.sync()  # an acknowledgement must not be lost where what it allowed to go is gone
        segments = self._writer.sealed()
        acknowledged = {name for name, history in self.histories.items() if history.acknowledged}

        def work() -> Compacted:
            try:
                return compact(segments, acknowledged, self._retention)
            except (BelayerError, OSError) as error:
                return Compacted(error=error.what if isinstance(error, BelayerError) else str(error))

        return work


def fold(records: Iterable[AnyRecord]) -> dict[str, History]:
    """Histories of all rollouts that `records` mention, in order of first mention."""
    histories: dict[str, History] = {}
    for record in records:
        histories.setdefault(record.rollout, History(record.rollout)).apply(record)
    return histories


def read_histories(folder: Path) -> dict[str, History]:
    """Read a journal without owning it: for reports, comparison and verification."""
    return fold(scan(folder))
