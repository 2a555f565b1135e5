"""What a run tells of its own life: what is being started, that it is open, and that nothing was left to do."""

from __future__ import annotations

import time
from collections.abc import Mapping

from belayer import events
from belayer.groups import counting
from belayer.journal import History
from belayer.run_directory import RunDirectory
from belayer.versions import versions


class Announcements:
    """The events of one opened run. `whole`: also those that frame it; else whoever opened it announces it."""

    def __init__(self, sink: events.EventSink, *, whole: bool) -> None:
        self._sink = sink
        self._whole = whole
        self._opened: float | None = None

    def phase(self, name: str) -> None:
        """This begins now: "sandboxes" or "engine"."""
        self._sink(events.Event(kind=events.RUN_PHASE, subject=name))

    def opened(self, directory: RunDirectory) -> None:
        """Rollouts can begin."""
        self._sink(events.Event(kind=events.RUN_PHASE, subject="open"))
        self._opened = time.monotonic()
        if self._whole:
            data = {"seed": directory.about.get("seed"), "resumed": directory.resumed, "versions": versions()}
            self._sink(events.Event(kind=events.RUN_STARTED, data=data))

    def closed(self, histories: Mapping[str, History]) -> None:
        """The program has left the run without an error; if it would get rollouts anew, it has only stopped."""
        every = counting(histories)
        over = all(history.acknowledged or history.failed is not None for history in every)
        if self._whole and self._opened is not None and over:
            data = {"wall_s": time.monotonic() - self._opened, "ok": all(history.acknowledged for history in every)}
            self._sink(events.Event(kind=events.RUN_FINISHED, data=data))
