"""Stops a run whose environments keep failing, instead of letting it burn every rollout's budget in turn."""

from __future__ import annotations

from belayer.errors import RESUME, CircuitOpen


class CircuitBreaker:
    """Counts environment failures since the last completed action of the whole run.

    One failing rollout among healthy ones never opens it: their progress resets the count.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._streak = 0
        self._first = ""

    def success(self) -> None:
        self._streak = 0

    def failure(self, why: str) -> None:
        """Count one; raises `CircuitOpen` with the first reason of the streak when the limit is passed."""
        if self._streak == 0:
            self._first = why
        self._streak += 1
        if self._streak > self._limit:
            raise CircuitOpen(
                f"{self._streak} environment failures in a row without one completed action; the first: {self._first}",
                kept="the journal; finished rollouts stay finished",
                next_step=f"`belayer doctor` shows what this host can do; then {RESUME}",
            )
