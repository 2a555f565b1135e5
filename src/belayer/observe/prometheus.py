"""Prometheus metrics of a run, fed by its events.

`RunMetrics` is an event sink with a registry that others may share: the gateway registers its own metrics in the same
one, so that a process has one page. Label values come from small closed sets; past 32 of a label they are "other".
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from belayer import errors
from belayer import events as ev
from belayer.errors import ConfigError
from belayer.events import Event
from belayer.observe._engine_state import EngineState
from belayer.observe._metric_table import METRICS, PREFIX, Metric
from belayer.observe._values import number, seconds_of, text, whole
from belayer.observe.summary import belayer_version, checkpoint_times, recovery_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_log = logging.getLogger(__name__)
_VALUES = 32  # different values of one label


class RunMetrics:
    """An event sink that keeps the metrics of `_metric_table.METRICS` in `registry` (default: a new one).

    `journal` is the folder whose size is `belayer_journal_bytes`. Raises `ConfigError` without prometheus-client.
    """

    def __init__(
        self, *, run: str = "", journal: Path | None = None, registry: CollectorRegistry | None = None
    ) -> None:
        client = _client()
        self.registry = client.CollectorRegistry() if registry is None else registry
        if registry is None:
            client.ProcessCollector(registry=self.registry)
            client.PlatformCollector(registry=self.registry)
        self._families = {metric.name: _family(client, metric, self.registry) for metric in METRICS}
        self._labels: dict[str, set[str]] = {}
        self._engine = EngineState()
        self._open: set[str] = set()
        self._set("run_info", 1, run=run, version=belayer_version())
        self._families["journal_bytes"].set_function(lambda: _size(journal))

    def __call__(self, event: Event) -> None:
        """Count one event; a few microseconds, and any thread may call it."""
        handle = _HANDLERS.get(event.kind)
        if handle is not None:
            handle(self, event)
        if event.kind in _ENGINE:
            self._engine_moved(event)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type, in the format that an `Accept` header asks for."""
        encode, content_type = _client().exposition.choose_encoder(accept)
        return encode(self.registry), content_type

    # -- helpers -------------------------------------------------------------------------------------------------------
    def _of(self, name: str, **labels: str) -> Any:
        family = self._families[name]
        if not labels:
            return family
        return family.labels(**{key: self._bounded(f"{name}/{key}", value) for key, value in labels.items()})

    def _bounded(self, key: str, value: str) -> str:
        value = value.encode("utf-8", "replace").decode()  # a lone surrogate would break the whole page
        seen = self._labels.setdefault(key, set())
        if value not in seen:
            if len(seen) >= _VALUES:
                return "other"
            seen.add(value)
        return value

    def _add(self, name: str, amount: float = 1, **labels: str) -> None:
        self._of(name, **labels).inc(max(0.0, amount))

    def _set(self, name: str, value: float | None, **labels: str) -> None:
        if value is not None:
            self._of(name, **labels).set(value)

    def _time(self, name: str, seconds: float | None, **labels: str) -> None:
        if seconds is not None:
            self._of(name, **labels).observe(max(0.0, seconds))

    # -- run and rollouts ----------------------------------------------------------------------------------------------
    def _run_started(self, event: Event) -> None:
        self._set("run_active", 1)
        self._set("train_steps_planned", number(event.data, "steps"))

    def _run_finished(self, event: Event) -> None:
        # the engine and the sandboxes are closed by then, and say nothing more
        for name in ("run_active", "engine_serving", "engine_standby_armed", "engine_owner_up", "sandboxes_running"):
            self._set(name, 0)

    def _step(self, event: Event) -> None:
        self._add("train_steps_total")
        self._set("train_reward_mean", number(event.data, "reward_mean"))
        self._time("train_step_duration_seconds", number(event.data, "wall_s"))

    def _rollout_started(self, event: Event) -> None:
        self._add("rollouts_started_total")
        if whole(event.data, "attempt"):
            self._add("rollouts_retried_total")
        self._open.add(event.subject)
        self._set("rollouts_in_flight", len(self._open))

    def _rollout_ended(self, event: Event) -> None:
        self._open.discard(event.subject)
        self._set("rollouts_in_flight", len(self._open))
        if event.kind == ev.ROLLOUT_FINISHED:
            self._add("rollouts_finished_total")
            self._time("rollout_duration_seconds", number(event.data, "wall_s"))
        else:
            failure = text(event.data, "failure")
            known = failure in vars(errors)
            self._add("rollouts_failed_total", failure=failure if known else "user function")

    def _rollout_delivered(self, event: Event) -> None:
        self._add("rollouts_delivered_total")

    def _truncated(self, event: Event) -> None:
        self._add("rollouts_truncated_total")

    def _turn(self, event: Event) -> None:
        self._add("turns_total")
        self._add("tokens_generated_total", number(event.data, "tokens") or 0)
        self._time("turn_duration_seconds", number(event.data, "wall_s"))

    def _action(self, event: Event) -> None:
        code = event.data.get("exit_code")
        self._add("actions_total", outcome="none" if code is None else "failed" if code else "ok")
        self._time("action_duration_seconds", number(event.data, "wall_s"))

    # -- checkpoints ---------------------------------------------------------------------------------------------------
    def _checkpoint(self, event: Event) -> None:
        wall, exposed = checkpoint_times(event)
        self._add("checkpoints_published_total", level=text(event.data, "level", "unknown"))
        self._add("checkpoint_hidden_seconds_total", wall - exposed)
        self._add("checkpoint_exposed_seconds_total", exposed)
        self._time("checkpoint_duration_seconds", wall)
        self._time("checkpoint_frozen_seconds", number(event.data, "frozen_s"))
        self._add("checkpoint_bytes_total", number(event.data, "bytes") or 0)

    def _no_checkpoint(self, event: Event) -> None:
        self._add("checkpoints_abandoned_total" if event.data.get("abandoned") else "checkpoints_skipped_total")

    def _durable(self, event: Event) -> None:
        self._add("checkpoint_durable_bytes_total", number(event.data, "bytes") or 0)

    # -- faults, engine, sandboxes -------------------------------------------------------------------------------------
    def _injected(self, event: Event) -> None:
        self._add("faults_injected_total", fault=text(event.data, "fault", "unnamed"))

    def _detected(self, event: Event) -> None:
        self._add("faults_detected_total", fault=text(event.data, "fault", "unnamed"))

    def _recovered(self, event: Event) -> None:
        one = recovery_of(event)
        self._add("recoveries_total", part=one.what, how=one.how)
        self._time("recovery_duration_seconds", one.total_s, part=one.what, how=one.how)
        for phase, seconds in seconds_of(event.data, "phases").items():
            self._time("recovery_phase_seconds", seconds, part=one.what, phase=phase.removesuffix("_s"))
        self._add("actions_replayed_total", number(event.data, "replayed") or 0)

    def _engine_moved(self, event: Event) -> None:
        self._engine.take(event)
        self._set("engine_serving", self._engine.worker == "serving")
        self._set("engine_generation", self._engine.generation)
        self._set("engine_standby_armed", self._engine.shadow == "ready")
        self._set("engine_owner_up", self._engine.owner in ("started", "ready", "serving"))

    def _weights(self, event: Event) -> None:
        self._set("engine_weights_epoch", number(event.data, "epoch"))
        self._set("engine_policy_version", number(event.data, "policy_version"))
        self._time("engine_weights_update_seconds", number(event.data, "wall_s"))

    def _stale(self, event: Event) -> None:
        self._add("engine_stale_dropped_total", number(event.data, "count") or 1)

    def _adopted(self, event: Event) -> None:
        self._add("engine_adopted_blocks_total", number(event.data, "blocks") or 0)

    def _sandboxes(self, event: Event) -> None:
        self._set("sandboxes_running", number(event.data, "count"))


