"""What arrived when: a sink that can kill the engine's worker on the way, and a watch on the engine's events."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from belayer import events as ev
from belayer.engine import Engine, GenerationRequest, TokenChunk

KILL_AT = 12  # tokens that every request has when the signal is sent


class Watch:
    """Moments of the newest fault and the newest recovery, from the engine's events. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.detected_at = 0.0
        self.promoted_at = 0.0
        self.armed_at = 0.0
        self.phases: dict[str, float] = {}
        self.how = ""
        self.warm_up_s = 0.0

    def __call__(self, event: ev.Event) -> None:
        now = time.monotonic()
        if event.kind == ev.FAULT_DETECTED and event.subject == "worker":
            self.detected_at = now
        elif event.kind == ev.WORKER_STATE and event.data["state"] == "serving":
            self.promoted_at = now
        elif event.kind == ev.WORKER_STATE and event.data["state"] == "ready":
            self.warm_up_s = event.data["phases"].get("warm_up_s", 0.0)
        elif event.kind == ev.SHADOW_STATE and event.data["state"] == "ready":
            self.armed_at = now
        elif event.kind == ev.RECOVERED:
            self.phases, self.how = event.data["phases"], event.data["how"]


class Tape:
    """Keeps every chunk with its time; given an engine, it kills its worker once, in the middle of decoding."""

    def __init__(
        self,
        tokens: dict[str, list[int]] | None = None,
        logprobs: dict[str, list[float]] | None = None,
        *,
        kill: Engine | None = None,
    ) -> None:
        self.tokens = {key: list(ids) for key, ids in (tokens or {}).items()}
        self.logprobs = {key: list(values) for key, values in (logprobs or {}).items()}
        self.first: dict[str, float] = {}
        self.killed_at = 0.0
        self.tokens_at_kill: dict[str, list[int]] = {}
        self.logprobs_at_kill: dict[str, list[float]] = {}
        self.recovered: dict[str, float] = {}  # first token from another generation than the killed one
        self.expected: list[str] = []
        self._duplicated = 0
        self._engine = kill
        self._victim: int | None = None

    def __call__(self, chunk: TokenChunk) -> None:
        self.add(chunk.request_id, chunk.start, chunk.token_ids, chunk.logprobs)

    def add(self, key: str, start: int, token_ids: list[int], logprobs: list[float]) -> None:
        now = time.monotonic()
        tokens = self.tokens.setdefault(key, [])
        self._duplicated += max(0, len(tokens) - start)
        tokens += token_ids
        self.logprobs.setdefault(key, []).extend(logprobs)
        self.first.setdefault(key, now)
        if self._engine is None:
            return
        if self._victim is None:
            if all(len(self.tokens.get(name, ())) >= KILL_AT for name in self.expected):
                self._kill(self._engine)
        elif self._engine.worker_generation != self._victim:
            self.recovered.setdefault(key, now)

    def _kill(self, engine: Engine) -> None:
        assert engine.worker_pid is not None
        self._victim = engine.worker_generation
        self.tokens_at_kill = {key: list(ids) for key, ids in self.tokens.items()}
        self.logprobs_at_kill = {key: list(values) for key, values in self.logprobs.items()}
        self.killed_at = time.monotonic()
        os.kill(engine.worker_pid, signal.SIGKILL)

    @property
    def recovery_s(self) -> float:
        """From the signal until every request has a token of the next worker."""
        return max(self.recovered.values()) - self.killed_at

    def compare(self, reference: Tape) -> dict[str, int]:
        """How many tokens or logprobs differ from the undisturbed run, and how."""
        found = {"tokens_lost": 0, "tokens_duplicated": self._duplicated, "tokens_changed": 0, "logprobs_changed": 0}
        for key, wanted in reference.tokens.items():
            got = self.tokens.get(key, [])
            found["tokens_lost"] += max(0, len(wanted) - len(got))
            found["tokens_duplicated"] += max(0, len(got) - len(wanted))
            found["tokens_changed"] += sum(a != b for a, b in zip(wanted, got, strict=False))
            pairs = zip(reference.logprobs[key], self.logprobs.get(key, []), strict=False)
            found["logprobs_changed"] += sum(a != b for a, b in pairs)
        return found


async def run(engine: Engine, requests: list[GenerationRequest], tape: Tape) -> Tape:
    """All requests at once, to their end."""
    tape.expected = [request.id for request in requests]
    await asyncio.gather(*(engine.generate(request, tape) for request in requests))
    return tape
