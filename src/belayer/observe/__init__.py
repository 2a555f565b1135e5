"""What people see of a run: `metrics.jsonl`, `summary.json`, the live view, `report.html` and `trace.json`.

All of it is fed by events (`belayer.events`); nothing here decides anything. See docs of each module for the formats.
"""

from belayer.observe._values import duration
from belayer.observe.live import LiveView, PlainView, View, open_view
from belayer.observe.metrics import MetricsLog, read_metrics, scan_metrics
from belayer.observe.report import write_report
from belayer.observe.summary import Recovery, RunSummary, Summary, read_summary
from belayer.observe.timeline import write_timeline
from belayer.observe.watchers import open_watchers

__all__ = [
    "LiveView",
    "MetricsLog",
    "PlainView",
    "Recovery",
    "RunSummary",
    "Summary",
    "View",
    "duration",
    "open_view",
    "open_watchers",
    "read_metrics",
    "read_summary",
    "scan_metrics",
    "write_report",
    "write_timeline",
]