_ENGINE = (ev.WORKER_STATE, ev.SHADOW_STATE, ev.OWNER_STATE, ev.FAULT_DETECTED)
_HANDLERS: dict[str, Callable[[RunMetrics, Event], None]] = {
    ev.RUN_STARTED: RunMetrics._run_started,
    ev.RUN_FINISHED: RunMetrics._run_finished,
    ev.TRAIN_STEP: RunMetrics._step,
    ev.ROLLOUT_STARTED: RunMetrics._rollout_started,
    ev.ROLLOUT_FINISHED: RunMetrics._rollout_ended,
    ev.ROLLOUT_FAILED: RunMetrics._rollout_ended,
    ev.ROLLOUT_DELIVERED: RunMetrics._rollout_delivered,
    ev.ROLLOUT_TRUNCATED: RunMetrics._truncated,
    ev.GENERATE: RunMetrics._turn,
    ev.EXEC: RunMetrics._action,
    ev.CHECKPOINT: RunMetrics._checkpoint,
    ev.CHECKPOINT_SKIPPED: RunMetrics._no_checkpoint,
    ev.CHECKPOINT_DURABLE: RunMetrics._durable,
    ev.FAULT_INJECTED: RunMetrics._injected,
    ev.FAULT_DETECTED: RunMetrics._detected,
    ev.RECOVERED: RunMetrics._recovered,
    ev.WEIGHTS_COMMITTED: RunMetrics._weights,
    ev.STALE_DROPPED: RunMetrics._stale,
    ev.KV_ADOPTED: RunMetrics._adopted,
    ev.SANDBOXES_RUNNING: RunMetrics._sandboxes,
}


class MetricsServer:
    """Serves `metrics` at `url` from a thread of its own until it is closed. A context manager.

    Loopback unless told otherwise; no secrets are on the page, and whoever reaches it may read it. Port 0 takes a free
    one. Raises `ConfigError` when the address cannot be had.
    """

    def __init__(self, metrics: RunMetrics, *, host: str = "127.0.0.1", port: int = 0) -> None:
        try:
            self._server, self._thread = _client().start_http_server(port, addr=host, registry=metrics.registry)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise ConfigError(
                f"metrics cannot be served at {host} port {port}: {error.strerror or error}",
                next_step="choose another observe.metrics_port, or 0 for any free one"
                if taken
                else "check observe.metrics_host",
            ) from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise ConfigError(
            "Prometheus metrics need the package prometheus-client", next_step="pip install 'belayer[observe]'"
        ) from None
    return prometheus_client


def _family(client: Any, metric: Metric, registry: CollectorRegistry) -> Any:
    if metric.kind == "histogram":
        return client.Histogram(metric.full_name, metric.help, metric.labels, buckets=metric.buckets, registry=registry)
    kind = client.Counter if metric.kind == "counter" else client.Gauge
    return kind(metric.full_name, metric.help, metric.labels, registry=registry)


def _size(folder: Path | None) -> float:
    if folder is None:
        return 0.0
    try:
        return float(sum(path.stat().st_size for path in folder.glob("*.seg")))
    except OSError:  # a segment went away between the listing and the look
        return 0.0


__all__ = ["METRICS", "PREFIX", "MetricsServer", "RunMetrics"]
