"""`summary.json`: a run in numbers.

Built from events while the run goes on, or afterwards from `metrics.jsonl`. Where the journal has counted rollouts and
tokens, its counts replace the events' (`Summary.set_rollouts`, `Summary.set_comparison`): an event may be missing after
a SIGKILL, a journal record may not.
"""

from __future__ import annotations

from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from belayer import events as ev
from belayer.events import Event
from belayer.files import write_atomically
from belayer.observe._clock import RunClock
from belayer.observe._values import mean, number, seconds_of, text, whole
from belayer.observe.metrics import scan_metrics

_SMOOTH_STEPS = 3


class Recovery(msgspec.Struct, kw_only=True):
    """One recovery. `phases` in seconds, in their order; `total_s` from fault to usable again, in seconds.

    `at` is when it was complete (seconds since the epoch), `fault` the kind of fault it answers (the injected one,
    where there is one), `reason` what the detector said; null where unknown.
    """

    what: str
    how: str
    fault: str | None
    reason: str | None = None
    subject: str
    phases: dict[str, float]
    total_s: float
    at: float


class RunSummary(msgspec.Struct, kw_only=True):
    """The content of `summary.json`. Names that end in `_s` are seconds; null means not known or not measured."""

    format: int = 1
    finished: bool = False
    """The run reached its end; until then rollouts in flight are not counted as lost."""
    ok: bool | None = None
    seed: int | None = None
    steps: int = 0
    """Optimiser steps done (a step that a resumed run did again counts once)."""
    steps_planned: int | None = None
    sessions: int = 0
    """Times the driver was started: 1 + resumes."""
    injecting: bool | None = None
    """Fault injection was on."""

    rollouts_started: int = 0
    rollouts_delivered: int = 0
    """Different rollouts whose delivery the trainer acknowledged."""
    rollouts_in_flight: int = 0
    rollouts_failed: int = 0
    rollouts_truncated: int = 0
    """Truncations of a context after an environment failure (each is a valid shorter prefix)."""
    lost: int = 0
    """Started, neither delivered nor in flight."""
    duplicated: int = 0
    """Deliveries beyond the first of the same rollout."""
    rollouts_counted_from: Literal["events", "journal"] = "events"

    tokens_changed: int | None = None
    """Tokens that differ from the reference run's; null when not compared."""
    tokens_compared: int = 0
    rollouts_compared: int = 0
    rollouts_identical: int = 0
    compared_with: str | None = None
    tokens_generated: int = 0
    """Tokens of the generate calls that ended (work that was done again counts again)."""

    faults_injected: int = 0
    faults_injected_by_kind: dict[str, int] = msgspec.field(default_factory=dict)
    """For instance {"worker.sigkill": 4}."""
    faults_detected: int = 0
    recoveries: list[Recovery] = msgspec.field(default_factory=list)
    stale_dropped: int = 0
    """Late answers of fenced workers that were refused."""

    reward_first: float | None = None
    """Mean reward of the first step; `reward_last` of the last one."""
    reward_last: float | None = None
    reward_first_3: float | None = None
    """The same over the first (last) three steps."""
    reward_last_3: float | None = None

    wall_s: float = 0.0
    """Time the driver ran, all sessions together; the time between a crash and its resume is not in it."""
    checkpoints: int = 0
    checkpoints_failed: int = 0
    """Checkpoints that were refused, or did not restore so that an older one was used."""
    checkpoint_wall_s: float = 0.0
    """Time spent on checkpoints, summed over all of them."""
    checkpoint_exposed_s: float = 0.0
    """The part of it that rollouts waited for."""
    hidden_checkpoint_share: float | None = None
    """1 − checkpoint_exposed_s / checkpoint_wall_s; null without checkpoints."""

    versions: dict[str, str] = msgspec.field(default_factory=dict)
    belayer: str = ""
    """Version of Belayer that wrote this file."""


