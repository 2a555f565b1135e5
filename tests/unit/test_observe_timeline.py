"""trace.json against the trace-event format, for a recorded run and for one of its rollouts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from belayer import events as ev
from belayer.errors import RunError
from belayer.events import Event
from belayer.observe import MetricsLog, read_metrics, write_timeline
from belayer.observe._history import history_of
from belayer.observe.timeline import trace_events

pytestmark = pytest.mark.unit

RECORDED = Path(__file__).resolve().parents[1] / "data" / "recorded_run.jsonl"
_KEYS = {
    "X": {"ph", "cat", "name", "pid", "tid", "ts", "dur"},
    "M": {"ph", "name", "pid", "tid", "args"},
    "C": {"ph", "name", "pid", "ts", "args"},
    "i": {"ph", "cat", "name", "pid", "tid", "ts", "s"},
    "s": {"ph", "cat", "name", "id", "pid", "tid", "ts"},
    "f": {"ph", "cat", "name", "id", "pid", "tid", "ts", "bp"},
}


def check_format(events: list[dict[str, Any]]) -> None:
    """The rules of the format that viewers depend on: required keys, units, nesting, names, flows that bind."""
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    names: dict[tuple[str, int, int], str] = {}
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        required = _KEYS[event["ph"]]
        assert required <= event.keys() <= required | {"args"}, event
        for key in ("ts", "dur", "pid", "tid"):
            if key in event:
                assert isinstance(event[key], int) and event[key] >= 0, event
        assert isinstance(event["name"], str) and event["name"]
        for value in event.get("args", {}).values():
            assert value is None or isinstance(value, str | int | float | bool)
            assert not isinstance(value, float) or math.isfinite(value)
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "M" and event["name"].endswith("_name"):
            key = (event["name"], event["pid"], event["tid"])
            assert key not in names, f"named twice: {key}"
            names[key] = event["args"]["name"]
        elif event["ph"] in "sf":
            flows.setdefault(event["id"], []).append(event)
        elif event["ph"] == "i":
            assert event["s"] in "gpt"
    for (pid, tid), intervals in lanes.items():
        assert names[("thread_name", pid, tid)] and names[("process_name", pid, 0)]
        open_until: list[int] = []
        for start, end in sorted(intervals, key=lambda pair: (pair[0], -pair[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"slices overlap in lane {names[('thread_name', pid, tid)]}"
            open_until.append(end)
    for pair in flows.values():
        assert [one["ph"] for one in pair] == ["s", "f"], pair
        begin, end = pair
        assert (begin["cat"], begin["name"]) == (end["cat"], end["name"])
        assert begin["ts"] <= end["ts"]
        for one in pair:
            inside = lanes[(one["pid"], one["tid"])]
            assert any(start <= one["ts"] <= until for start, until in inside), "an arrow's end is in no slice"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "metrics.jsonl").write_bytes(RECORDED.read_bytes())
    return folder


def test_a_recorded_run_is_a_valid_trace_with_everything_in_it(run: Path) -> None:
    content = json.loads(write_timeline(run).read_text())
    assert content["displayTimeUnit"] == "ms"
    trace = content["traceEvents"]
    check_format(trace)
    recorded = read_metrics(RECORDED)
    slices = [event for event in trace if event["ph"] == "X"]

    def drawn(category: str) -> int:
        return sum(one["cat"] == category for one in slices)

    def happened(kind: str) -> int:
        return sum(event.kind == kind for event in recorded)

    assert drawn("generate") == happened(ev.GENERATE) > 0
    assert drawn("exec") == happened(ev.EXEC) > 0
    assert drawn("checkpoint") == happened(ev.CHECKPOINT) > 0
    assert drawn("recovery") == happened(ev.RECOVERED) > 0
    assert drawn("rollout") == happened(ev.ROLLOUT_STARTED) > 0
    assert drawn("step") == happened(ev.TRAIN_STEP) > 0
    assert sum(one["cat"] == "fault" and one["args"]["injected"] for one in slices) == happened(ev.FAULT_INJECTED)
    arrows = [event for event in trace if event["ph"] == "s"]
    assert len(arrows) == happened(ev.RECOVERED), "every recovery of this run answers a fault"
    assert any("serving" in one["name"] for one in slices)


def test_times_are_microseconds_of_the_run(run: Path) -> None:
    history = history_of(read_metrics(RECORDED))
    trace = trace_events(history)
    ends = [event["ts"] + event["dur"] for event in trace if event["ph"] == "X"]
    assert max(ends) == pytest.approx(history.length * 1e6, rel=1e-3)
    exec_event = next(event for event in read_metrics(RECORDED) if event.kind == ev.EXEC)
    found = next(one for one in trace if one.get("cat") == "exec" and one["args"]["rollout"] == exec_event.subject)
    assert found["dur"] == pytest.approx(exec_event.data["wall_s"] * 1e6, abs=1)


def test_one_rollout_is_its_own_work_and_what_hit_it(run: Path, tmp_path: Path) -> None:
    recorded = read_metrics(RECORDED)
    subject = next(event.subject for event in recorded if event.kind == ev.RECOVERED and event.subject != "worker")
    path = write_timeline(run, rollout=subject, output=tmp_path / "one.json")
    trace = json.loads(path.read_text())["traceEvents"]
    check_format(trace)
    slices = [event for event in trace if event["ph"] == "X"]
    assert {one["args"]["rollout"] for one in slices if one["cat"] in ("generate", "exec", "checkpoint")} == {subject}
    turns = sum(event.kind == ev.GENERATE and event.subject == subject for event in recorded)
    assert sum(one["cat"] == "generate" for one in slices) == turns > 0
    hits = {one["args"]["subject"] for one in slices if one["cat"] in ("fault", "recovery")}
    assert subject in hits and hits <= {subject, "worker", "shadow"}
    with pytest.raises(RunError, match="no rollout"):
        write_timeline(run, rollout="s9999-0-0", output=tmp_path / "none.json")


def test_a_run_in_progress_and_a_cut_context_are_drawn(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log(Event(kind=ev.RUN_STARTED, at=100.0, data={"seed": 1}))
        log(Event(kind=ev.ROLLOUT_STARTED, subject="a", at=101.0, data={"attempt": 0}))
        log(
            Event(kind=ev.GENERATE, subject="a", at=102.0, data={"turn": 0, "tokens": 3, "start": 101.5, "wall_s": 0.5})
        )
        log(Event(kind=ev.FAULT_DETECTED, subject="a", at=102.5, data={"fault": "sandbox", "how": "died"}))
        log(Event(kind=ev.ROLLOUT_TRUNCATED, subject="a", at=103.0, data={"action": 1, "reason": "another answer"}))
    trace = json.loads(write_timeline(tmp_path).read_text())["traceEvents"]
    check_format(trace)
    assert next(one for one in trace if one.get("cat") == "rollout")["args"]["outcome"] == "in flight"
    assert next(one for one in trace if one["ph"] == "i")["args"]["reason"] == "another answer"
    assert not [one for one in trace if one["ph"] in "sf"], "a fault that nothing answered has no arrow"


def test_a_page_holds_the_trace(run: Path, tmp_path: Path) -> None:
    content = write_timeline(run, output=tmp_path / "timeline.html").read_text()
    data = content.split('id="belayer-trace">', 1)[1].split("</script>", 1)[0]
    check_format(json.loads(data))
