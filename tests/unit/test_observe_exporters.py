"""The optional sinks: OpenTelemetry with its own in-memory exporter, TensorBoard and W&B where they are installed."""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from belayer import events as ev
from belayer.config import ObserveConfig
from belayer.errors import ConfigError
from belayer.events import Event
from belayer.observe import open_watchers, read_metrics
from belayer.observe.exporters import Background, open_exporter

pytestmark = pytest.mark.unit

RECORDED = Path(__file__).resolve().parents[1] / "data" / "recorded_run.jsonl"


def have(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


needs_otel = pytest.mark.skipif(not have("opentelemetry.sdk"), reason="opentelemetry-sdk is not installed")
needs_tensorboard = pytest.mark.skipif(not have("tensorboard"), reason="tensorboard is not installed")
needs_wandb = pytest.mark.skipif(not have("wandb"), reason="wandb is not installed")


@needs_otel
def test_a_recorded_run_becomes_one_trace_per_rollout() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from belayer.observe.exporters.opentelemetry import OpenTelemetryExporter

    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    recorded = read_metrics(RECORDED)
    exporter = OpenTelemetryExporter("recorded", provider)
    for event in recorded:
        exporter(event)
    exporter.close()
    spans = memory.get_finished_spans()
    happened = Counter(event.kind for event in recorded)
    named = Counter(span.name for span in spans)
    assert named["rollout"] == happened[ev.ROLLOUT_STARTED] == 27
    assert named["generate"] == happened[ev.GENERATE] and named["exec"] == happened[ev.EXEC]
    assert named["checkpoint"] == happened[ev.CHECKPOINT]
    assert named["recover worker"] + named["recover sandbox"] == happened[ev.RECOVERED]
    rollouts = {span.context.span_id: span for span in spans if span.name == "rollout" and span.context}
    assert len({span.context.trace_id for span in rollouts.values() if span.context}) == 27
    for span in spans:
        assert span.start_time is not None and span.end_time is not None and span.start_time <= span.end_time
        assert span.attributes is not None
        if span.name in ("generate", "exec"):
            assert span.parent is not None
            mother = rollouts[span.parent.span_id]
            assert mother.attributes is not None
            assert span.attributes["belayer.subject"] == mother.attributes["belayer.subject"]
            assert mother.start_time is not None and mother.start_time <= span.start_time
    hits = [one.name for span in rollouts.values() for one in span.events]
    sandbox_faults = [e for e in recorded if e.kind == ev.FAULT_INJECTED and e.subject != "worker"]
    assert hits.count(ev.FAULT_INJECTED) == len(sandbox_faults) > 0
    phases = [span for span in spans if span.name == "restore"]
    assert phases and all(span.parent is not None for span in phases)


@needs_otel
def test_open_spans_end_with_the_run_and_failures_are_errors() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import StatusCode

    from belayer.observe.exporters.opentelemetry import OpenTelemetryExporter

    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    exporter = OpenTelemetryExporter("run", provider)
    exporter(Event(kind=ev.ROLLOUT_STARTED, subject="a", data={"attempt": 0}))
    exporter(Event(kind=ev.ROLLOUT_FAILED, subject="a", data={"reason": "no budget", "failure": "BudgetSpent"}))
    exporter(Event(kind=ev.ROLLOUT_STARTED, subject="a", data={"attempt": 1}))
    exporter.close()
    first, second = memory.get_finished_spans()
    assert first.status.status_code is StatusCode.ERROR and first.status.description == "no budget"
    assert second.attributes is not None and second.attributes["belayer.outcome"] == "in flight"


@needs_tensorboard
def test_tensorboard_reads_back_the_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore

    with open_exporter("tensorboard", tmp_path) as sink:
        for event in read_metrics(RECORDED):
            sink(event)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    rewards = [e.data["reward_mean"] for e in read_metrics(RECORDED) if e.kind == ev.TRAIN_STEP]
    assert [one.value for one in found.Scalars("train/reward_mean")] == pytest.approx(rewards)
    assert [one.step for one in found.Scalars("belayer/recoveries")] == [0, 1, 2]


@needs_wandb
def test_wandb_takes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "run.json").write_text("{}")
    with open_exporter("wandb", tmp_path) as sink:
        for event in read_metrics(RECORDED):
            sink(event)
    assert sink.failed == 0 and sink.dropped == 0
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_before_the_run(name, tmp_path: Path) -> None:
    if have(name):
        pytest.skip(f"{name} is installed")
    with (
        pytest.raises(ConfigError, match=name) as refused,
        open_watchers(ObserveConfig(exporters=(name,)), tmp_path),
    ):
        pass
    assert f"pip install {name}" in str(refused.value)


class _Sink:
    def __init__(self, behave=lambda event: None) -> None:
        self.taken: list[Event] = []
        self.closed_on: int | None = None
        self._behave = behave

    def __call__(self, event: Event) -> None:
        self._behave(event)
        self.taken.append(event)

    def close(self) -> None:
        self.closed_on = threading.get_ident()


def test_events_arrive_in_order_on_one_other_thread() -> None:
    threads: set[int] = set()
    sink = _Sink(lambda event: threads.add(threading.get_ident()))
    with Background("test", sink) as background:
        for number in range(500):
            background(Event(kind=str(number)))
    assert [event.kind for event in sink.taken] == [str(number) for number in range(500)]
    assert len(threads) == 1 and threading.get_ident() not in threads
    assert sink.closed_on in threads


def test_a_broken_exporter_neither_stops_the_run_nor_stays_silent(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        if event.kind == "bad":
            raise RuntimeError("no such host")

    sink = _Sink(fail)
    with caplog.at_level(logging.WARNING), Background("test", sink) as background:
        for kind in ("good", "bad", "bad", "good"):
            background(Event(kind=kind))
    assert [event.kind for event in sink.taken] == ["good", "good"]
    assert background.failed == 2
    assert "no such host" in caplog.text and "failed on 2" in caplog.text


def test_a_blocked_exporter_costs_events_and_not_time(caplog: pytest.LogCaptureFixture) -> None:
    free = threading.Event()
    background = Background("test", _Sink(lambda event: free.wait(10) and None))
    begun = time.perf_counter()
    for _ in range(10_200):
        background(Event(kind="x"))
    assert background.dropped >= 100
    background.close(timeout_s=0.05)
    assert time.perf_counter() - begun < 5
    assert "did not take its last events" in caplog.text or "did not finish" in caplog.text
    free.set()