class Summary:
    """Accumulates a run's numbers from its events: an event sink, constant work per event."""

    def __init__(self) -> None:
        self._run = RunSummary(belayer=belayer_version())
        self._faults: Counter[str] = Counter()
        self._started: set[str] = set()
        self._failed: set[str] = set()
        self._delivered: set[str] = set()
        self._duplicated = 0
        self._rewards: dict[int, float] = {}
        self._steps: set[int] = set()
        self._hit: dict[str, str] = {}
        self._clock = RunClock()
        self._counted: tuple[int, int, int] | None = None

    @classmethod
    def from_events(cls, events: list[Event]) -> Summary:
        """The summary of events already read."""
        summary = cls()
        for event in events:
            summary(event)
        return summary

    @classmethod
    def from_metrics(cls, path: Path) -> Summary:
        """The summary of a `metrics.jsonl`, for a resumed run or afterwards. Raises `FileNotFoundError`."""
        summary = cls.from_events(scan_metrics(path).events)
        summary._clock.close_session()  # what comes next is not from the driver that wrote the file
        return summary

    def __call__(self, event: Event) -> None:
        """Count one event; events that the summary does not know only move its clock."""
        self._clock(event)
        handle = _HANDLERS.get(event.kind)
        if handle is not None:
            handle(self, event)

    def set_rollouts(self, *, started: int, delivered: int, duplicated: int) -> None:
        """Replace the events' counts by the journal's."""
        self._counted = (started, delivered, duplicated)

    def set_comparison(
        self,
        *,
        reference: str,
        rollouts_compared: int,
        rollouts_identical: int,
        tokens_compared: int,
        tokens_changed: int,
    ) -> None:
        """What the comparison with a run of the same seed without faults found; `reference` names that run."""
        self._run.compared_with = reference
        self._run.rollouts_compared = rollouts_compared
        self._run.rollouts_identical = rollouts_identical
        self._run.tokens_compared = tokens_compared
        self._run.tokens_changed = tokens_changed

    def result(self) -> RunSummary:
        """The summary as of now. A copy: later events do not change it."""
        run = msgspec.structs.replace(self._run)
        run.steps = len(self._steps)
        run.sessions = self._clock.sessions
        run.finished = self._clock.finished
        run.faults_injected = self._faults.total()
        run.faults_injected_by_kind = dict(sorted(self._faults.items()))
        run.recoveries = list(self._run.recoveries)
        run.versions = dict(self._run.versions)
        if self._counted:
            run.rollouts_started, run.rollouts_delivered, run.duplicated = self._counted
            run.rollouts_counted_from = "journal"
        else:
            run.rollouts_started = len(self._started)
            run.rollouts_delivered = len(self._delivered)
            run.duplicated = self._duplicated
        missing = max(0, run.rollouts_started - run.rollouts_delivered)
        waiting = len(self._started - self._delivered - self._failed)
        run.rollouts_in_flight = 0 if run.finished else min(missing, waiting)
        run.lost = missing - run.rollouts_in_flight
        run.rollouts_failed = len(self._failed)
        if self._rewards:
            means = [self._rewards[step] for step in sorted(self._rewards)]
            run.reward_first, run.reward_last = means[0], means[-1]
            run.reward_first_3, run.reward_last_3 = mean(means[:_SMOOTH_STEPS]), mean(means[-_SMOOTH_STEPS:])
        run.wall_s = self._clock.length
        if run.checkpoint_wall_s > 0:
            run.hidden_checkpoint_share = 1 - run.checkpoint_exposed_s / run.checkpoint_wall_s
        return run

    def write(self, path: Path) -> RunSummary:
        """Write `summary.json` in one step and return what was written. Raises `StorageFull`, `OSError`."""
        run = self.result()
        write_atomically(path, msgspec.json.format(msgspec.json.encode(run), indent=2) + b"\n")
        return run

    def _run_started(self, event: Event) -> None:
        run = self._run
        run.ok = None
        seed, steps, inject = whole(event.data, "seed"), whole(event.data, "steps"), event.data.get("inject")
        run.seed = seed if seed is not None else run.seed
        run.steps_planned = steps if steps is not None else run.steps_planned
        run.injecting = inject if isinstance(inject, bool) else run.injecting
        versions = event.data.get("versions")
        if isinstance(versions, dict):
            run.versions.update({str(name): str(value) for name, value in versions.items()})

    def _run_finished(self, event: Event) -> None:
        ok = event.data.get("ok")
        self._run.ok = ok if isinstance(ok, bool) else None

    def _compared(self, event: Event) -> None:
        self._run.compared_with = text(event.data, "reference") or None
        self._run.rollouts_compared = whole(event.data, "rollouts_compared") or 0
        self._run.rollouts_identical = whole(event.data, "rollouts_identical") or 0
        self._run.tokens_compared = whole(event.data, "tokens_compared") or 0
        self._run.tokens_changed = whole(event.data, "tokens_changed")

    def _step(self, event: Event) -> None:
        step = whole(event.data, "step")
        if step is None:
            return
        self._steps.add(step)
        reward = number(event.data, "reward_mean")
        if reward is not None:
            self._rewards[step] = reward

    def _rollout_started(self, event: Event) -> None:
        self._started.add(event.subject)
        self._failed.discard(event.subject)

    def _rollout_finished(self, event: Event) -> None:
        self._started.add(event.subject)
        self._failed.discard(event.subject)

    def _rollout_failed(self, event: Event) -> None:
        self._started.add(event.subject)
        self._failed.add(event.subject)

    def _rollout_delivered(self, event: Event) -> None:
        self._started.add(event.subject)
        if event.subject in self._delivered:
            self._duplicated += 1
        self._delivered.add(event.subject)

    def _truncated(self, event: Event) -> None:
        self._run.rollouts_truncated += 1

    def _generated(self, event: Event) -> None:
        self._run.tokens_generated += whole(event.data, "tokens") or 0

    def _checkpoint(self, event: Event) -> None:
        self._run.checkpoints += 1
        wall, exposed = checkpoint_times(event)
        self._run.checkpoint_wall_s += wall
        self._run.checkpoint_exposed_s += exposed

    def _injected(self, event: Event) -> None:
        fault = text(event.data, "fault", "unnamed")
        self._faults[fault] += 1
        self._hit[event.subject or text(event.data, "target")] = fault

    def _detected(self, event: Event) -> None:
        if text(event.data, "fault") == "checkpoint":
            self._run.checkpoints_failed += 1
        else:
            self._run.faults_detected += 1

    def _recovered(self, event: Event) -> None:
        self._run.recoveries.append(recovery_of(event, self._hit.pop(event.subject, None)))

    def _stale(self, event: Event) -> None:
        self._run.stale_dropped += whole(event.data, "count") or 1


