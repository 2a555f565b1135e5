"""How far a long bench is, on stderr: one line a step, with the time that the rest is expected to take."""

from __future__ import annotations

import sys
import time


class Eta:
    """Call it after every one of `steps` equal steps."""

    def __init__(self, what: str, steps: int) -> None:
        self._what, self._steps = what, steps
        self._done = 0
        self._began = time.monotonic()

    def __call__(self, note: str = "") -> None:
        self._done += 1
        taken = time.monotonic() - self._began
        left = taken / self._done * (self._steps - self._done)
        end = f"about {left:.0f} s left" if self._done < self._steps else f"took {taken:.0f} s"
        print(f"{self._what}: {self._done} of {self._steps}, {end}{f'; {note}' if note else ''}", file=sys.stderr)
