"""The journal: one append-only, durable, ordered record per rollout of what happened."""

from belayer.journal.compare import Comparison, compare_runs
from belayer.journal.history import Call, Checkpoint, History
from belayer.journal.journal import Journal, read_histories
from belayer.journal.records import AnyRecord
from belayer.journal.segments import scan

__all__ = [
    "AnyRecord",
    "Call",
    "Checkpoint",
    "Comparison",
    "History",
    "Journal",
    "compare_runs",
    "read_histories",
    "scan",
]
