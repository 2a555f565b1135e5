"""A run's events, sorted into what the figures and the timeline draw.

Run time: seconds since the driver first started, with the pauses between a crash and its resume taken out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from belayer import events as ev
from belayer.events import Event
from belayer.observe._values import number, text, whole
from belayer.observe.summary import Recovery, recovery_of


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step; `end` in run time, `wall_s` in seconds."""

    step: int
    end: float
    wall_s: float | None
    reward: float | None


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at `x` (run time). `injected` is False for one that only was detected."""

    x: float
    fault: str
    subject: str
    injected: bool

    @property
    def lane(self) -> str:
        return "worker" if self.fault.startswith(("worker", "engine", "shadow", "owner")) else "sandbox"


@dataclass(frozen=True, slots=True)
class Done:
    """A recovery that was complete at `end` (run time)."""

    end: float
    recovery: Recovery


@dataclass(frozen=True, slots=True)
class Span:
    """What a rollout did from `start` to `end` (run time). `exposed_s`: the part of a checkpoint that it waited for."""

    kind: str
    rollout: str
    start: float
    end: float
    label: str
    exposed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Life:
    """A rollout from `start` to `end` (run time); `end` is None while it is in flight."""

    rollout: str
    start: float
    end: float | None
    outcome: str


@dataclass(frozen=True, slots=True)
class State:
    """The worker or the shadow entered `state` at `x` (run time)."""

    x: float
    state: str
    generation: int | None
    note: str


@dataclass(slots=True)
class History:
    """Everything of one run that can be drawn."""

    length: float = 0.0
    resumes: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    recoveries: list[Done] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    workers: list[State] = field(default_factory=list)
    shadows: list[State] = field(default_factory=list)

    @property
    def checkpoints(self) -> list[Span]:
        return [span for span in self.spans if span.kind == "checkpoint"]


_SPANS = {ev.GENERATE: "generate", ev.EXEC: "exec", ev.CHECKPOINT: "checkpoint"}


def history_of(events: list[Event]) -> History:
    """Sort a run's events; those it does not know are passed over."""
    found = History()
    open_lives: dict[str, float] = {}
    awaiting: set[str] = set()
    steps: dict[int, Step] = {}
    last_fault: dict[str, str] = {}
    begun: float | None = None
    shift = 0.0
    finished = False
    for event in events:
        if begun is None:
            begun = event.at
        elif event.kind == ev.RUN_STARTED:
            begun, shift = event.at, found.length
            if event.data.get("resumed") or finished:
                found.resumes.append(shift)
        x = max(0.0, event.at - begun) + shift
        if event.kind == ev.RUN_STARTED:
            finished = False
        if not finished:
            found.length = max(found.length, x)
        data = event.data
        if event.kind == ev.RUN_FINISHED:
            finished = True
        elif event.kind == ev.TRAIN_STEP:
            number_of = whole(data, "step")
            if number_of is not None:
                steps[number_of] = Step(number_of, x, number(data, "wall_s"), number(data, "reward_mean"))
        elif event.kind == ev.FAULT_INJECTED:
            subject = event.subject or text(data, "target")
            fault = text(data, "fault", "unnamed")
            awaiting.add(subject)
            last_fault[subject] = fault
            found.faults.append(Fault(x, fault, subject, True))
        elif event.kind == ev.FAULT_DETECTED:
            if event.subject not in awaiting:
                fault = text(data, "fault", "unnamed")
                last_fault[event.subject] = fault
                found.faults.append(Fault(x, fault, event.subject, False))
        elif event.kind == ev.RECOVERED:
            awaiting.discard(event.subject)
            found.recoveries.append(Done(x, recovery_of(event, last_fault.pop(event.subject, None))))
        elif event.kind in _SPANS:
            found.spans.append(_span(event, x))
        elif event.kind == ev.ROLLOUT_STARTED:
            open_lives[event.subject] = x
        elif event.kind in (ev.ROLLOUT_FINISHED, ev.ROLLOUT_FAILED):
            start = open_lives.pop(event.subject, max(0.0, x - (number(data, "wall_s") or 0.0)))
            outcome = "finished" if event.kind == ev.ROLLOUT_FINISHED else "failed"
            found.lives.append(Life(event.subject, min(start, x), x, outcome))
        elif event.kind == ev.WORKER_STATE:
            found.workers.append(State(x, text(data, "state"), whole(data, "generation"), text(data, "reason")))
        elif event.kind == ev.SHADOW_STATE:
            found.shadows.append(State(x, text(data, "state"), None, text(data, "reason")))
    found.lives.extend(Life(rollout, start, None, "in flight") for rollout, start in open_lives.items())
    found.steps = [steps[step] for step in sorted(steps)]
    return found


def _span(event: Event, x: float) -> Span:
    data = event.data
    wall = max(0.0, number(data, "wall_s") or 0.0)
    start = number(data, "start")
    # `start` is on the same wall clock as `at`; without it the span ended when it was reported.
    begin = x - wall if start is None else x - max(0.0, event.at - start)
    kind = _SPANS[event.kind]
    if kind == "generate":
        label = f"turn {text(data, 'turn', '?')}, {text(data, 'tokens', '?')} tokens"
    elif kind == "exec":
        label = f"action {text(data, 'action', '?')}, exit {text(data, 'exit_code', '?')}"
    else:
        label = f"checkpoint after action {text(data, 'action', '?')}, {text(data, 'level', 'level unknown')}"
    return Span(kind, event.subject, max(0.0, begin), max(0.0, begin) + wall, label, number(data, "exposed_s") or 0.0)


def ready_periods(states: list[State], ready: frozenset[str], end: float) -> list[tuple[float, float]]:
    """The stretches of run time in which the newest state was one of `ready`."""
    periods: list[tuple[float, float]] = []
    since: float | None = None
    for state in states:
        if state.state in ready:
            since = state.x if since is None else since
        elif since is not None:
            periods.append((since, state.x))
            since = None
    if since is not None:
        periods.append((since, max(end, since)))
    return periods
