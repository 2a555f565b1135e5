"""What a run's configuration asks to have its events sent to: the record, the metrics page and the exporters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from belayer.events import EventSink
from belayer.observe.log_lines import LogLines
from belayer.observe.metrics import MetricsLog, is_recorded

if TYPE_CHECKING:
    from belayer.config import ObserveConfig


_log = logging.getLogger(__name__)


@contextmanager
def open_run_watchers(
    config: ObserveConfig, run_dir: Path, *, logged: bool, served: Callable[[str], None] = lambda url: None
) -> Iterator[list[EventSink]]:
    """Those of `open_watchers`, and the record, unless the program keeps it itself; `logged`: Python's log too.

    Raises what `open_watchers` raises. A record that cannot be opened is said in the log: it costs pictures, not a run.
    """
    with ExitStack() as stack:
        sinks: list[EventSink] = [LogLines(run_dir.name)] if logged else []
        record = run_dir / "metrics.jsonl"
        if config.record and not is_recorded(record):
            try:
                sinks.append(stack.enter_context(MetricsLog(record)))
            except OSError as error:
                _log.warning("no events are recorded: %s cannot be opened: %s", record, error)
        yield [*sinks, *stack.enter_context(open_watchers(config, run_dir, served=served))]


@contextmanager
def open_watchers(
    config: ObserveConfig, run_dir: Path, *, served: Callable[[str], None] = lambda url: None
) -> Iterator[list[EventSink]]:
    """Sinks for the events of the run in `run_dir`, closed at the end; `served` is told the metrics' address.

    Raises `ConfigError` when a package is missing or the port cannot be had.
    """
    with ExitStack() as stack:
        sinks: list[EventSink] = []
        if config.metrics_port is not None:
            from belayer.observe.prometheus import MetricsServer, RunMetrics

            metrics = RunMetrics(run=run_dir.name, journal=run_dir / "journal")
            server = stack.enter_context(MetricsServer(metrics, host=config.metrics_host, port=config.metrics_port))
            served(server.url)
            sinks.append(metrics)
        if config.exporters:
            from belayer.observe.exporters import open_exporter

            sinks += [stack.enter_context(open_exporter(name, run_dir)) for name in dict.fromkeys(config.exporters)]
        yield sinks
