"""OpenTelemetry traces: one trace per rollout attempt, its turns, actions and checkpoints below it.

Recoveries of sandboxes are spans in their rollout's trace, those of the engine and optimiser steps are traces of their
own; faults are span events. Where the spans go is said by the standard variables (OTEL_EXPORTER_OTLP_ENDPOINT, …).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from belayer import events as ev
from belayer.errors import ConfigError
from belayer.events import Event
from belayer.observe._values import number, seconds_of, text
from belayer.observe.summary import belayer_version, recovery_of


class OpenTelemetryExporter:
    """Turns events into spans of `provider`; without one, a provider that sends OTLP over HTTP is made.

    Raises `ConfigError` without opentelemetry-sdk (and, where no provider is given, its OTLP exporter).
    """

    def __init__(self, run: str, provider: Any = None) -> None:
        self._own = provider is None
        self._provider = _provider() if provider is None else provider
        self._tracer = self._provider.get_tracer("belayer", belayer_version())
        self._run = run
        self._rollouts: dict[str, Any] = {}

    def __call__(self, event: Event) -> None:
        handle = _HANDLERS.get(event.kind)
        if handle is not None:
            handle(self, event)

    def close(self) -> None:
        """End the open spans and send what is waiting."""
        for span in self._rollouts.values():
            span.set_attribute("belayer.outcome", "in flight")
            span.end()
        self._rollouts.clear()
        if self._own:
            self._provider.shutdown()
        else:
            self._provider.force_flush()

    def _rollout_started(self, event: Event) -> None:
        before = self._rollouts.pop(event.subject, None)
        if before is not None:
            before.end(_ns(event.at))
        self._rollouts[event.subject] = self._tracer.start_span(
            "rollout", context=_root(), start_time=_ns(event.at), attributes=self._about(event)
        )

    def _rollout_ended(self, event: Event) -> None:
        span = self._rollouts.pop(event.subject, None)
        if span is None:
            return
        failed = event.kind == ev.ROLLOUT_FAILED
        span.set_attribute("belayer.outcome", "failed" if failed else "finished")
        span.set_attributes(_attributes(event))
        if failed:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, text(event.data, "reason")))
        span.end(_ns(event.at))

    def _work(self, event: Event) -> None:
        wall = max(0.0, number(event.data, "wall_s") or 0.0)
        start = number(event.data, "start")
        start = event.at - wall if start is None else start
        self._span(_NAMES[event.kind], event, start, start + wall)

    def _recovered(self, event: Event) -> None:
        one = recovery_of(event)
        start = event.at - one.total_s
        span = self._tracer.start_span(
            f"recover {one.what}", context=self._parent(event), start_time=_ns(start), attributes=self._about(event)
        )
        span.set_attribute("belayer.how", one.how)
        from opentelemetry.trace import set_span_in_context

        inside, at = set_span_in_context(span), start
        for phase, seconds in seconds_of(event.data, "phases").items():
            child = self._tracer.start_span(phase.removesuffix("_s"), context=inside, start_time=_ns(at))
            at = min(event.at, at + max(0.0, seconds))
            child.end(_ns(at))
        span.end(_ns(event.at))

    def _fault(self, event: Event) -> None:
        span = self._rollouts.get(event.subject)
        if span is not None:
            span.add_event(event.kind, _attributes(event), _ns(event.at))
        else:
            self._span(event.kind, event, event.at, event.at)

    def _span(self, name: str, event: Event, start: float, end: float) -> None:
        span = self._tracer.start_span(
            name, context=self._parent(event), start_time=_ns(start), attributes=self._about(event)
        )
        span.end(_ns(max(start, end)))

    def _parent(self, event: Event) -> Any:
        from opentelemetry.trace import set_span_in_context

        span = self._rollouts.get(event.subject)
        return _root() if span is None else set_span_in_context(span)

    def _about(self, event: Event) -> dict[str, Any]:
        return {"belayer.run": self._run, "belayer.subject": event.subject, **_attributes(event)}


_NAMES = {ev.GENERATE: "generate", ev.EXEC: "exec", ev.CHECKPOINT: "checkpoint", ev.TRAIN_STEP: "train step"}
_HANDLERS: dict[str, Callable[[OpenTelemetryExporter, Event], None]] = {
    ev.ROLLOUT_STARTED: OpenTelemetryExporter._rollout_started,
    ev.ROLLOUT_FINISHED: OpenTelemetryExporter._rollout_ended,
    ev.ROLLOUT_FAILED: OpenTelemetryExporter._rollout_ended,
    ev.RECOVERED: OpenTelemetryExporter._recovered,
    ev.FAULT_INJECTED: OpenTelemetryExporter._fault,
    ev.FAULT_DETECTED: OpenTelemetryExporter._fault,
    **dict.fromkeys(_NAMES, OpenTelemetryExporter._work),
}


def _attributes(event: Event) -> dict[str, Any]:
    """The event's plain values; `start` and tables are told by the span itself."""
    plain = {key: value for key, value in event.data.items() if isinstance(value, str | bool | int | float)}
    plain.pop("start", None)
    return {f"belayer.{key}": value for key, value in plain.items()}


def _root() -> Any:
    """An empty context: a rollout's trace must not hang below whatever span happens to be current."""
    from opentelemetry.context import Context

    return Context()


def _provider() -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"the exporter opentelemetry lacks a package: {error}", next_step="pip install 'belayer[observe]'"
        ) from None
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over the name given here
    provider = TracerProvider(resource=Resource({"service.name": "belayer"}).merge(Resource.create()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
