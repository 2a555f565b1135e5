"""What the newest events say about the engine's processes."""

from __future__ import annotations

from dataclasses import dataclass

from belayer import events as ev
from belayer.events import Event
from belayer.observe._values import text, whole


@dataclass(slots=True)
class EngineState:
    """`worker`, `shadow` and `owner` are states as their events name them, "" before the first one."""

    generation: int | None = None
    worker: str = ""
    shadow: str = ""
    shadow_reason: str = ""
    owner: str = ""
    ready_shadow: int | None = None

    def take(self, event: Event) -> None:
        """Follow one event; those of other parts are passed over."""
        kind, data = event.kind, event.data
        if kind == ev.FAULT_DETECTED:
            if event.subject == "shadow":
                self.shadow, self.shadow_reason, self.ready_shadow = "dead", "", None
            elif event.subject == "worker":
                self.worker = "failed"
        elif kind == ev.OWNER_STATE:
            self.owner = text(data, "state")
        elif kind == ev.SHADOW_STATE:
            self.shadow, self.shadow_reason = text(data, "state"), text(data, "reason")
            self.ready_shadow = whole(data, "generation") if self.shadow == "ready" else None
        elif kind == ev.WORKER_STATE:
            self._worker(text(data, "state"), whole(data, "generation"))

    def _worker(self, name: str, generation: int | None) -> None:
        other = None not in (generation, self.generation) and generation != self.generation
        if self.worker == "serving" and other and name != "serving":
            return  # the end of one that was replaced
        self.worker = name
        self.generation = generation if generation is not None else self.generation
        if name == "serving" and generation is not None and generation == self.ready_shadow:
            self.shadow, self.shadow_reason, self.ready_shadow = "promoted", "", None
