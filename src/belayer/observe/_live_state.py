"""What the live view knows: a few counters that every event updates in constant time."""

from __future__ import annotations

import threading
from collections import Counter, deque
from copy import copy
from dataclasses import dataclass, field

from belayer import events as ev
from belayer.events import Event
from belayer.observe._engine_state import EngineState
from belayer.observe._values import number, text, whole
from belayer.observe.summary import Recovery, checkpoint_times, recovery_of

_RATE_WINDOW_S = 10
_REWARDS = 240
_RECENT = 12
_TOTALS = 512  # recoveries of which the median is shown


@dataclass(slots=True)
class Recent:
    """A line of the list: a fault and the recovery that answered it, if any; `at` in seconds since the epoch."""

    at: float
    fault: str
    subject: str
    injected: bool
    recovery: Recovery | None = None


@dataclass(slots=True)
class LiveState(EngineState):
    """Everything the view shows. Read it through `LiveFeed.snapshot`."""

    begun: float | None = None
    ended: float | None = None
    ok: bool | None = None
    seed: int | None = None
    steps_planned: int | None = None
    step: int | None = None
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_REWARDS))
    step_walls: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    in_flight: int = 0
    finished: int = 0
    delivered: int = 0
    failed: int = 0
    truncated: int = 0
    tokens: int = 0
    buckets: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_RATE_WINDOW_S + 1))
    faults: Counter[str] = field(default_factory=Counter)
    recovered: Counter[str] = field(default_factory=Counter)
    totals: dict[str, deque[float]] = field(default_factory=dict)
    recent: deque[Recent] = field(default_factory=lambda: deque(maxlen=_RECENT))
    sandboxes: int | None = None
    checkpoints: int = 0
    checkpoint_wall_s: float = 0.0
    checkpoint_exposed_s: float = 0.0

    def tokens_per_s(self, now: float) -> float:
        """Tokens generated per second, over the last ten whole seconds (or since the start)."""
        second = int(now)
        total = sum(tokens for at, tokens in self.buckets if second - _RATE_WINDOW_S <= at < second)
        age = now - self.begun if self.begun is not None else _RATE_WINDOW_S
        return total / max(1.0, min(_RATE_WINDOW_S, age))

    def eta_s(self) -> float | None:
        """Seconds to the end, from the newest steps' length; None while unknown."""
        if not self.steps_planned or not self.step_walls or self.step is None:
            return None
        return max(0, self.steps_planned - self.step - 1) * sum(self.step_walls) / len(self.step_walls)

    @property
    def hidden_share(self) -> float | None:
        return 1 - self.checkpoint_exposed_s / self.checkpoint_wall_s if self.checkpoint_wall_s > 0 else None


class LiveFeed:
    """Takes events on the run's thread and hands snapshots to the thread that draws."""

    def __init__(self) -> None:
        self._state = LiveState()
        self._open: set[str] = set()
        self._awaiting: dict[str, Recent] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._take(event)

    def snapshot(self) -> LiveState:
        """A copy that later events do not change (at most a few hundred numbers)."""
        with self._lock:
            taken = copy(self._state)
            taken.rewards = copy(taken.rewards)
            taken.step_walls = copy(taken.step_walls)
            taken.buckets = copy(taken.buckets)
            taken.faults = copy(taken.faults)
            taken.recovered = copy(taken.recovered)
            taken.totals = {what: copy(totals) for what, totals in taken.totals.items()}
            taken.recent = deque(copy(line) for line in taken.recent)
            return taken

    def _take(self, event: Event) -> None:
        state, data, kind = self._state, event.data, event.kind
        if state.begun is None:
            state.begun = event.at
        state.take(event)
        if kind == ev.GENERATE:
            tokens = whole(data, "tokens") or 0
            state.tokens += tokens
            second = int(event.at)
            if state.buckets and state.buckets[-1][0] == second:
                state.buckets[-1] = (second, state.buckets[-1][1] + tokens)
            else:
                state.buckets.append((second, tokens))
        elif kind == ev.CHECKPOINT:
            state.checkpoints += 1
            wall, exposed = checkpoint_times(event)
            state.checkpoint_wall_s += wall
            state.checkpoint_exposed_s += exposed
        elif kind == ev.ROLLOUT_STARTED:
            self._open.add(event.subject)
            state.in_flight = len(self._open)
        elif kind in (ev.ROLLOUT_FINISHED, ev.ROLLOUT_FAILED):
            self._open.discard(event.subject)
            state.in_flight = len(self._open)
            if kind == ev.ROLLOUT_FINISHED:
                state.finished += 1
            else:
                state.failed += 1
        elif kind == ev.ROLLOUT_DELIVERED:
            state.delivered += 1
        elif kind == ev.ROLLOUT_TRUNCATED:
            state.truncated += 1
        elif kind == ev.TRAIN_STEP:
            self._step(event)
        elif kind in (ev.FAULT_INJECTED, ev.FAULT_DETECTED):
            self._fault(event)
        elif kind == ev.RECOVERED:
            self._recovered(event)
        elif kind == ev.SANDBOXES_RUNNING:
            state.sandboxes = whole(data, "count")
        elif kind == ev.RUN_PHASE:
            state.ended = None
        elif kind == ev.RUN_STARTED:
            state.ended = None
            state.seed = whole(data, "seed")
            state.steps_planned = whole(data, "steps") or state.steps_planned
        elif kind == ev.RUN_FINISHED:
            state.ended = event.at
            ok = data.get("ok")
            state.ok = ok if isinstance(ok, bool) else None

    def _step(self, event: Event) -> None:
        state = self._state
        step, reward, wall = whole(event.data, "step"), number(event.data, "reward_mean"), number(event.data, "wall_s")
        state.step = step if step is not None else state.step
        if reward is not None:
            state.rewards.append(reward)
        if wall is not None:
            state.step_walls.append(wall)

    def _fault(self, event: Event) -> None:
        subject = event.subject or text(event.data, "target")
        fault = text(event.data, "fault", "unnamed")
        injected = event.kind == ev.FAULT_INJECTED
        waiting = self._awaiting.get(subject)
        if injected:
            self._state.faults[fault] += 1
        if fault == "checkpoint":  # one checkpoint less, but nothing broke
            return
        if waiting is None:
            line = Recent(event.at, fault, subject, injected)
            self._awaiting[subject] = line
            self._state.recent.append(line)
        elif injected:
            if waiting.injected:  # the one before was never answered
                self._awaiting[subject] = Recent(event.at, fault, subject, injected)
                self._state.recent.append(self._awaiting[subject])
            else:  # its detection was reported first
                waiting.fault, waiting.injected = fault, True

    def _recovered(self, event: Event) -> None:
        state = self._state
        line = self._awaiting.pop(event.subject, None)
        one = recovery_of(event, line.fault if line and line.injected else None)
        state.recovered[one.what] += 1
        state.totals.setdefault(one.what, deque(maxlen=_TOTALS)).append(one.total_s)
        if line is None:
            line = Recent(event.at - one.total_s, one.fault or "", event.subject or one.what, False)
            state.recent.append(line)
        line.recovery = one
