"""Noticing a worker that neither works nor dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from belayer.engine.workers.link import WorkerLink
from belayer.engine.workers.progress import Phase


class HangDetector:
    """Watches the step counter of the worker that has work. Frozen past the deadline of what it is doing: a hang.

    An idle worker is never suspected. What a loaded machine does is not held against the worker: neither the time that
    the check itself was late (this process was stopped, or its loop was blocked), nor the time in which one of the
    worker's threads could have run and waited for a processor. A worker that is stopped or stuck waits for none.

    The second suspicion in a row takes twice as long, and so on up to `PATIENCE` times, until a worker has made
    `HEALTHY` steps: a deadline that is too short for this machine is not to kill one worker after the other.
    """

    PATIENCE = 8
    HEALTHY = 32

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
        self._waited: dict[str, float] = {}  # of its threads, since the counter stands still
        self._in_row = 0
        self._born: tuple[int, int] = (-1, 0)  # generation, its steps when it was first seen
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
            if self._born[0] != link.generation:
                self._born = seen
            elif steps - self._born[1] >= self.HEALTHY:
                self._in_row = 0
            self._seen, self._since, self._waited = seen, now, {}
            return
        self._since += late
        frozen = now - self._since
        limit_s = self._limits.get(phase, self._decode_s) * min(2**self._in_row, self.PATIENCE)
        if frozen > limit_s / 2:  # until then nobody needs to know
            waited = waited_for_processors(link.child.pid)
            if not self._waited:
                self._waited = waited
            starved = max((s - self._waited.get(thread, s) for thread, s in waited.items()), default=0.0)
        else:
            starved = 0.0
        # one that turns in a circle waits for a processor too: that is no excuse for ever
        if frozen - starved > limit_s or frozen > limit_s * self.PATIENCE:
            self._seen = None
            self._in_row += 1
            self._on_hang(link, frozen, phase.name.lower())


def waited_for_processors(pid: int) -> dict[str, float]:
    """Seconds that each thread of a process has been ready to run without a processor; empty where nobody counts."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):
            found[path.parent.name] = int(path.read_text().split()[1]) / 1e9
    return found
