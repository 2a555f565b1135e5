"""The journal: one append-only, durable, ordered record per rollout of what happened."""

from belayer.journal.compaction import Compacted, Retention
from belayer.journal.compare import Comparison, compare_runs
from belayer.journal.history import Call, Checkpoint, History
from belayer.journal.journal import Journal, read_histories
from belayer.journal.records import AnyRecord, Gone, result_gone
from belayer.journal.segments import scan
from belayer.journal.tail import Tail, read_tail

__all__ = [
    "AnyRecord",
    "Call",
    "Checkpoint",
    "Compacted",
    "Comparison",
    "Gone",
    "History",
    "Journal",
    "Retention",
    "Tail",
    "compare_runs",
    "read_histories",
    "read_tail",
    "result_gone",
    "scan",
]
