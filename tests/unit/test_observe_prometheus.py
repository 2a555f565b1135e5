"""Prometheus metrics: a recorded run through them, the page over HTTP, the dashboard and the table in the docs."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.test_observe_report import odd_events

from belayer import events as ev
from belayer.config import ObserveConfig
from belayer.errors import ConfigError
from belayer.events import Event
from belayer.observe import open_watchers, read_metrics
from belayer.observe.dashboard import dashboard_json
from belayer.observe.summary import Summary

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
from prometheus_client.parser import text_string_to_metric_families

from belayer.observe.prometheus import METRICS, MetricsServer, RunMetrics

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).resolve().parents[2]
# the events of a real run: `belayer train examples/shell_grpo.toml --inject`, 3 steps of 9 rollouts
RECORDED = REPOSITORY / "tests" / "data" / "recorded_run.jsonl"


def samples_of(page: str) -> dict[str, float]:
    """{name{labels}: value} of an exposition, checked by Prometheus' own parser."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def page_of(*events: Event) -> dict[str, float]:
    metrics = RunMetrics()
    for event in events:
        metrics(event)
    return samples_of(metrics.exposition()[0].decode())


def total(samples: dict[str, float], name: str) -> float:
    return sum(value for key, value in samples.items() if key.split("{")[0] == name)


def test_a_recorded_run_counts_as_its_summary_does() -> None:
    events = read_metrics(RECORDED)
    summary = Summary.from_events(events).result()
    found = page_of(*events)
    assert found["belayer_rollouts_started_total"] == summary.rollouts_started > 0
    assert found["belayer_rollouts_delivered_total"] == summary.rollouts_delivered
    assert found["belayer_tokens_generated_total"] == summary.tokens_generated > 0
    assert found["belayer_train_steps_total"] == summary.steps
    assert found["belayer_train_reward_mean"] == summary.reward_last
    assert total(found, "belayer_faults_injected_total") == summary.faults_injected > 0
    assert found["belayer_faults_injected_total{fault=worker.sigkill}"] == 1
    assert total(found, "belayer_recoveries_total") == len(summary.recoveries) > 0
    assert total(found, "belayer_recovery_duration_seconds_sum") == pytest.approx(
        sum(one.total_s for one in summary.recoveries)
    )
    assert total(found, "belayer_checkpoints_published_total") == summary.checkpoints > 0
    assert found["belayer_checkpoint_exposed_seconds_total"] == pytest.approx(summary.checkpoint_exposed_s)
    assert found["belayer_checkpoint_hidden_seconds_total"] == pytest.approx(
        summary.checkpoint_wall_s - summary.checkpoint_exposed_s
    )
    assert found["belayer_checkpoint_bytes_total"] > 0
    assert found["belayer_rollouts_in_flight"] == 0
    assert found["belayer_sandboxes_running"] == 0
    assert found["belayer_engine_policy_version"] == summary.steps
    # the run is over: nothing serves any more
    assert found["belayer_run_active"] == found["belayer_engine_serving"] == found["belayer_engine_standby_armed"] == 0


def test_the_gauges_of_the_engine_follow_a_promotion_and_the_end_of_the_old_worker() -> None:
    serving = [
        Event(kind=ev.OWNER_STATE, subject="owner", data={"state": "started"}),
        Event(kind=ev.WORKER_STATE, subject="worker", data={"state": "serving", "generation": 1}),
        Event(kind=ev.SHADOW_STATE, subject="shadow", data={"state": "ready", "generation": 2}),
    ]
    found = page_of(*serving)
    assert found["belayer_engine_serving"] == found["belayer_engine_standby_armed"] == 1
    assert found["belayer_engine_owner_up"] == 1
    broken = [*serving, Event(kind=ev.FAULT_DETECTED, subject="worker", data={"fault": "worker.exit"})]
    assert page_of(*broken)["belayer_engine_serving"] == 0
    promoted = [
        *broken,
        Event(kind=ev.WORKER_STATE, subject="worker", data={"state": "serving", "generation": 2}),
        Event(kind=ev.WORKER_STATE, subject="worker", data={"state": "killed by SIGKILL", "generation": 1}),
    ]
    found = page_of(*promoted)
    assert found["belayer_engine_serving"] == 1, "the old worker's end is not the new one's"
    assert found["belayer_engine_generation"] == 2
    assert found["belayer_engine_standby_armed"] == 0


