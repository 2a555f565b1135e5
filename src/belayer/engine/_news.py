"""What the fleet tells the outside world: faults that were noticed, how each process stands, and each recovery."""

from __future__ import annotations

from typing import Any

from belayer import events as ev
from belayer.engine._recovery_clock import RecoveryClock
from belayer.engine._wire import Adopted
from belayer.engine.workers.link import WorkerLink


class News:
    """Turns what happens into events for `sink`; `clock` measures the recovery that they belong to."""

    def __init__(self, sink: ev.EventSink) -> None:
        self._sink = sink
        self.clock = RecoveryClock()

    def fault(self, fault: str, how: str, text: str, serving: bool, detect_s: float | None = None) -> None:
        """`fault` (`worker.exit`) was noticed by `how`. `serving`: it hit the worker that serves, a recovery begins.

        `detect_s`: seconds from the fault until it was noticed, where that is known.
        """
        data: dict[str, Any] = {"fault": fault, "how": how, "reason": text}
        if detect_s is not None:
            data["detect_s"] = detect_s
        self._say(ev.FAULT_DETECTED, fault.split(".")[0], data)
        if serving:
            self.clock.begin(fault, detect_s)

    def process(self, link: WorkerLink, state: str, phases: dict[str, float] | None = None) -> None:
        """A worker or shadow has come to `state`; `phases` are the seconds that its start was made of."""
        kind = ev.WORKER_STATE if link.role == "worker" else ev.SHADOW_STATE
        data: dict[str, Any] = {"generation": link.generation, "pid": link.child.pid, "state": state}
        self._say(kind, link.role, data | ({"phases": phases} if phases else {}))

    def recovered(self, how: str) -> None:
        """Every request has its next token; nothing is said at a first start, which recovers nothing."""
        if (recovery := self.clock.finish()) is not None:
            self._say(ev.RECOVERED, "worker", {"what": "worker", "how": how, **recovery})

    def dropped(self, generation: int, count: int) -> None:
        """A fenced worker had sent `count` tokens more, which nobody gets."""
        self._say(ev.STALE_DROPPED, "worker", {"generation": generation, "count": count})

    def adopted(self, told: Adopted) -> None:
        """A worker has taken over sealed KV blocks; those that it refused are a fault of their own."""
        data = {
            "generation": told.generation,
            "blocks": told.blocks,
            "tokens": told.tokens,
            "refused": told.refused,
        }
        self._say(ev.KV_ADOPTED, "worker", data)
        if told.refused:
            text = f"{told.refused} sealed KV blocks have other bytes than their seals say: they are rebuilt"
            self.fault("worker.seal", "checksum", text, False)

    def _say(self, kind: str, subject: str, data: dict[str, Any]) -> None:
        self._sink(ev.Event(kind=kind, subject=subject, data=data))
