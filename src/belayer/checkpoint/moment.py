"""When, within a bubble, to begin: late enough to miss a burst of memory, early enough to fit. Pure logic."""

from __future__ import annotations

import statistics
from collections import deque

BURST = 1.5  # times the usual memory is a burst …
SLACK = 32 << 20  # … if it is more than so many bytes above it
LOOK_S = 0.05


class Moment:
    """Of one rollout: what its memory usually is, and whether to wait for that now."""

    def __init__(self, memory: int = 9) -> None:
        self._seen: deque[float] = deque(maxlen=memory)

    def begun(self, resident: float) -> None:
        """A checkpoint begins with so many bytes resident."""
        self._seen.append(resident)

    @property
    def usual(self) -> float:
        """Bytes; 0 while nothing is known."""
        return statistics.median(self._seen) if self._seen else 0.0

    def hold_s(self, resident: float, passed_s: float, begin_by_s: float) -> float:
        """How long to wait before looking again; 0: begin. `begin_by_s` after the bubble began is the last moment."""
        if not self._seen or resident <= self.usual * BURST + SLACK:
            return 0.0
        return max(0.0, min(LOOK_S, begin_by_s - passed_s))
