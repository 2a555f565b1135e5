"""Stops a run in which nothing happens any more, instead of letting it wait for ever.

Every wait of Belayer has a deadline of its own. This is for the one that was forgotten, and for a rollout function that
waits for something which never comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from belayer.errors import RESUME, NoProgress

SHOWN = 12  # rollouts that the error names


class ProgressWatchdog:
    """Looks at a number that rises with every step of progress; `check` is called now and then.

    `limit_s`: how long it may stand still while there is work. `clock` gives seconds and never goes back.
    """

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._mark = -1
        self._since = clock()

    @property
    def look_every_s(self) -> float:
        """How often `check` is to be called, such that a stop is noticed soon after the limit."""
        return min(1.0, self._limit_s / 10)

    def check(self, mark: int, working: bool, patience_s: float, standing: Callable[[], Sequence[str]]) -> None:
        """`mark`: the number; `working`: whether anything is to be expected at all.

        `patience_s` is what the longest command under way may still take by its own limit. `standing` says where each
        rollout is. Raises `NoProgress` when the number has stood still for too long.
        """
        now = self._clock()
        if mark != self._mark or not working:
            self._mark, self._since = mark, now
            return
        idle_s = now - self._since
        if idle_s <= self._limit_s + patience_s:
            return
        places = list(standing())
        more = f"\n  and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        raise NoProgress(
            f"nothing was journalled for {idle_s:.0f} s although {len(places)} rollouts are under way "
            f"(recovery.no_progress_s = {self._limit_s:g}):\n  " + "\n  ".join(places[:SHOWN]) + more,
            kept="the journal; finished rollouts stay finished",
            next_step=f"look at what they wait for, then {RESUME}",
        )
