"""Where the time of one recovery goes."""

from __future__ import annotations

import time
from typing import Any


class RecoveryClock:
    """Phases, in seconds, from the detection of a fault until every request has its next token."""

    def __init__(self) -> None:
        self._fault: str | None = None
        self._began = 0.0
        self._last = 0.0
        self._phases: dict[str, float] = {}

    def begin(self, fault: str, detect_s: float | None) -> None:
        """A fault of the serving worker was detected; a second one before `finish` belongs to the same recovery."""
        if self._fault is not None:
            return
        self._fault = fault
        self._began = self._last = time.monotonic()
        self._phases = {} if detect_s is None else {"detect_s": detect_s}

    def mark(self, phase: str) -> None:
        """`phase` ends now; it began where the one before ended."""
        if self._fault is not None:
            now = time.monotonic()
            self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
            self._last = now

    def split(self, parts: dict[str, float], rest: str) -> None:
        """The phase that ends now consisted of `parts`, which were measured elsewhere, and of `rest`."""
        if self._fault is not None:
            now = time.monotonic()
            self._phases |= parts
            self._phases[rest] = max(0.0, now - self._last - sum(parts.values()))
            self._last = now

    def first_token(self) -> None:
        """The first token of any request after the fault."""
        if self._fault is not None and "prefill_s" not in self._phases:
            self.mark("prefill_s")

    def finish(self) -> dict[str, Any] | None:
        """The finished recovery, or None if there was no fault (a first start)."""
        if self._fault is None:
            return None
        self.mark("first_token_s")
        total = self._phases.get("detect_s", 0.0) + self._last - self._began
        result = {"fault": self._fault, "phases": self._phases, "total_s": total}
        self._fault = None
        return result
