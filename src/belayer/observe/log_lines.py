"""What a run says in Python's log, under the name "belayer", to a program that does not listen to its events.

Recoveries and rollouts that failed are warnings: something unexpected happened, and the run works on. Python prints
warnings on standard error for a program that has not configured its log. What the start is about, and images of the
engine, is information; `logging.basicConfig(level=logging.INFO)` shows it.
"""

from __future__ import annotations

import logging

from belayer import events as ev
from belayer.events import Event
from belayer.observe._values import duration, number, text
from belayer.observe.live import recovered_line

_log = logging.getLogger("belayer")


class LogLines:
    """An event sink; one for each opened run."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._began: float | None = None
        self._phase_began = 0.0
        self._how = "without an image: one is made in the first minutes, or by `belayer prepare`"

    def __call__(self, event: Event) -> None:
        """Log the line that belongs to `event`, if it is worth one."""
        if event.kind == ev.RECOVERED:
            _log.warning("%s", recovered_line(event))
        elif event.kind == ev.ROLLOUT_FAILED:
            _log.warning("rollout %s failed: %s", event.subject, text(event.data, "reason", "no reason given"))
        elif event.kind == ev.RUN_PHASE:
            self._phase(event)
        elif event.kind == ev.ENGINE_IMAGE:
            self._image(event)

    def _phase(self, event: Event) -> None:
        if self._began is None:
            self._began = self._phase_began = event.at
        took, self._phase_began = duration(event.at - self._phase_began), event.at
        if event.subject == "sandboxes":
            _log.info("%s: preparing sandboxes", self._run_name)
        elif event.subject == "engine":
            said = "%s: sandboxes are ready (%s); starting the engine: a second from an image, else up to a minute"
            _log.info(said, self._run_name, took)
        elif event.subject == "open":
            whole = duration(event.at - self._began)
            _log.info("%s: open after %s; the engine took %s, %s", self._run_name, whole, took, self._how)

    def _image(self, event: Event) -> None:
        match text(event.data, "state"):
            case "restored":
                self._how = "from an image"
            case "building":
                _log.info("engine image: being made in the background, for later starts")
            case "built":
                megabytes = (number(event.data, "nbytes") or 0.0) / (1 << 20)
                _log.info("engine image: made (%.0f MB); later starts take about a second", megabytes)
            case "cut off":
                _log.info("engine image: not finished, the run ended first; `belayer prepare` makes it beforehand")
            case "none" | "refused" | "doubted" as state:
                self._how = "without an image"
                _log.info("engine image: %s: %s", state, text(event.data, "reason"))
