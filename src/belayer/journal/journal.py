"""The journal of one run: the only truth about its rollouts.

`Journal.record` makes a record durable first and applies it to the rollout's history second, so memory is never ahead
of the disk.
"""

from __future__ import annotations

from pathlib import Path

from belayer.faults import failpoints
from belayer.journal.history import History
from belayer.journal.records import AnyRecord
from belayer.journal.segments import SegmentWriter, scan


class Journal:
    """The writing side; there is one per run directory, guarded by the run's lock."""

    def __init__(self, folder: Path, *, durability: str = "process") -> None:
        self._writer = SegmentWriter(folder, durability=durability)
        self.histories = fold(self._writer.records)
        self._writer.records = []
        self.torn_bytes = self._writer.torn_bytes

    def history(self, rollout: str) -> History:
        """The history of a rollout; an empty one if the journal has not heard of it."""
        if rollout not in self.histories:
            self.histories[rollout] = History(rollout)
        return self.histories[rollout]

    def record(self, record: AnyRecord) -> None:
        """Write `record`, then apply it. Raises `StorageFull` or `JournalError`, and then nothing has changed."""
        failpoints.hit("journal.append.before", record.rollout)
        self._writer.append(record)
        failpoints.hit("journal.append.after", record.rollout)
        self.history(record.rollout).apply(record)

    def close(self) -> None:
        self._writer.close()


def fold(records: list[AnyRecord]) -> dict[str, History]:
    """Histories of all rollouts that `records` mention, in order of first mention."""
    histories: dict[str, History] = {}
    for record in records:
        histories.setdefault(record.rollout, History(record.rollout)).apply(record)
    return histories


def read_histories(folder: Path) -> dict[str, History]:
    """Read a journal without owning it: for reports, comparison and verification."""
    return fold(list(scan(folder)))
