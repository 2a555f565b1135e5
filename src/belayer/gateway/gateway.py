"""The gateway without HTTP: what is served, to whom, and how much at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from belayer.engine import Sampling
from belayer.errors import RequestRefused
from belayer.events import EventSink, ignore
from belayer.gateway._metrics import GatewayMetrics
from belayer.gateway.dialects import Order, Served, View
from belayer.gateway.generation import Generation, Runner
from belayer.gateway.problems import Problem, bad
from belayer.gateway.sessions import Sessions, Turn
from belayer.gateway.settings import GatewaySettings
from belayer.gateway.text import Text
from belayer.gateway.upstream import Upstream
from belayer.journal import Journal


class Gateway:
    """Ties an upstream, a tokenizer and a journal together. Belongs to the event loop that it is made in.

    `seed` decides the seeds of sessions that bring none; `registry` takes the metrics (default: a new one), `sink` what
    happens to sessions.
    """

    def __init__(
        self,
        upstream: Upstream,
        text: Text,
        journal: Journal,
        settings: GatewaySettings,
        *,
        seed: int = 0,
        registry: CollectorRegistry | None = None,
        sink: EventSink = ignore,
    ) -> None:
        self.upstream = upstream
        self.settings = settings
        self.text = text
        self.runner = Runner(upstream, settings.request_timeout_s)
        self.sessions = Sessions(journal, upstream, self.runner, seed, sink)
        self.draining = False
        shown = settings.names or (Path(upstream.model).name,)
        self.served = Served(
            text,
            tuple(dict.fromkeys((*shown, upstream.model))),
            shown,
            upstream.max_model_len,
            settings.sampled_logprobs_only,
        )
        self.metrics = GatewayMetrics(
            registry, in_flight=lambda: self.runner.running, sessions=lambda: len(self.sessions)
        )

    def admit(self, count: int) -> None:
        """Make sure that `count` more completions fit. Raises `Problem`: 429, or 503 while shutting down."""
        if self.draining:
            raise Problem(503, "the gateway is shutting down", code="shutting_down", retry_after_s=2)
        limit = self.settings.max_requests
        if count > limit:
            raise bad(f"{count} completions in one request are more than the {limit} that this gateway takes at once")
        if self.runner.running + count > limit:
            self.metrics.refused.inc()
            raise Problem(
                429, f"{limit} completions are under way; come back later", code="overloaded", retry_after_s=1
            )

    def free(self, order: Order) -> list[View]:
        """Begin the completions of a request that belongs to no session."""
        self.admit(len(order.asks))
        whole = self.upstream.version_policy == "restart_turn"
        made = [Generation(ask.prompt_ids, ask.sampling, whole=whole) for ask in order.asks]
        for generation in made:
            try:
                self.upstream.check(generation.request(0))
            except RequestRefused as error:
                raise _refused(error, order) from None
        for generation, names in zip(made, order.writer.names, strict=True):
            generation.names = names
            self.runner.start(generation)
        return [View(generation, order, self.text) for generation in made]

    def bound(self, order: Order, id: str, *, key: str, strict: bool, retry: bool) -> tuple[list[View], Turn]:
        """Begin, or answer again, the one completion of a request of session `id`, which is made if it is new."""
        if len(order.asks) != 1:
            raise bad(f"session {id} is one rollout: send its completions one by one (n=1, one prompt)", "n")
        ask = order.asks[0]
        before = self.sessions.retries
        try:
            turn, generation = self.sessions.turn(
                id,
                ask.prompt_ids,
                ask.sampling,
                seeded=ask.seeded,
                key=key,
                strict=strict,
                retry=retry,
                admit=lambda: self.admit(1),
            )
        except RequestRefused as error:
            raise _refused(error, order) from None
        generation.names |= order.writer.names[0]
        self.metrics.replayed.inc(self.sessions.retries - before)
        return [View(generation, order, self.text)], turn

    async def health(self) -> dict[str, Any]:
        """What it is doing. Raises `BelayerError` when it cannot serve."""
        self.upstream.check()
        return {"status": "ok", "paused": self.runner.paused, "in_flight": self.runner.running, **self.upstream.state()}

    async def close(self, drain_s: float | None = None) -> None:
        """Refuse what is new, let what is under way end for `drain_s` seconds, cut off the rest."""
        self.draining = True
        await self.runner.close(self.settings.drain_s if drain_s is None else drain_s)


def _refused(error: RequestRefused, order: Order) -> Problem:
    """An upstream's refusal in the client's words: without an id that only the gateway knows, with the parameter."""
    start, colon, rest = error.what.partition(": ")
    reason = rest if colon and start.startswith("request ") else error.what
    if reason.startswith(("token ids", "the prompt")):
        param = order.prompt_name
    else:
        name = reason.partition(" ")[0]
        param = name if name in Sampling.__struct_fields__ else None
    message = f"{reason}; {error.next_step}" if error.next_step else reason
    return Problem(400, message, param=param, code="request_refused")
