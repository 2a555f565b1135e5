"""`trace.json`: a run in the Chrome trace format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Processes are the parts of the system (training, engine, recoveries, rollouts, checkpoints); their threads are lanes. A
lane never holds two slices that overlap without one holding the other, because viewers draw those wrongly.
Format: "Trace Event Format", Google, 2016; times in microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from belayer.files import write_atomically
from belayer.observe._history import History, State, history_of
from belayer.observe.metrics import scan_metrics

_TRAINING, _ENGINE, _RECOVERY, _ROLLOUTS, _CHECKPOINTS = range(1, 6)
_PROCESSES = {
    _TRAINING: "training",
    _ENGINE: "engine",
    _RECOVERY: "faults and recoveries",
    _ROLLOUTS: "rollouts",
    _CHECKPOINTS: "checkpoints",
}


@dataclass(slots=True)
class _Lanes:
    """Gives each interval the first lane of its process that is free."""

    process: int
    name: str
    busy_until: list[float] = field(default_factory=list)

    def take(self, start: float, end: float) -> int:
        for lane, until in enumerate(self.busy_until):
            if until <= start:
                self.busy_until[lane] = end
                return lane + 1
        self.busy_until.append(end)
        return len(self.busy_until)

    def names(self) -> list[dict[str, Any]]:
        return [_thread(self.process, lane + 1, f"{self.name} {lane + 1}") for lane in range(len(self.busy_until))]


def write_timeline(run_dir: Path) -> Path:
    """Write `trace.json` into `run_dir` from its `metrics.jsonl`, and return its path.

    Raises `FileNotFoundError` without `metrics.jsonl`, and `StorageFull`.
    """
    run = history_of(scan_metrics(run_dir / "metrics.jsonl").events)
    path = run_dir / "trace.json"
    content = {"displayTimeUnit": "ms", "traceEvents": trace_events(run)}
    write_atomically(path, msgspec.json.encode(content))
    return path


def trace_events(run: History) -> list[dict[str, Any]]:
    """The trace's events, metadata first."""
    out: list[dict[str, Any]] = []
    for process, name in _PROCESSES.items():
        out.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
        out.append({"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}})
    out.append(_thread(_TRAINING, 1, "steps"))
    begin = 0.0
    for step in sorted(run.steps, key=lambda one: one.end):
        start = step.end - step.wall_s if step.wall_s is not None else begin
        begin = max(begin, start)
        out.append(_slice(_TRAINING, 1, f"step {step.step}", begin, step.end, {"reward_mean": step.reward}))
        if step.reward is not None:
            out.append(
                {"ph": "C", "name": "reward", "pid": _TRAINING, "ts": _us(step.end), "args": {"mean": step.reward}}
            )
        begin = step.end
    for lane, (name, states) in enumerate((("worker", run.workers), ("shadow", run.shadows)), start=1):
        out.append(_thread(_ENGINE, lane, name))
        out.extend(_states(states, lane, run.length))
    out.extend(_recoveries(run))
    out.extend(_rollouts(run))
    return out


def _recoveries(run: History) -> list[dict[str, Any]]:
    lanes = _Lanes(_RECOVERY, "recoveries")
    out: list[dict[str, Any]] = []
    for fault in run.faults:
        name = fault.fault if fault.injected else f"{fault.fault} (not injected)"
        mark = {"ph": "i", "s": "g", "name": name, "pid": _RECOVERY, "tid": 1, "ts": _us(fault.x)}
        out.append(mark | {"args": {"subject": fault.subject}})
    for done in sorted(run.recoveries, key=lambda one: one.end - one.recovery.total_s):
        one = done.recovery
        start = max(0.0, done.end - one.total_s)
        lane = lanes.take(start, done.end)
        details = {"fault": one.fault, "subject": one.subject}
        out.append(_slice(_RECOVERY, lane, f"{one.what}: {one.how}", start, done.end, details))
        at = start
        for phase, seconds in one.phases.items():  # phases follow one another; what they leave over is at the end
            until = min(done.end, at + max(0.0, seconds))
            out.append(_slice(_RECOVERY, lane, phase, at, until, {}))
            at = until
    return out + lanes.names()


def _rollouts(run: History) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    lanes = _Lanes(_ROLLOUTS, "slot")
    lives: dict[str, list[tuple[float, float, int]]] = {}
    for life in sorted(run.lives, key=lambda one: one.start):
        end = run.length if life.end is None else life.end
        end = max(end, life.start)
        lane = lanes.take(life.start, end)
        lives.setdefault(life.rollout, []).append((life.start, end, lane))
        out.append(_slice(_ROLLOUTS, lane, life.rollout, life.start, end, {"outcome": life.outcome}))
    loose = _Lanes(_ROLLOUTS, "work outside a rollout")
    hidden = _Lanes(_CHECKPOINTS, "lane")
    first_loose = 100_000  # above every slot
    busy: dict[int, float] = {}
    for span in sorted(run.spans, key=lambda one: one.start):
        name = span.kind
        details: dict[str, Any] = {"rollout": span.rollout, "what": span.label}
        if span.kind == "checkpoint":
            details["exposed_s"] = span.exposed_s
            lane = hidden.take(span.start, span.end)
            out.append(_slice(_CHECKPOINTS, lane, f"checkpoint {span.rollout}", span.start, span.end, details))
            continue
        home = next(
            (lane for start, end, lane in lives.get(span.rollout, ()) if start <= span.start and span.end <= end), None
        )
        if home is not None and busy.get(home, 0.0) <= span.start:
            busy[home] = span.end
            out.append(_slice(_ROLLOUTS, home, name, span.start, span.end, details))
        else:
            lane = first_loose + loose.take(span.start, span.end)
            out.append(_slice(_ROLLOUTS, lane, f"{name} {span.rollout}", span.start, span.end, details))
    spare = [
        _thread(_ROLLOUTS, first_loose + lane + 1, f"{loose.name} {lane + 1}") for lane in range(len(loose.busy_until))
    ]
    return out + lanes.names() + hidden.names() + spare


def _states(states: list[State], lane: int, length: float) -> list[dict[str, Any]]:
    ordered = sorted(states, key=lambda state: state.x)
    ends = [*(state.x for state in ordered[1:]), length][: len(ordered)]
    return [
        _slice(
            _ENGINE,
            lane,
            state.state if state.generation is None else f"{state.state} (generation {state.generation})",
            state.x,
            max(end, state.x),
            {"reason": state.note} if state.note else {},
        )
        for state, end in zip(ordered, ends, strict=True)
        if state.state
    ]


def _slice(process: int, lane: int, name: str, start: float, end: float, details: dict[str, Any]) -> dict[str, Any]:
    begin = _us(start)
    out: dict[str, Any] = {"ph": "X", "name": name, "pid": process, "tid": lane, "ts": begin}
    out["dur"] = max(0, _us(end) - begin)
    if details:
        out["args"] = details
    return out


def _thread(process: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
