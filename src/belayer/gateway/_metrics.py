"""What the gateway counts, in Prometheus' form."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class GatewayMetrics:
    """One per gateway; `registry` may hold metrics of others too, and is a new one if None."""

    def __init__(
        self, registry: CollectorRegistry | None, *, in_flight: Callable[[], float], sessions: Callable[[], float]
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        prefix = "belayer_gateway"
        self.requests = Counter(
            f"{prefix}_requests",
            "Requests answered, by route and HTTP status",
            ["route", "status"],
            registry=self.registry,
        )
        self.tokens = Counter(f"{prefix}_tokens", "Tokens generated", registry=self.registry)
        self.stream_errors = Counter(
            f"{prefix}_stream_errors", "Streams that ended with an error object", registry=self.registry
        )
        self.disconnects = Counter(
            f"{prefix}_disconnects", "Clients that went away before their answer was complete", registry=self.registry
        )
        self.replayed = Counter(
            f"{prefix}_retries_answered", "Requests of a session answered by an earlier turn", registry=self.registry
        )
        self.refused = Counter(f"{prefix}_overloaded", "Requests refused with 429", registry=self.registry)
        self.duration = Histogram(
            f"{prefix}_request_seconds",
            "Time from a request to its complete answer",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        Gauge(f"{prefix}_in_flight", "Completions under way", registry=self.registry).set_function(in_flight)
        Gauge(f"{prefix}_sessions", "Sessions known", registry=self.registry).set_function(sessions)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
