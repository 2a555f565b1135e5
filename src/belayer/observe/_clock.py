"""Run time: seconds that the driver ran, with the pauses between a crash and its resume taken out."""

from __future__ import annotations

from belayer import events as ev
from belayer.events import Event


class RunClock:
    """Maps events, in the order of the file, to run time.

    A session (one life of the driver) begins with the first event after a start: `run.started` comes later, when the
    engine is up. What follows `run.finished` (the comparison with another run) takes no run time.
    """

    def __init__(self) -> None:
        self.length = 0.0
        self.sessions = 0
        self.resumes: list[float] = []
        self.finished = False
        self._begun: float | None = None
        self._shift = 0.0
        self._announced = False

    def close_session(self) -> None:
        """The next event comes from another driver."""
        self._begun, self._announced = None, False

    def __call__(self, event: Event) -> float:
        """Run time of `event`; advances the clock."""
        if event.kind == ev.LOG_CONTINUED:
            self.close_session()
            return self.length
        if event.kind == ev.RUN_STARTED:
            if self._announced or self.finished:
                self.close_session()
            self.finished, self._announced = False, True
        if self.finished:
            return self.length
        if self._begun is None:
            self._begun, self._shift = event.at, self.length
            self.sessions += 1
            if self.sessions > 1:
                self.resumes.append(self._shift)
        now = max(0.0, event.at - self._begun) + self._shift
        self.length = max(self.length, now)
        if event.kind == ev.RUN_FINISHED:
            self.finished = True
        return now