def test_failures_retries_and_skips_are_counted_apart() -> None:
    found = page_of(
        Event(kind=ev.ROLLOUT_STARTED, subject="a", data={"attempt": 0}),
        Event(kind=ev.ROLLOUT_FAILED, subject="a", data={"failure": "BudgetSpent", "reason": "x"}),
        Event(kind=ev.ROLLOUT_STARTED, subject="a", data={"attempt": 1}),
        Event(kind=ev.ROLLOUT_FAILED, subject="b", data={"failure": "KeyError", "reason": "x"}),
        Event(kind=ev.ROLLOUT_TRUNCATED, subject="a"),
        Event(kind=ev.CHECKPOINT_SKIPPED, subject="a", data={"abandoned": False}),
        Event(kind=ev.CHECKPOINT_SKIPPED, subject="a", data={"abandoned": True}),
        Event(kind=ev.STALE_DROPPED, subject="worker", data={"count": 3}),
        Event(kind=ev.EXEC, subject="a", data={"exit_code": 2, "wall_s": 0.1}),
        Event(kind=ev.EXEC, subject="a", data={"exit_code": None, "wall_s": 0.1}),
    )
    assert found["belayer_rollouts_failed_total{failure=BudgetSpent}"] == 1
    assert found["belayer_rollouts_failed_total{failure=user function}"] == 1
    assert found["belayer_rollouts_retried_total"] == found["belayer_rollouts_truncated_total"] == 1
    assert found["belayer_rollouts_in_flight"] == 1
    assert found["belayer_checkpoints_skipped_total"] == found["belayer_checkpoints_abandoned_total"] == 1
    assert found["belayer_engine_stale_dropped_total"] == 3
    assert found["belayer_actions_total{outcome=failed}"] == found["belayer_actions_total{outcome=none}"] == 1


def test_labels_stay_bounded_whatever_the_events_say() -> None:
    found = page_of(
        *(Event(kind=ev.FAULT_DETECTED, subject="worker", data={"fault": f"kind {number}"}) for number in range(500))
    )
    mine = {key: value for key, value in found.items() if key.startswith("belayer_faults_detected_total")}
    assert len(mine) == 33
    assert mine["belayer_faults_detected_total{fault=other}"] == 468
    page_of(Event(kind=ev.RECOVERED, data={"what": "\ud800", "how": 'a"b\n', "phases": {"\udfff_s": 1.0}}))


@settings(max_examples=25, deadline=None)
@given(st.lists(odd_events, max_size=25))
def test_no_event_breaks_the_page_or_the_run(events: list[Event]) -> None:
    page_of(*events)


def test_names_follow_the_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not re.search(r"_(s|ms|seconds_seconds|mb)$", metric.name), metric.name
        assert metric.help.endswith("."), metric.name
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_dashboard_asks_only_for_what_a_run_exposes() -> None:
    metrics = RunMetrics()
    for event in read_metrics(RECORDED):
        metrics(event)
    page = metrics.exposition()[0].decode()
    exposed = set(re.findall(r"^(belayer_\w+)", page, re.M)) | set(re.findall(r"^# TYPE (belayer_\w+)", page, re.M))
    dashboard = json.loads(dashboard_json())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    queries += [one["expr"] for one in dashboard["annotations"]["list"] if "expr" in one]
    queries.append(next(one["definition"] for one in dashboard["templating"]["list"] if one["type"] == "query"))
    assert len(queries) > 40
    asked = {name for query in queries for name in re.findall(r"belayer_\w+", query)}
    assert asked <= exposed
    # nothing is collected that nobody can see
    assert {metric.full_name for metric in METRICS} <= {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    labels = {label for metric in METRICS for label in metric.labels} | {"le", "instance"}
    assert {
        word for query in queries for names in re.findall(r"by \(([^)]*)\)", query) for word in names.split(", ")
    } <= labels


def test_panels_have_a_question_and_do_not_overlap() -> None:
    panels = json.loads(dashboard_json())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert at["x"] + at["w"] <= 24
        if panel["type"] == "timeseries":
            assert panel["title"].endswith("?") and panel["description"], panel["title"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_page_is_served_on_loopback_and_gone_afterwards(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "0.seg").write_bytes(b"x" * 1234)
    said: list[str] = []
    with open_watchers(ObserveConfig(metrics_port=0), tmp_path, served=said.append) as sinks:
        (sink,) = sinks
        sink(Event(kind=ev.TRAIN_STEP, data={"step": 0, "reward_mean": 0.25, "wall_s": 1.0}))
        (url,) = said
        assert url.startswith("http://127.0.0.1:")
        request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert answer.read().endswith(b"# EOF\n")
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = samples_of(answer.read().decode())
        assert found["belayer_train_reward_mean"] == 0.25
        assert found["belayer_journal_bytes"] == 1234
        assert found[f"belayer_run_info{{run={tmp_path.name},version={RUN_VERSION}}}"] == 1
        assert "process_resident_memory_bytes" in found
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=10)


def test_a_port_that_is_taken_is_said_at_once() -> None:
    with MetricsServer(RunMetrics()) as server:
        port = int(server.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match=str(port)) as refused:
            MetricsServer(RunMetrics(), port=port)
    assert "metrics_port" in str(refused.value)


def test_the_docs_list_every_metric() -> None:
    text = (REPOSITORY / "docs" / "observability.md").read_text()
    rows = dict(re.findall(r"^\| `(belayer_\w+)` \| (.*) \|$", text, re.M))
    assert list(rows) == [metric.full_name for metric in METRICS]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        assert rows[metric.full_name] == f"{metric.kind} | {labels} | {metric.help}", metric.full_name


def _version() -> str:
    from belayer.observe.summary import belayer_version

    return belayer_version()


RUN_VERSION = _version()
