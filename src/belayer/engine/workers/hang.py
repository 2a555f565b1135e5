"""Noticing a worker that neither works nor dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from belayer.engine.workers.link import WorkerLink
from belayer.engine.workers.progress import Phase


class HangDetector:
    """Watches the step counter of the worker that has work. Frozen past the deadline of what it is doing: a hang.

    An idle worker is never suspected. A late check (this process was stopped, or its loop was blocked) is not held
    against the worker: the time that the check itself was late does not count.
    """

    def __init__(
        self,
        decode_s: float,
        prefill_s: float,
        watched: Callable[[], WorkerLink | None],
        on_hang: Callable[[WorkerLink, float, str], None],
    ) -> None:
        self._limits = {Phase.PREFILL: prefill_s, Phase.STARTING: prefill_s}
        self._decode_s = decode_s
        self._interval = min(decode_s, prefill_s) / 4
        self._watched = watched
        self._on_hang = on_hang
        self._seen: tuple[int, int] | None = None  # generation, step counter
        self._since = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._due = time.monotonic() + self._interval
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._check)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        now = time.monotonic()
        late = max(0.0, now - self._due)
        self.start()
        link = self._watched()
        if link is None:
            self._seen = None
            return
        steps, phase = link.progress.read()
        seen = (link.generation, steps)
        if seen != self._seen:
            self._seen, self._since = seen, now
            return
        self._since += late
        frozen = now - self._since
        if frozen > self._limits.get(phase, self._decode_s):
            self._seen = None
            self._on_hang(link, frozen, phase.name.lower())
