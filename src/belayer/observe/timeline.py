"""`trace.json`: a run in the Chrome trace format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Processes are the parts of the system (training, engine, recoveries, rollouts, checkpoints); their threads are lanes. A
lane never holds two slices that overlap without one holding the other, because viewers draw those wrongly. Arrows lead
from a fault to the recovery that answered it.
Format: "Trace Event Format", Google, 2016; times in microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from belayer.errors import RunError
from belayer.files import write_atomically
from belayer.observe._history import Done, Fault, History, State, history_of
from belayer.observe._values import phase_label
from belayer.observe.metrics import scan_metrics

_TRAINING, _ENGINE, _RECOVERY, _ROLLOUTS, _CHECKPOINTS = range(1, 6)
_PROCESSES = {
    _TRAINING: "training",
    _ENGINE: "engine",
    _RECOVERY: "faults and recoveries",
    _ROLLOUTS: "rollouts",
    _CHECKPOINTS: "checkpoints",
}
_ALIVE = frozenset(("starting", "ready", "serving"))
_FIRST_LOOSE = 100_000  # lanes of work outside a rollout's slot: above every slot
_FIRST_RECOVERY = 1_000  # lanes of recoveries: above every lane of faults


@dataclass(slots=True)
class _Lanes:
    """Gives each interval the first lane of its process that is free; lanes are numbered from `first`."""

    process: int
    name: str
    first: int = 1
    busy_until: list[float] = field(default_factory=list)

    def take(self, start: float, end: float) -> int:
        for lane, until in enumerate(self.busy_until):
            if until <= start:
                self.busy_until[lane] = end
                return self.first + lane
        self.busy_until.append(end)
        return self.first + len(self.busy_until) - 1

    def names(self) -> list[dict[str, Any]]:
        return [
            _thread(self.process, self.first + lane, f"{self.name} {lane + 1}") for lane in range(len(self.busy_until))
        ]


def write_timeline(run_dir: Path, *, output: Path | None = None, rollout: str | None = None) -> Path:
    """Write the trace of the run in `run_dir`, or of one `rollout`, and return its path (default: `trace.json` there).

    An `output` that ends in `.html` becomes a page that shows it. Raises `FileNotFoundError` without `metrics.jsonl`,
    `RunError` for a rollout that it does not mention, and `StorageFull`.
    """
    run = history_of(scan_metrics(run_dir / "metrics.jsonl").events)
    if rollout is not None:
        run = run.only(rollout)
        if not run.lives and not run.spans:
            raise RunError(
                f"{run_dir / 'metrics.jsonl'} mentions no rollout {rollout}", next_step=f"`belayer show {run_dir}`"
            )
    path = output or run_dir / "trace.json"
    events = trace_events(run)
    if path.suffix == ".html":
        from belayer.observe._viewer import viewer_page

        name = run_dir.resolve().name
        content = viewer_page(events, f"{name}, rollout {rollout}" if rollout else name).encode("utf-8", "replace")
    else:
        content = msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})
    write_atomically(path, content)
    return path


def trace_events(run: History) -> list[dict[str, Any]]:
    """The trace's events, metadata first."""
    out: list[dict[str, Any]] = []
    for process, name in _PROCESSES.items():
        out.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
        out.append({"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}})
    out.extend(_steps(run))
    out.extend(_engine(run))
    out.extend(_recoveries(run))
    out.extend(_rollouts(run))
    return out


def _steps(run: History) -> list[dict[str, Any]]:
    out = [_thread(_TRAINING, 1, "steps")]
    begin = 0.0
    for step in sorted(run.steps, key=lambda one: one.end):
        start = step.end - step.wall_s if step.wall_s is not None else begin
        begin = max(begin, start)
        out.append(_slice(_TRAINING, 1, "step", f"step {step.step}", begin, step.end, {"reward_mean": step.reward}))
        if step.reward is not None:
            out.append(
                {"ph": "C", "name": "reward", "pid": _TRAINING, "ts": _us(step.end), "args": {"mean": step.reward}}
            )
        begin = step.end
    return out


def _engine(run: History) -> list[dict[str, Any]]:
    """One lane per engine process, reused when it has ended; a process is known by its generation."""
    lives: dict[int, list[State]] = {}
    for state in sorted((*run.workers, *run.shadows), key=lambda one: one.x):
        if state.generation is not None and state.state != "promoted":
            lives.setdefault(state.generation, []).append(state)
    lanes = _Lanes(_ENGINE, "process")
    out: list[dict[str, Any]] = []
    for generation, states in sorted(lives.items(), key=lambda item: item[1][0].x):
        last = states[-1]
        end = run.length if last.state in _ALIVE else last.x
        lane = lanes.take(states[0].x, max(end, last.x))
        for state, until in zip(states, [*(each.x for each in states[1:]), max(end, last.x)], strict=True):
            if state.state in _ALIVE and until >= max(state.x, run.begin) and state.x <= run.length:
                name = f"generation {generation} {state.state}"
                out.append(_slice(_ENGINE, lane, f"engine {state.state}", name, state.x, until, {}))
    return out + lanes.names()


def _recoveries(run: History) -> list[dict[str, Any]]:
    hits, mends = _Lanes(_RECOVERY, "faults"), _Lanes(_RECOVERY, "recoveries", _FIRST_RECOVERY)
    out: list[dict[str, Any]] = []
    places: dict[int, tuple[int, float]] = {}
    for fault in sorted(run.faults, key=lambda one: one.x):
        end = max(fault.x + 1e-6, fault.detected if fault.detected is not None else fault.x)
        lane = hits.take(fault.x, end)
        places[id(fault)] = (lane, fault.x)
        details = {"subject": fault.subject, "injected": fault.injected, "detected": fault.detected is not None}
        out.append(_slice(_RECOVERY, lane, "fault", _fault_name(fault), fault.x, end, details))
    for number, done in enumerate(sorted(run.recoveries, key=lambda one: one.end - one.recovery.total_s), start=1):
        one = done.recovery
        start = max(0.0, done.end - one.total_s)
        lane = mends.take(start, done.end)
        details = {"fault": one.fault, "subject": one.subject}
        out.append(_slice(_RECOVERY, lane, "recovery", f"{one.what}: {one.how}", start, done.end, details))
        at = start
        for phase, seconds in one.phases.items():  # phases follow one another; what they leave over is at the end
            until = min(done.end, at + max(0.0, seconds))
            out.append(_slice(_RECOVERY, lane, "phase", phase_label(phase), at, until, {}))
            at = until
        out.extend(_arrow(number, done, places, lane, start))
    return out + hits.names() + mends.names()


def _arrow(
    number: int, done: Done, places: dict[int, tuple[int, float]], lane: int, start: float
) -> list[dict[str, Any]]:
    """From the fault's slice to the recovery's; an end binds to the slice that holds its time."""
    place = places.get(id(done.cause))
    if place is None:
        return []
    common = {"cat": "answer", "name": "answered by", "id": number, "pid": _RECOVERY}
    end = min(max(_us(start), _us(place[1])), _us(done.end))
    return [
        {"ph": "s", "tid": place[0], "ts": _us(place[1]), **common},
        {"ph": "f", "bp": "e", "tid": lane, "ts": end, **common},
    ]


def _fault_name(fault: Fault) -> str:
    return fault.fault if fault.injected else f"{fault.fault} (not injected)"


def _rollouts(run: History) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    lanes = _Lanes(_ROLLOUTS, "slot")
    lives: dict[str, list[tuple[float, float, int]]] = {}
    for life in sorted(run.lives, key=lambda one: one.start):
        end = run.length if life.end is None else life.end
        end = max(end, life.start)
        lane = lanes.take(life.start, end)
        lives.setdefault(life.rollout, []).append((life.start, end, lane))
        out.append(_slice(_ROLLOUTS, lane, "rollout", life.rollout, life.start, end, {"outcome": life.outcome}))
    loose = _Lanes(_ROLLOUTS, "work outside a rollout", _FIRST_LOOSE)
    hidden = _Lanes(_CHECKPOINTS, "lane")
    busy: dict[int, float] = {}
    for span in sorted(run.spans, key=lambda one: one.start):
        name = span.kind
        details: dict[str, Any] = {"rollout": span.rollout, "what": span.label}
        if span.kind == "checkpoint":
            details["exposed_s"] = span.exposed_s
            lane = hidden.take(span.start, span.end)
            out.append(_slice(_CHECKPOINTS, lane, name, f"checkpoint {span.rollout}", span.start, span.end, details))
            continue
        home = next(
            (lane for start, end, lane in lives.get(span.rollout, ()) if start <= span.start and span.end <= end), None
        )
        if home is not None and busy.get(home, 0.0) <= span.start:
            busy[home] = span.end
            out.append(_slice(_ROLLOUTS, home, name, name, span.start, span.end, details))
        else:
            lane = loose.take(span.start, span.end)
            out.append(_slice(_ROLLOUTS, lane, name, f"{name} {span.rollout}", span.start, span.end, details))
    for cut in run.cuts:
        home = next((lane for start, end, lane in lives.get(cut.rollout, ()) if start <= cut.x <= end), None)
        if home is not None:
            mark = {"ph": "i", "s": "t", "cat": "cut", "name": "context cut", "pid": _ROLLOUTS, "tid": home}
            out.append(mark | {"ts": _us(cut.x), "args": {"reason": cut.reason}})
    return out + lanes.names() + hidden.names() + loose.names()


def _slice(
    process: int, lane: int, category: str, name: str, start: float, end: float, details: dict[str, Any]
) -> dict[str, Any]:
    begin = _us(start)
    out: dict[str, Any] = {"ph": "X", "cat": category, "name": name, "pid": process, "tid": lane, "ts": begin}
    out["dur"] = max(0, _us(end) - begin)
    if details:
        out["args"] = details
    return out


def _thread(process: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
