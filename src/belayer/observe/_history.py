"""A run's events, sorted into what the figures and the timeline draw.

All times are run time: see `_clock`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from belayer import events as ev
from belayer.events import Event
from belayer.observe._clock import RunClock
from belayer.observe._values import number, text, whole
from belayer.observe.summary import Recovery, recovery_of


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step; `end` in run time, `wall_s` in seconds."""

    step: int
    end: float
    wall_s: float | None
    reward: float | None


@dataclass(slots=True)
class Fault:
    """A fault at `x` (run time). `injected` is False for one that only was detected; `detected` is when (run time)."""

    x: float
    fault: str
    subject: str
    injected: bool
    detected: float | None = None

    @property
    def lane(self) -> str:
        return "worker" if self.fault.startswith(("worker", "engine", "shadow", "owner")) else "sandbox"


@dataclass(frozen=True, slots=True)
class Done:
    """A recovery that was complete at `end` (run time), and the fault that it answers where that is known."""

    end: float
    recovery: Recovery
    cause: Fault | None = None


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
class Cut:
    """The context of `rollout` was shortened at `x` (run time)."""

    x: float
    rollout: str
    reason: str


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
    begin: float = 0.0
    """Where what is of interest begins: 0, unless it is one rollout's part."""
    resumes: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    recoveries: list[Done] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    workers: list[State] = field(default_factory=list)
    shadows: list[State] = field(default_factory=list)

    @property
    def checkpoints(self) -> list[Span]:
        return [span for span in self.spans if span.kind == "checkpoint"]

    def only(self, rollout: str) -> History:
        """What concerns one rollout: its own doings, and the steps, faults and recoveries of the engine meanwhile."""
        lives = [life for life in self.lives if life.rollout == rollout]
        spans = [span for span in self.spans if span.rollout == rollout]
        begin = min([each.start for each in (*lives, *spans)], default=0.0)
        ends = [self.length if each.end is None else each.end for each in (*lives, *spans)]
        end = max(ends, default=0.0)

        def concerns(subject: str, since: float, until: float) -> bool:
            return subject == rollout or (subject in ENGINE_PARTS and since <= end and until >= begin)

        def done_of(done: Done) -> bool:
            one = done.recovery
            return concerns(one.subject or one.what, done.end - one.total_s, done.end)

        return replace(
            self,
            length=end,
            begin=begin,
            steps=[step for step in self.steps if step.end >= begin and step.end - (step.wall_s or 0.0) <= end],
            faults=[fault for fault in self.faults if concerns(fault.subject, fault.x, fault.detected or fault.x)],
            recoveries=[done for done in self.recoveries if done_of(done)],
            spans=spans,
            lives=lives,
            cuts=[cut for cut in self.cuts if cut.rollout == rollout],
        )


ENGINE_PARTS = frozenset(("worker", "shadow", "owner", "weights", "nursery", "device"))
_SPANS = {ev.GENERATE: "generate", ev.EXEC: "exec", ev.CHECKPOINT: "checkpoint"}


def history_of(events: list[Event]) -> History:
    """Sort a run's events; those it does not know are passed over."""
    sorter = _Sorter()
    for event in events:
        sorter.take(event)
    return sorter.result()


class _Sorter:
    def __init__(self) -> None:
        self._found = History()
        self._clock = RunClock()
        self._open: dict[str, float] = {}
        self._steps: dict[int, Step] = {}
        self._awaiting: dict[str, int] = {}  # subject → place of its newest fault in the list
        self._ready_shadow: int | None = None

    def take(self, event: Event) -> None:
        x, found, data, kind = self._clock(event), self._found, event.data, event.kind
        if kind in _SPANS:
            found.spans.append(_span(event, x))
        elif kind == ev.ROLLOUT_STARTED:
            self._open[event.subject] = x
        elif kind in (ev.ROLLOUT_FINISHED, ev.ROLLOUT_FAILED):
            start = self._open.pop(event.subject, max(0.0, x - (number(data, "wall_s") or 0.0)))
            outcome = "finished" if kind == ev.ROLLOUT_FINISHED else "failed"
            found.lives.append(Life(event.subject, min(start, x), x, outcome))
        elif kind == ev.TRAIN_STEP:
            step = whole(data, "step")
            if step is not None:
                self._steps[step] = Step(step, x, number(data, "wall_s"), number(data, "reward_mean"))
        elif kind == ev.FAULT_INJECTED:
            self._injected(Fault(x, text(data, "fault", "unnamed"), event.subject or text(data, "target"), True))
        elif kind == ev.FAULT_DETECTED:
            self._detected(Fault(x, text(data, "fault", "unnamed"), event.subject, False, x))
        elif kind == ev.RECOVERED:
            place = self._awaiting.pop(event.subject, None)
            fault = None if place is None else found.faults[place]
            kind_of = fault.fault if fault and fault.injected else None
            found.recoveries.append(Done(x, recovery_of(event, kind_of), fault))
        elif kind == ev.ROLLOUT_TRUNCATED:
            found.cuts.append(Cut(x, event.subject, text(data, "reason")))
        elif kind in (ev.WORKER_STATE, ev.SHADOW_STATE):
            self._process(event, x)

    def result(self) -> History:
        found = self._found
        found.length, found.resumes = self._clock.length, self._clock.resumes
        found.lives.extend(Life(rollout, start, None, "in flight") for rollout, start in self._open.items())
        found.steps = [self._steps[step] for step in sorted(self._steps)]
        return found

    def _injected(self, fault: Fault) -> None:
        place = self._awaiting.get(fault.subject)
        if place is not None and not self._found.faults[place].injected:
            # its detection was reported first
            fault.detected = self._found.faults[place].detected
            self._found.faults[place] = fault
        else:
            self._awaiting[fault.subject] = len(self._found.faults)
            self._found.faults.append(fault)

    def _detected(self, fault: Fault) -> None:
        if fault.fault == "checkpoint":  # one checkpoint less, but nothing broke
            return
        if fault.subject == "shadow":
            self._ready_shadow = None
            self._found.shadows.append(State(fault.x, "dead", None, fault.fault))
        if fault.subject not in self._awaiting:
            if fault.lane == "worker" and fault.subject != "worker":  # a shadow or an owner: no recovery will answer
                self._found.faults.append(fault)
                return
            self._awaiting[fault.subject] = len(self._found.faults)
            self._found.faults.append(fault)
            return
        known = self._found.faults[self._awaiting[fault.subject]]
        known.detected = fault.detected if known.detected is None else known.detected

    def _process(self, event: Event, x: float) -> None:
        generation = whole(event.data, "generation")
        state = State(x, text(event.data, "state"), generation, text(event.data, "reason"))
        if event.kind == ev.SHADOW_STATE:
            self._ready_shadow = generation if state.state == "ready" else None
            self._found.shadows.append(state)
            return
        self._found.workers.append(state)
        if state.state == "serving" and generation is not None and generation == self._ready_shadow:
            self._found.shadows.append(State(x, "promoted", generation, ""))
            self._ready_shadow = None


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