_HANDLERS = {
    ev.RUN_STARTED: Summary._run_started,
    ev.RUN_FINISHED: Summary._run_finished,
    ev.RUN_COMPARED: Summary._compared,
    ev.TRAIN_STEP: Summary._step,
    ev.ROLLOUT_STARTED: Summary._rollout_started,
    ev.ROLLOUT_FINISHED: Summary._rollout_finished,
    ev.ROLLOUT_FAILED: Summary._rollout_failed,
    ev.ROLLOUT_DELIVERED: Summary._rollout_delivered,
    ev.ROLLOUT_TRUNCATED: Summary._truncated,
    ev.GENERATE: Summary._generated,
    ev.CHECKPOINT: Summary._checkpoint,
    ev.FAULT_INJECTED: Summary._injected,
    ev.FAULT_DETECTED: Summary._detected,
    ev.RECOVERED: Summary._recovered,
    ev.STALE_DROPPED: Summary._stale,
}


def recovery_of(event: Event, injected: str | None = None) -> Recovery:
    """A `recovered` event as a `Recovery`; `injected` is the kind of the injected fault that it answers."""
    phases = seconds_of(event.data, "phases")
    total = number(event.data, "total_s")
    return Recovery(
        what=text(event.data, "what", "unknown"),
        how=text(event.data, "how", "unknown"),
        fault=injected or text(event.data, "fault") or None,
        reason=(text(event.data, "reason") or text(event.data, "fault")) or None,
        subject=event.subject,
        phases=phases,
        total_s=sum(phases.values()) if total is None else total,
        at=event.at,
    )


def checkpoint_times(event: Event) -> tuple[float, float]:
    """Seconds from the moment a checkpoint was wanted to its end, and how many of them the rollout waited.

    The queue of the host's dumps is part of both, so that what is hidden and what is waited for add up to the whole.
    """
    whole = sum(max(0.0, number(event.data, name) or 0.0) for name in ("wall_s", "queued_s"))
    return whole, min(whole, max(0.0, number(event.data, "exposed_s") or 0.0))


def read_summary(path: Path) -> RunSummary:
    """Read a `summary.json`. Raises `FileNotFoundError`, and `msgspec.DecodeError` if it is none."""
    return msgspec.json.decode(path.read_bytes(), type=RunSummary)


def belayer_version() -> str:
    """The installed version, or "source" when it runs from a source tree that was never installed."""
    try:
        return version("belayer")
    except PackageNotFoundError:
        return "source"
