"""A queue and a thread between the run and a sink that may be slow, blocked or broken."""

from __future__ import annotations

import logging
import queue
import threading
from types import TracebackType
from typing import Protocol

from belayer.events import Event

_log = logging.getLogger(__name__)
_QUEUE = 10_000


class ClosableSink(Protocol):
    """An event sink with an end; called from one thread only."""

    def __call__(self, event: Event) -> None: ...
    def close(self) -> None: ...


class Background:
    """Hands events to `sink` on a thread of its own.

    `dropped` counts the events that found the queue full, `failed` those that the sink raised on; the first of each is
    logged when it happens, the totals at the end.
    """

    def __init__(self, name: str, sink: ClosableSink) -> None:
        self.name = name
        self.dropped = 0
        self.failed = 0
        self._sink = sink
        self._queue: queue.Queue[Event | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._work, name=f"belayer-{name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Take one event; never blocks and never raises."""
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                _log.warning("%s is too slow: events are left out there", self.name)

    def close(self, timeout_s: float = 20.0) -> None:
        """Give the sink what is queued and close it, within `timeout_s`; past that it is left behind."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            _log.warning("%s did not take its last events within %.0f s", self.name, timeout_s)
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("%s did not finish within %.0f s; what it held may be missing there", self.name, timeout_s)
        if self.dropped or self.failed:
            _log.warning("%s lacks %d events (queue full) and failed on %d", self.name, self.dropped, self.failed)

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._sink(event)
            except Exception as error:
                self._fail(error)
        try:
            self._sink.close()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failed += 1
        if self.failed == 1:
            _log.warning("%s failed: %s: %s", self.name, type(error).__name__, error)
